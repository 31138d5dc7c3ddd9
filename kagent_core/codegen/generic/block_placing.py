"""Putting slices of one tensor at places of another, by blocks whose threads work together: see `placing`.

A block has some places and some columns to itself, and holds their elements in shared memory. Its threads look through
the sources together, list those that go there, and then each thread goes over the list for its own elements, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kagent_core.codegen.generic.block_scans import PER_THREAD, listed, listed_length, threads_for
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.placing import HELD, Placing
from kagent_core.codegen.groups import ENOUGH_ITEMS, THREAD, power_above

SMALL, ENOUGH_SMALL = 64, 1024
"""Elements of a tensor and of what goes there that are few; and tensors that are then enough for each to have a
work-item."""


def write_placing(k: KernelBuilder, placing: Placing) -> None:
    """Write the kernel for blocks where the device has them, else for work-items."""
    most = ENOUGH_ITEMS if placing.row_count + placing.count > SMALL else ENOUGH_SMALL
    if k.work_groups is None or placing.outer_count >= most:
        placing.write_items(k)
    else:
        _BlockPlacing(k, placing).write()


class _BlockPlacing:
    def __init__(self, k: KernelBuilder, placing: Placing) -> None:
        assert k.work_groups is not None
        self.k, self.placing = k, placing
        self.kind = k.compute_type(placing.dtype)
        useful = max(placing.count // PER_THREAD, min(placing.row_count * placing.column_count, HELD) // PER_THREAD)
        self.threads = threads_for(k, useful, k.work_groups.threads)
        self.width = min(power_above(placing.column_count), self.threads)
        self.height = max(self._cells() // self.width, 1)

    def _cells(self) -> int:
        """Return how many elements a block holds: as many as shared memory has room for."""
        groups = self.k.work_groups
        assert groups is not None
        each = int(self.kind.lstrip("biuf")) // 8 + 4 * self.placing.counts
        room = groups.local_nbytes - 4 * (PER_THREAD + 2) * self.threads
        cells = HELD
        while cells > self.width and cells * each > room:
            cells //= 2
        return cells

    def write(self) -> None:
        """Write the kernel."""
        k, placing = self.k, self.placing
        chunks = max(-(-placing.row_count // self.height), 1)
        strips = -(-placing.column_count // self.width)
        k.fits(placing.row_count, placing.count, placing.column_count)
        with k.groups(*placing.outer, ("chunk", chunks), ("strip", strips), threads=self.threads):
            self._open()
            with self._each_cell() as cell:
                k.add(f"held[{cell}] = {placing.first(k)};", *([f"sources[{cell}] = 0;"] * placing.counts))
            with listed(k, placing.sources(k), self._candidate):
                self._join()
            with self._each_cell() as cell:
                k.store(placing.place, placing.finished(k, f"held[{cell}]", f"sources[{cell}]"))

    def _open(self) -> None:
        """Write what the block has to itself, and which column of it the thread has."""
        k, placing, index, width = self.k, self.placing, self.k.index_type, self.width
        k.shared(self.kind, "held", self.height * width)
        if placing.counts:
            k.shared("i32", "sources", self.height * width)
        k.add(
            f"const {index} first = chunk * {self.height}, column = strip * {width} + {THREAD} % {width};",
            f"const i32 rows = (i32){k.least(f'{k.size(placing.row_count)} - first', str(self.height))};",
            f"const i32 across = {THREAD} % {width}, down = {THREAD} / {width};",
            f"const i32 end = column < {k.size(placing.column_count)} ? rows : 0;",
            *placing.coordinates(k, placing.columns, "column"),
        )

    @contextmanager
    def _each_cell(self) -> Iterator[str]:
        """Write a loop over the thread's own elements, and give the text of where each is held."""
        k = self.k
        with k.block(f"for (i32 row = down; row < end; row += {self.threads // self.width})"):
            k.add(*self.placing.coordinates(k, self.placing.rows, "(first + row)"))
            yield f"row * {self.width} + across"

    def _candidate(self, source: str) -> None:
        k, placing = self.k, self.placing
        inside = placing.source_place(k, source)
        k.add(f"if ({inside} && at >= first && at < first + rows) found = (i32)(at - first);")

    def _join(self) -> None:
        """Write what goes over the list: each thread for the elements that it alone has."""
        k, placing, length, tall = self.k, self.placing, listed_length(self.k), self.threads // self.width
        with k.block("for (i32 m = 0; m < taken; m++)"):
            k.add(f"const i32 row = kept[m] / {length};")
            with k.block(f"if (row % {tall} == down && end > 0)" if tall > 1 else "if (end > 0)"):
                k.add(f"const {k.index_type} s = begin + kept[m] % {length};")
                k.add(f"const i32 cell = row * {self.width} + across;")
                k.add(f"const {self.kind} before = held[cell], source = {placing.value('s')};")
                k.add(f"held[cell] = {placing.joined(k)};", *(["sources[cell]++;"] * placing.counts))
