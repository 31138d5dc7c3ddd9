"""What a thread keeps of its share of a row from one pass to the next, in registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kagent_core.codegen.expressions import Expr, operands, walk
from kagent_core.codegen.loops.states import is_compound, within_block
from kagent_core.codegen.primitives import PRIMITIVES

KEPT_STEPS = 16
"""Most elements of a row that a thread has where it keeps some of their values: the loop over them is written out."""

KEPT_VALUES = 48
"""Most values that a thread keeps: more would take the registers of threads that could run in the meantime."""

KEPT_COST = 8
"""What a value that is no load costs at least to be kept, in additions."""


def values_to_keep(passes: Sequence[Sequence[Expr]], steps: int) -> list[Expr]:
    """Return the values that more than one pass needs, and that are better kept than read or computed again.

    Parameters
    ----------
    passes
        What each pass computes at every step, in order.
    steps
        Of a thread in each pass.
    """
    found: dict[int, Expr] = {}
    for number, values in enumerate(passes):
        later = {key for others in passes[number + 1 :] for key in _computed(others, found)}
        worth = [node for key, node in _computed(values, found).items() if key in later and _is_worth_it(node, found)]
        inside = {inner.number for node in worth for inner in walk(node, into_reductions=False) if inner is not node}
        found.update((node.number, node) for node in worth if node.number not in inside)
    return list(found.values())[: KEPT_VALUES // steps]


def at_every_step(nodes: Sequence[Expr]) -> list[Expr] | None:
    """Return what a pass of some reductions computes at every step; None where it takes its elements in blocks."""
    values: list[Expr] = []
    for node in nodes:
        if is_compound(node) and any(inner.op == "reduce" for inner in within_block(*node.args)):
            return None
        values += node.args if is_compound(node) else node.args[:1]
    return values


def _computed(values: Sequence[Expr], kept: Mapping[int, Expr]) -> dict[int, Expr]:
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


def _is_worth_it(node: Expr, kept: Mapping[int, Expr]) -> bool:
    if node.op == "load":
        return True
    if node.op != "cast" and node.op not in PRIMITIVES:
        return False
    inside = _computed([node], kept).values()
    return sum(PRIMITIVES[inner.op].cost for inner in inside if inner.op in PRIMITIVES) >= KEPT_COST
