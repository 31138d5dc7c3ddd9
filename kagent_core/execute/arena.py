"""The arena: one piece of memory for a segment's intermediates, offsets chosen by liveness."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kagent_core.specs import BufferSpec, KernelTask

ALIGNMENT = 64
"""Bytes. A cache line, and more than any vector or complex128 needs."""


@dataclass(frozen=True)
class ArenaPlan:
    """Byte offset of each planned buffer, and the arena's size in bytes."""

    offsets: dict[int, int]
    nbytes: int


def plan_arena(
    tasks: Sequence[KernelTask],
    buffers: Sequence[BufferSpec],
    exports: Collection[int],
    keep_exports: bool,
    streams: Sequence[int] = (),
    in_place: Collection[int] = (),
) -> ArenaPlan:
    """Give every buffer that a task makes a place in the arena.

    Buffers whose lifetimes (first to last task that touches them, in `tasks`' order) overlap never share bytes.
    The smallest free block that is large enough is taken, so the cost is n log n in the number of buffers.
    Results that a kernel allocates itself are not planned.

    Parameters
    ----------
    tasks
        In the order in which they run.
    buffers
        Every buffer of the program, by id.
    exports
        Buffers that a later segment or the caller reads.
    keep_exports
        Whether exports lie in the arena too, to its run's end (device memory, copied out afterwards), or are made
        anew on every run (host memory, given to the caller).
    streams
        The stream that each task is meant for, by position. What tasks of different streams make shares no bytes, for
        taking turns in them would let one chain of tasks wait for another. By default there is one.
    in_place
        Buffers that have memory already.
    """
    first, last = _lifetimes(tasks)
    if keep_exports:
        last.update((buffer, len(tasks)) for buffer in exports)
    made = {spec.buffer for task in tasks for spec in task.results}
    allocated_by_kernel = {spec.buffer for task in tasks if task.kernel.allocates for spec in task.results}
    made -= {*allocated_by_kernel, *in_place}
    planned = [buffer for buffer in made if keep_exports or buffer not in exports]
    offsets: dict[int, int] = {}
    nbytes = 0
    for stream in sorted(set(streams)) or [0]:
        own = [buffer for buffer in planned if not streams or streams[first[buffer]] == stream]
        nbytes += _place(own, nbytes, buffers, first, last, offsets)
    return ArenaPlan(offsets, nbytes)


def _place(
    planned: Collection[int],
    begin: int,
    buffers: Sequence[BufferSpec],
    first: Mapping[int, int],
    last: Mapping[int, int],
    offsets: dict[int, int],
) -> int:
    """Enter places of buffers from an offset on, and return how many bytes they need together."""
    free = _FreeList()
    ending: dict[int, list[int]] = {}
    position = 0
    for buffer in sorted(planned, key=lambda buffer: (first[buffer], buffer)):
        while position < first[buffer]:
            for dead in ending.pop(position, ()):
                free.give(offsets[dead] - begin, _rounded(buffers[dead].nbytes))
            position += 1
        offsets[buffer] = begin + free.take(_rounded(buffers[buffer].nbytes))
        ending.setdefault(last[buffer], []).append(buffer)
    return free.nbytes


def _lifetimes(tasks: Sequence[KernelTask]) -> tuple[dict[int, int], dict[int, int]]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, task in enumerate(tasks):
        for span in (*task.reads, *task.writes):
            first.setdefault(span.buffer, position)
            last[span.buffer] = position
    return first, last


def _rounded(nbytes: int) -> int:
    return max(ALIGNMENT, (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)


class _FreeList:
    """Free blocks by size and by offset; grows at its end when nothing fits."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._by_offset: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        index = bisect_left(self._by_size, (nbytes, -1))
        if index < len(self._by_size):
            size, offset = self._by_size.pop(index)
            self._by_offset.pop(bisect_left(self._by_offset, (offset, size)))
            if size > nbytes:
                self._insert(offset + nbytes, size - nbytes)
            return offset
        if self._by_offset and sum(self._by_offset[-1]) == self.nbytes:  # the last block grows
            offset, size = self._by_offset.pop()
            self._by_size.pop(bisect_left(self._by_size, (size, offset)))
            self.nbytes = offset + nbytes
            return offset
        offset = self.nbytes
        self.nbytes += nbytes
        return offset

    def give(self, offset: int, size: int) -> None:
        index = bisect_left(self._by_offset, (offset, 0))
        if index < len(self._by_offset) and self._by_offset[index][0] == offset + size:
            next_offset, next_size = self._by_offset.pop(index)
            self._by_size.pop(bisect_left(self._by_size, (next_size, next_offset)))
            size += next_size
        if index > 0 and sum(self._by_offset[index - 1]) == offset:
            previous_offset, previous_size = self._by_offset.pop(index - 1)
            self._by_size.pop(bisect_left(self._by_size, (previous_size, previous_offset)))
            offset, size = previous_offset, size + previous_size
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        insort(self._by_offset, (offset, size))
