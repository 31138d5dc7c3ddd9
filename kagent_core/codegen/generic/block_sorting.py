"""Sorting of rows, each by a block whose threads work together: bitonic networks, in shared memory as far as it goes.

Elements are compared with their positions, so that the order of equal ones is kept. All comparisons of the networks put
the earlier element in front, so that a row of any length needs no padding: what lies behind its end would stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagent_core.codegen.generic.block_scans import PER_THREAD, listed, listed_length, rows_by_blocks, threads_for
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.loops import Rows, comes_before
from kagent_core.codegen.groups import THREAD, power_above
from kagent_core.specs import TensorSpec

MOST = 4096
"""Most elements that a block sorts in shared memory."""


def sorts_by_blocks(k: KernelBuilder, self: TensorSpec, rows: Rows, count: int) -> bool:
    """Return whether the first elements of each row's order are better found by blocks than by work-items.

    Where most of a long row is wanted, but not all, there is no place for what is not: that is left to work-items.
    """
    if not rows_by_blocks(k, rows, self):
        return False
    room = _capacity(k, self)
    return count == rows.length or rows.length <= room or count <= room // 2


def _capacity(k: KernelBuilder, self: TensorSpec) -> int:
    """Return how many elements with their positions there is room for in shared memory, a power of two."""
    assert k.work_groups is not None
    each = int(k.language.value_type(self.dtype.name).lstrip("biuf")) // 8 + 8
    room, capacity = k.work_groups.local_nbytes * 3 // 4, MOST
    while capacity * each > room:
        capacity //= 2
    return capacity


def write_sorting(k: KernelBuilder, self: TensorSpec, rows: Rows, count: int, descending: bool) -> None:
    """Write the first elements of each row's order, and where they were."""
    room = min(_capacity(k, self), power_above(rows.length))
    few = rows.length > room and count < rows.length  # what may still be wanted is kept beside what comes next
    threads = threads_for(k, room // 2, room // (2 * PER_THREAD) if few else room)
    sorting = _Sorting(k, self, rows, room, descending)
    k.fits(4 * rows.length)
    with k.groups(*rows.axes, threads=threads):
        k.shared(sorting.kind, "value", room)
        k.shared(sorting.index, "value_at", room)
        if few:
            sorting.write_best(count)
        elif rows.length <= room:
            sorting.load("0", k.size(rows.length))
            sorting.sort_shared(k.size(rows.length))
            sorting.save("0", k.size(count))
        else:
            sorting.write_long()
        k.barrier()  # the next row takes the place of this one


@dataclass(frozen=True)
class _Sorting:
    k: KernelBuilder
    self: TensorSpec
    rows: Rows
    room: int
    descending: bool

    @property
    def kind(self) -> str:
        """The C type of a value."""
        return self.k.language.value_type(self.self.dtype.name)

    @property
    def index(self) -> str:
        """The C type of a position."""
        return "i32" if self.rows.length < 2**31 else "i64"

    # -- between memory and shared memory

    def load(self, begin: str, count: str) -> None:
        """Write what copies elements of the row to shared memory."""
        k = self.k
        with k.block(f"for (i32 u = {THREAD}; u < {count}; u += {k.threads})"):
            k.add(f"const {k.index_type} j = {begin} + u;")
            k.add(f"value[u] = {k.read(self.self).at(*self.rows.place('j'))};", f"value_at[u] = ({self.index})j;")
        k.barrier()

    def load_results(self, begin: str, count: str) -> None:
        """Write what copies elements of the results to shared memory."""
        k, place = self.k, self.rows.place("j")
        with k.block(f"for (i32 u = {THREAD}; u < {count}; u += {k.threads})"):
            k.add(f"const {k.index_type} j = {begin} + u;")
            k.add(f"value[u] = {k.result(0).at(*place)};", f"value_at[u] = ({self.index}){k.result(1).at(*place)};")
        k.barrier()

    def save(self, begin: str, count: str) -> None:
        """Write what copies elements from shared memory to the results."""
        k = self.k
        with k.block(f"for (i32 u = {THREAD}; u < {count}; u += {k.threads})"):
            k.add(f"const {k.index_type} j = {begin} + u;")
            k.store(self.rows.place("j"), "value[u]")
            k.store(self.rows.place("j"), "value_at[u]", 1)

    # -- networks

    def _before(self, a: Sequence[str], b: Sequence[str]) -> str:
        return comes_before(self.self.dtype.name, self.descending, *a, *b)

    def _exchange_shared(self) -> None:
        k = self.k
        k.add(
            f"const {self.kind} a = value[low], b = value[high];",
            f"const {self.index} a_at = value_at[low], b_at = value_at[high];",
            f"if ({self._before(('b', 'b_at'), ('a', 'a_at'))}) "
            "{ value[low] = b; value[high] = a; value_at[low] = b_at; value_at[high] = a_at; }",
        )

    def _exchange_results(self) -> None:
        k = self.k
        low, high = self.rows.place("low"), self.rows.place("high")
        k.add(f"const {self.kind} a = {k.result(0).at(*low)}, b = {k.result(0).at(*high)};")
        k.add(f"const i64 a_at = {k.result(1).at(*low)}, b_at = {k.result(1).at(*high)};")
        with k.block(f"if ({self._before(('b', 'b_at'), ('a', 'a_at'))})"):
            for place, value in ((low, "b"), (high, "a")):
                k.store(place, value)
                k.store(place, f"{value}_at", 1)

    def _step(self, kind: str, pairs: str, count: str, mirrored: str, exchange: Callable[[], None]) -> None:
        """Write one step of a network: neighbours that are ``stride`` apart, or lie across from each other."""
        k = self.k
        with k.block(f"for ({kind} pair = {THREAD}; pair < {pairs}; pair += {k.threads})"):
            k.add(f"const {kind} low = 2 * pair - (pair & (stride - 1));")
            k.add(f"const {kind} high = {mirrored} ? low ^ (2 * stride - 1) : low + stride;")
            with k.block(f"if (high < {count})"):
                exchange()

    def sort_shared(self, count: str) -> None:
        """Write what sorts elements in shared memory, of which there are a number."""
        k = self.k
        with k.block(f"for (i32 width = 2; width < 2 * {count}; width *= 2)"):
            self._merge_shared("width / 2", count, "2 * stride == width")

    def _merge_shared(self, stride: str, count: str, mirrored: str) -> None:
        k = self.k
        with k.block(f"for (i32 stride = {stride}; stride > 0; stride /= 2)"):
            self._step("i32", str(self.room // 2), count, mirrored, self._exchange_shared)
            k.barrier()

    # -- rows that shared memory has no room for

    def write_long(self) -> None:
        """Write the whole row in order: parts in shared memory, which are merged in the results' memory."""
        k, room, index = self.k, self.room, self.k.index_type
        length, pairs = k.size(self.rows.length), k.size(power_above(self.rows.length) // 2)
        with k.loop("begin", length, step=room):
            k.add(f"const i32 count = (i32){k.least(f'{length} - begin', str(room))};")
            self.load("begin", "count")
            self.sort_shared("count")
            self.save("begin", "count")
            k.barrier()
        k.barrier(memory=True)
        with k.block(f"for ({index} width = {2 * room}; width < 2 * {length}; width *= 2)"):
            with k.block(f"for ({index} stride = width / 2; stride >= {room}; stride /= 2)"):
                self._step(index, pairs, length, "2 * stride == width", self._exchange_results)
                k.barrier(memory=True)
            with k.loop("begin", length, step=room):
                k.add(f"const i32 count = (i32){k.least(f'{length} - begin', str(room))};")
                self.load_results("begin", "count")
                self._merge_shared(str(room // 2), "count", "0")
                self.save("begin", "count")
                k.barrier()
            k.barrier(memory=True)

    def write_best(self, count: int) -> None:
        """Write the first few elements of a long row's order: what comes behind all of them so far is left out."""
        k, length, first = self.k, listed_length(self.k), self.k.size(count)
        k.add("i32 filled = 0, is_full = 0;", f"{self.kind} last = 0;", f"{self.index} last_at = 0;")
        element = k.read(self.self).at(*self.rows.place("j"))

        def candidate(number: str) -> None:
            k.add(f"const {k.index_type} j = {number};", f"const {self.kind} a = {element};")
            k.add(f"if (!is_full || {self._before(('a', 'j'), ('last', 'last_at'))}) found = 0;")

        with listed(k, k.size(self.rows.length), candidate):
            with k.block(f"for (i32 m = {THREAD}; m < taken; m += {k.threads})"):
                k.add(f"const {k.index_type} j = begin + kept[m] % {length};")
                k.add(f"value[filled + m] = {element};", f"value_at[filled + m] = ({self.index})j;")
            k.add("filled += taken;")
            k.barrier()
            with k.block(f"if (filled > {self.room - length})"):
                self.sort_shared("filled")
                k.add(f"filled = {k.least('filled', f'(i32){first}')};", f"is_full = filled == {first};")
                k.add("last = value[filled - 1];", "last_at = value_at[filled - 1];")
        self.sort_shared("filled")
        self.save("0", first)
