"""How the threads of a block are dealt out to rows: which threads share a row, and how many rows a block has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kagent_core.codegen.groups import ENOUGH_ITEMS, THREAD, power_above
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import LoopNest
from kagent_core.codegen.loops.columns import column_axis

PART, SLOT = "part", "slot"
"""Variables with the number of a thread among those that share its row, and of its row among the block's."""

SHORT_ROW = 32
"""Rows of fewer elements are a work-item's own: they are a line or two of a cache, so that the work-items beside it
find theirs there, and threads that share them would have next to nothing to do."""

STEPS = 8
"""Elements of a row that a thread has at least before more threads share the row: what it does for each is cheap beside
putting the threads' values together."""

COLUMNS_TOGETHER = 32
"""Neighbouring columns of a block: as many as a sub-group often has threads, which then read one line of memory."""

LEAST_TOGETHER = 8
"""Fewest neighbouring columns of a block, where there are more: together they are a sector of memory."""


@dataclass(frozen=True)
class GroupLayout:
    """Which threads of a block share which row.

    Attributes
    ----------
    parts
        Threads that share a row: a power of two.
    slots
        Rows of a block.
    slot_axis
        The outer loop whose neighbouring steps are rows of one block; None where a block has one row at a time.
    across
        Whether neighbouring threads have neighbouring rows rather than neighbouring elements of one row.
    """

    parts: int
    slots: int = 1
    slot_axis: Axis | None = None
    across: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.parts * self.slots

    def declared(self) -> list[str]:
        """Return the declarations of a thread's `PART` and `SLOT`."""
        if self.slots == 1:
            return [f"const i32 {PART} = {THREAD};"]
        part, slot = f"{THREAD} % {self.parts}", f"{THREAD} / {self.parts}"
        if self.across:
            part, slot = f"{THREAD} / {self.slots}", f"{THREAD} % {self.slots}"
        return [f"const i32 {PART} = {part};", f"const i32 {SLOT} = {slot};"]

    def beyond(self, distance: str) -> str:
        """Return the number in the block of the thread that is some parts further in the same row."""
        return f"{THREAD} + {distance} * {self.slots}" if self.across and self.slots > 1 else f"{THREAD} + {distance}"

    @property
    def first(self) -> str:
        """The number in the block of the first thread of the row."""
        if self.slots == 1:
            return "0"
        return SLOT if self.across else f"{THREAD} - {PART}"


def group_layout(nest: LoopNest, passes: Sequence[tuple[tuple[Axis, ...], object]], threads: int) -> GroupLayout | None:
    """Return how the threads of blocks share the rows of a nest; None where each work-item better has its own.

    Parameters
    ----------
    nest
        The loops.
    passes
        Over its inner loops, each with the axes that it reduces.
    threads
        Of a block: a power of two.
    """
    length = max((math.prod(axis.extent for axis in axes) for axes, _ in passes), default=0)
    if length < SHORT_ROW or threads < 2:
        return None
    column = column_axis(nest)
    if column is None:
        return _along(nest, length, threads)
    rows = math.prod(axis.extent for axis in nest.outer)
    return None if rows >= ENOUGH_ITEMS else _across(column, rows, threads)


def _along(nest: LoopNest, length: int, threads: int) -> GroupLayout:
    """Deal out a row's neighbouring elements to neighbouring threads; short rows share a block."""
    rows = math.prod(axis.extent for axis in nest.outer)
    parts = min(max(power_above(-(-length // STEPS)), SHORT_ROW), threads)
    while parts < threads and parts < length and rows * parts < ENOUGH_ITEMS:
        parts *= 2
    if not nest.outer or parts == threads:
        return GroupLayout(threads)
    axis = max(nest.outer, key=lambda axis: axis.extent)
    slots = min(threads // parts, power_above(axis.extent))
    return GroupLayout(threads // slots, slots, axis) if slots > 1 else GroupLayout(threads)


def _across(column: Axis, rows: int, threads: int) -> GroupLayout:
    """Deal out neighbouring columns to neighbouring threads, and each column's elements to several of them."""
    slots = min(COLUMNS_TOGETHER, power_above(column.extent), threads // 2)
    while slots > LEAST_TOGETHER and rows // slots * threads < ENOUGH_ITEMS:
        slots //= 2
    return GroupLayout(threads // slots, slots, column, across=True) if slots > 1 else GroupLayout(threads)
