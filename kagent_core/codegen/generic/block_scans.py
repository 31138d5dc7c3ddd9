"""What the threads of a block find together: running values in their order, and lists of what some have found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.loops import Rows
from kagent_core.codegen.groups import ENOUGH_ITEMS, THREAD, power_above
from kagent_core.specs import TensorSpec

PER_THREAD = 8
"""Neighbours that each thread takes at a time: elements of a row, or candidates of a list."""

LEAST_THREADS = 32
"""Of a block: as many as run at once on most GPUs."""

ENOUGH_ACROSS = 4096
"""Rows that are many enough for each to have a work-item where neighbours in memory belong to different ones."""

Merge = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[str]]
"""Given the names of two states, and of a third, returns statements that make the third what the two are together, of
which the first one comes before."""


def rows_by_blocks(k: KernelBuilder, rows: Rows, spec: TensorSpec) -> bool:
    """Return whether the rows of a tensor are better taken by blocks than by work-items."""
    if k.work_groups is None or rows.length < min(LEAST_THREADS, k.work_groups.threads):
        return False
    together = spec.shape and spec.strides[rows.dim] == 1
    return math.prod(size for _, size in rows.axes) < (ENOUGH_ITEMS if together else ENOUGH_ACROSS)


def threads_for(k: KernelBuilder, length: int, most: int) -> int:
    """Return how many threads a block has whose threads take so many pieces, a power of two."""
    assert k.work_groups is not None
    return min(k.work_groups.threads, most, max(power_above(length), LEAST_THREADS))


def scan_length(k: KernelBuilder) -> int:
    """Return how many values a block's threads share to scan one of theirs."""
    return 2 * k.threads


def write_scan(k: KernelBuilder, states: Sequence[tuple[str, str]], merge: Merge, identity: Sequence[str]) -> None:
    """Write what makes each thread's state that of all threads up to and before it (Hillis and Steele's scan).

    Afterwards ``NAME`` is what the thread's own state and those before came to, ``NAME_before`` the same without its
    own, and ``NAME_all`` that of all threads.

    Parameters
    ----------
    k
        Where to write it. Every thread must come here.
    states
        C type and name of each variable of a state.
    merge
        What two states are together.
    identity
        The variables of a state that changes nothing.
    """
    threads = k.threads
    for kind, name in states:
        k.shared(kind, f"{name}_scan", scan_length(k))
        k.add(f"{name}_scan[{THREAD}] = {name};")
    side = k.name("side")
    k.add(f"i32 {side} = 0;")
    k.barrier()
    with k.block(f"for (i32 step = 1; step < {threads}; step *= 2)"):
        with k.block(f"if ({THREAD} >= step)"):
            at = f"[{side} + {THREAD} - step]"
            k.add(*(f"const {kind} {name}_other = {name}_scan{at};" for kind, name in states))
            write_merge(k, states, merge, [f"{name}_other" for _, name in states], [name for _, name in states])
        k.add(f"{side} = {threads} - {side};")
        k.add(*(f"{name}_scan[{side} + {THREAD}] = {name};" for _, name in states))
        k.barrier()
    for (kind, name), first in zip(states, identity, strict=True):
        k.add(
            f"const {kind} {name}_before = {THREAD} ? {name}_scan[{side} + {THREAD} - 1] : {first};",
            f"const {kind} {name}_all = {name}_scan[{side} + {threads - 1}];",
        )


def write_merge(
    k: KernelBuilder, states: Sequence[tuple[str, str]], merge: Merge, before: Sequence[str], after: Sequence[str]
) -> None:
    """Write what sets the variables of a state to what two others are together."""
    made = [k.name("merged") for _ in states]
    k.add(*(f"{kind} {name};" for (kind, _), name in zip(states, made, strict=True)))
    with k.block(""):
        k.add(*merge(before, after, made))
    k.add(*(f"{name} = {text};" for (_, name), text in zip(states, made, strict=True)))


def listed_length(k: KernelBuilder) -> int:
    """Return how many candidates `listed` goes over at a time."""
    return PER_THREAD * k.threads


@contextmanager
def listed(k: KernelBuilder, count: str, candidate: Callable[[str], None]) -> Iterator[None]:
    """Write a loop over candidates, and inside what is done with a list of those that are taken, in order.

    Inside, ``taken`` says how many there are; entry ``m`` of the array ``kept`` is ``found`` of one of them, times
    `listed_length`, plus its number from ``begin`` on.

    Parameters
    ----------
    k
        Where to write it. The block must be the same for all threads.
    count
        How many candidates there are.
    candidate
        Given the text of a candidate's number, writes what sets ``found``, an i32 that is -1 before: to anything else
        where it is taken.
    """
    length = listed_length(k)
    k.shared("i32", "kept", length)
    with k.loop("begin", count, step=length):
        with k.block(f"for (i32 u = {THREAD}; u < {length}; u += {k.threads})"):
            k.add("i32 found = -1;")
            with k.block(f"if (begin + u < {count})"):
                candidate("(begin + u)")
            k.add("kept[u] = found;")
        k.barrier()
        k.add(f"i32 own[{PER_THREAD}], many = 0;")
        with k.unrolled("u", PER_THREAD):
            k.add(f"own[u] = kept[{THREAD} * {PER_THREAD} + u];", "many += own[u] >= 0;")
        write_scan(k, [("i32", "many")], lambda a, b, made: [f"{made[0]} = {a[0]} + {b[0]};"], ["0"])
        k.add("i32 next = many_before;", "const i32 taken = many_all;")
        with k.unrolled("u", PER_THREAD):
            k.add(f"if (own[u] >= 0) kept[next++] = own[u] * {length} + {THREAD} * {PER_THREAD} + u;")
        k.barrier()
        yield
        k.barrier()  # the next candidates take the place of these
