"""Sorting: a row per block, or per work-item by a heap in the results' own memory.

Elements are compared with their positions, so that the order of equal ones is kept. NaN is the greatest value.
"""

from __future__ import annotations

from dataclasses import dataclass

from kagent_core.codegen.generic.block_sorting import sorts_by_blocks, write_sorting
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import Rows, comes_before
from kagent_core.specs import TensorSpec


@GENERIC.kernel("aten::sort")
def sort(k: KernelBuilder, self: TensorSpec, dim: int, descending: bool) -> None:
    """Write each row in order, and where its elements were."""
    _best(k, self, dim, Rows(self, dim).length, descending)


@GENERIC.kernel("aten::sort.stable")
def sort_stable(k: KernelBuilder, self: TensorSpec, stable: bool | None, dim: int, descending: bool) -> None:
    """Write each row in order, and where its elements were."""
    _best(k, self, dim, Rows(self, dim).length, descending)


@GENERIC.kernel("aten::topk")
def topk(kernel: KernelBuilder, self: TensorSpec, k: int, dim: int, largest: bool, sorted: bool) -> None:
    """Write the first elements of each row's order, and where they were."""
    _best(kernel, self, dim, k, largest)


def _best(k: KernelBuilder, self: TensorSpec, dim: int, count: int, descending: bool) -> None:
    """Write the first `count` elements of each row's order: a heap whose root is the last of them."""
    x, rows = k.read(self), Rows(self, dim)
    if count == 0:
        return
    if sorts_by_blocks(k, self, rows, count):
        write_sorting(k, self, rows, count, descending)
        return
    heap = _Heap(k, rows, x.dtype, descending)
    first = k.size(count)
    k.fits(2 * count)
    with k.items(*rows.axes, steps=rows.length * max(count.bit_length(), 1) * 4):
        with k.loop("j", first):
            heap.put("j", x.at(*rows.place("j")), "j")
        with k.block(f"for ({k.index_type} root = {first} / 2 - 1; root >= 0; root--)"):
            heap.sink("root", first, *heap.entry("root"))
        if count < rows.length:
            with k.loop("j", k.size(rows.length), first):
                k.add(f"const {heap.kind} next = {x.at(*rows.place('j'))}, last = {heap.value('0')};")
                with k.block(f"if ({heap.before('next', 'j', 'last', heap.index('0'))})"):
                    heap.sink("0", first, "next", "j")
        with k.block(f"for ({k.index_type} end = {first} - 1; end > 0; end--)"):
            k.add(f"const {heap.kind} last = {heap.value('end')};", f"const i64 last_at = {heap.index('end')};")
            heap.put("end", heap.value("0"), heap.index("0"))
            heap.sink("0", "end", "last", "last_at")


@dataclass(frozen=True)
class _Heap:
    """A binary heap of (value, index) in a row of the two results."""

    k: KernelBuilder
    rows: Rows
    dtype: str
    descending: bool

    @property
    def kind(self) -> str:
        """The C type of a value."""
        return self.k.language.value_type(self.dtype)

    def value(self, place: str) -> str:
        """Return the value at a place."""
        return self.k.result(0).at(*self.rows.place(place))

    def index(self, place: str) -> str:
        """Return the index at a place."""
        return self.k.result(1).at(*self.rows.place(place))

    def entry(self, place: str) -> tuple[str, str]:
        """Return value and index at a place."""
        return self.value(place), self.index(place)

    def put(self, place: str, value: str, index: str) -> None:
        """Write value and index to a place."""
        self.k.store(self.rows.place(place), value)
        self.k.store(self.rows.place(place), index, 1)

    def before(self, a: str, a_at: str, b: str, b_at: str) -> str:
        """Return whether one pair comes before another, all given as variables."""
        return comes_before(self.dtype, self.descending, a, a_at, b, b_at)

    def sink(self, start: str, end: str, value: str, index: str) -> None:
        """Write a pair at `start`, or below it in its children's place as long as one of them comes after it."""
        k = self.k
        with k.block(""):
            k.add(f"const {self.kind} sinking = {value};", f"const i64 sinking_at = {index};")
            k.add(f"{k.index_type} hole = {start};")
            with k.block(f"for ({k.index_type} child = 2 * hole + 1; child < {end}; child = 2 * hole + 1)"):
                k.add(f"{self.kind} best = {self.value('child')};", f"i64 best_at = {self.index('child')};")
                with k.block(f"if (child + 1 < {end})"):
                    other, other_at = self.entry("child + 1")
                    k.add(f"const {self.kind} other = {other};", f"const i64 other_at = {other_at};")
                    later = self.before("best", "best_at", "other", "other_at")
                    k.add(f"if ({later}) {{ best = other; best_at = other_at; child++; }}")
                k.add(f"if (!{self.before('sinking', 'sinking_at', 'best', 'best_at')}) break;")
                self.put("hole", "best", "best_at")
                k.add("hole = child;")
            self.put("hole", "sinking", "sinking_at")
