"""What is kept of a row from one pass to the next, where it is better kept than read or computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kagent_core.codegen.expressions import Expr, operands, walk
from kagent_core.codegen.loops.states import is_compound, within_block
from kagent_core.codegen.primitives import PRIMITIVES

KEPT_STEPS = 16
"""Most elements of a row that a thread has where it keeps some of their values in registers: the loop over them is
written out."""

KEPT_VALUES = 48
"""Most values that a thread keeps: more would take the registers of threads that could run in the meantime."""

KEPT_COST = 8
"""What a value that is no load costs at least to be kept, in additions."""

Kept = Mapping[int, Expr]
"""Values that are kept, by their number."""


def values_to_keep(passes: Sequence[Sequence[Expr]], is_worth_it: Callable[[Expr, Kept], bool]) -> list[Expr]:
    """Return the largest values that more than one pass needs, and that are better kept.

    Parameters
    ----------
    passes
        What each pass computes at every step, in order.
    is_worth_it
        Given a value, and those that are kept already, whether it is better kept than read or computed again.
    """
    found: dict[int, Expr] = {}
    for number, values in enumerate(passes):
        later = {key for others in passes[number + 1 :] for key in _computed(others, found)}
        worth = [node for key, node in _computed(values, found).items() if key in later and is_worth_it(node, found)]
        inside = {inner.number for node in worth for inner in walk(node, into_reductions=False) if inner is not node}
        found.update((node.number, node) for node in worth if node.number not in inside)
    return list(found.values())


def at_every_step(nodes: Sequence[Expr]) -> list[Expr] | None:
    """Return what a pass of some reductions computes at every step; None where it takes its elements in blocks."""
    values: list[Expr] = []
    for node in nodes:
        if is_compound(node) and any(inner.op == "reduce" for inner in within_block(*node.args)):
            return None
        values += node.args if is_compound(node) else node.args[:1]
    return values


def is_read_or_costly(node: Expr, kept: Kept) -> bool:
    """Return whether a value is read from memory, or takes long to compute, where others are kept already."""
    return node.op == "load" or ((node.op == "cast" or node.op in PRIMITIVES) and is_costly(node, kept))


def is_costly(node: Expr, kept: Kept) -> bool:
    """Return whether a value that is no reduction takes long to compute, where others are kept already."""
    if node.op == "reduce":
        return False
    inside = _computed([node], kept).values()
    return sum(PRIMITIVES[inner.op].cost for inner in inside if inner.op in PRIMITIVES) >= KEPT_COST


def _computed(values: Sequence[Expr], kept: Kept) -> dict[int, Expr]:
    """Return what is computed at each step for some values, where others are kept already."""
    found: dict[int, Expr] = {}
    stack = list(values)
    while stack:
        node = stack.pop()
        if node.number in found or node.number in kept or not any(axis.reduced for axis in node.axes):
            continue
        found[node.number] = node
        stack.extend(operands(node))
    return found
