"""Which bytes a kernel reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kagent_core.extract.hazards import RANDOM_STATE, SIDE_EFFECTS
from kagent_core.specs import MemRange, OpCall


def memory_ranges(
    calls: Sequence[OpCall], inner: Collection[int] = ()
) -> tuple[tuple[MemRange, ...], tuple[MemRange, ...]]:
    """Return the ranges that one kernel for some calls reads and writes.

    What it makes and uses inside itself is only written, and not even that where it is in an `inner` buffer.

    Parameters
    ----------
    calls
        In order.
    inner
        Buffers that stay inside the kernel.
    """
    reads: dict[MemRange, None] = {}
    writes: dict[MemRange, None] = {}
    for call in calls:
        for spec in call.inputs:
            if spec.buffer not in inner:
                reads.update((span, None) for span in spec.ranges if span not in writes)
        for spec in call.outputs:
            if spec.buffer not in inner:
                writes.update((span, None) for span in spec.ranges)
        if call.random:
            reads.setdefault(RANDOM_STATE)
            writes.setdefault(RANDOM_STATE)
        if not call.outputs:
            reads.setdefault(SIDE_EFFECTS)
            writes.setdefault(SIDE_EFFECTS)
    return tuple(reads), tuple(writes)
