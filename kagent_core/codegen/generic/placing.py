"""Putting, or joining, slices of one tensor at places of another: the places are the same for all elements of a slice.

What is computed is divided by where it goes: a work-item, or a block, has some of the places to itself, and goes over
all sources in order to pick those that go there. So results do not depend on timing, sums are always added in the same
order, and of equal places the last source wins, as in ATen on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kagent_core.codegen.c_family import INDEX_OUT_OF_RANGE
from kagent_core.codegen.dtypes import FLOATS, HALVES
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.loops import broadcast, flattened, greater, nest, smaller, unflattened
from kagent_core.codegen.groups import power_above
from kagent_core.specs import TensorSpec

PIECES = 64
"""Pieces that the places are divided into where work-items go over them: enough for all cores of a CPU."""

LOOK = 8
"""What it costs to look at a source that may go elsewhere, in elements that are joined: the branch is a guess."""

HELD, MOST_HELD = 2048, 65536
"""Least and most elements that one work-item holds in a wider type, in memory of its own."""

Axes = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Placing:
    """What goes where.

    Attributes
    ----------
    self
        The tensor whose elements the result has where nothing goes.
    place
        Index of an element, in terms of the names of all axes.
    outer
        Name and extent of the dimensions along which the places differ.
    rows
        Of the dimensions that are indexed: the variables that `locate` sets.
    columns
        Of the dimensions along which the places are the same.
    count
        Number of sources.
    locate
        Given the number of a source, returns for each of `rows` the text of where it goes, an integer.
    value
        Given the number of a source, returns the text of what it is, in terms of the names of `outer` and `columns`.
    reduce
        How it joins what is there: ``sum``, ``prod``, ``mean``, ``amax``, ``amin``, or ``""`` to replace it.
    include_self
        Whether what was there before takes part.
    wraps
        Whether negative places count from the end.
    wide
        Whether sums and products of half types are rounded once, at the end.
    inside
        A condition on the names of `outer`, without which nothing goes there; empty for none.
    """

    self: TensorSpec
    place: Sequence[str]
    outer: Axes
    rows: Axes
    columns: Axes
    count: int
    locate: Callable[[str], Sequence[str]] = field(repr=False)
    value: Callable[[str], str] = field(repr=False)
    reduce: str = ""
    include_self: bool = True
    wraps: bool = True
    wide: bool = True
    inside: str = ""

    @property
    def dtype(self) -> str:
        """Name of the elements' type."""
        return self.self.dtype.name

    @property
    def row_count(self) -> int:
        """Number of places."""
        return math.prod(size for _, size in self.rows)

    @property
    def column_count(self) -> int:
        """Number of elements of a slice."""
        return math.prod(size for _, size in self.columns)

    @property
    def outer_count(self) -> int:
        """Number of tensors that things are put in, each by places of its own."""
        return math.prod(size for _, size in self.outer)

    @property
    def counts(self) -> bool:
        """Whether it must be known how many sources came to an element."""
        return self.reduce == "mean" or not self.include_self

    @property
    def rounds_once(self) -> bool:
        """Whether elements are joined in a wider type than their own."""
        return self.reduce == "mean" or (self.wide and self.dtype in HALVES and self.reduce in ("sum", "prod"))

    # -- parts of a kernel

    def coordinates(self, k: KernelBuilder, axes: Axes, flat: str) -> list[str]:
        """Return statements that declare the variables of some axes, given the number of all their steps together."""
        sizes = [size for _, size in axes]
        places = broadcast(unflattened(k, flat, sizes), sizes)
        return [f"const {k.index_type} {name} = {place};" for (name, _), place in zip(axes, places, strict=True)]

    def source_place(self, k: KernelBuilder, source: str) -> str:
        """Write where a source goes, with a report where that is outside; return the condition that it is inside.

        It sets the variable of each row axis, and ``at`` to the number of the place.
        """
        for (name, size), text in zip(self.rows, self.locate(source), strict=True):
            k.add(f"i64 {name} = {text};")
            if self.wraps:
                k.add(f"if ({name} < 0) {name} += {k.size(size)};")
        outside = " || ".join(f"{name} < 0 || {name} >= {k.size(size)}" for name, size in self.rows)
        k.report(outside, INDEX_OUT_OF_RANGE)
        names, sizes = zip(*self.rows, strict=True)
        k.add(f"const i64 at = {flattened(k, names, sizes)};")
        return f"!({outside})"

    def first(self, k: KernelBuilder) -> str:
        """Return what an element is before anything has come to it."""
        return k.read(self.self).at(*self.place) if self.include_self else identity(k, self.reduce, self.dtype)

    def joined(self, k: KernelBuilder) -> str:
        """Return what becomes of ``before`` and ``source``, in the type that is computed in."""
        text = joined(self.reduce, self.dtype) if self.reduce else "source"
        rounded = self.reduce in ("sum", "prod") and self.dtype in HALVES and not self.wide
        return k.language.cast(f"({text})", "float32", self.dtype) if rounded else text

    def finished(self, k: KernelBuilder, held: str, sources: str) -> str:
        """Return what an element becomes, given what it holds and how many sources have come to it."""
        made = held
        if self.reduce == "mean":
            kind = k.compute_type(self.dtype)
            count = f"({kind})({sources} + {int(self.include_self)})"
            made = f"{held} / {count}" if self.dtype in FLOATS else f"floor_div_{kind}({held}, {count})"
        if not self.include_self:
            made = f"({sources} ? {made} : {k.read(self.self).at(*self.place)})"
        return made

    # -- by work-items

    def write_items(self, k: KernelBuilder) -> None:
        """Write the kernel for work-items."""
        (self._write_held if self.rounds_once else self._write_in_place)(k)

    def _pieces(self) -> int:
        """Return how many pieces the places are divided into: going over all sources for each may not take long."""
        elements = self.column_count * (self.row_count + self.count)
        affordable = elements // max(LOOK * self.count, 1)
        return max(min(PIECES // max(self.outer_count, 1), affordable, self.row_count), 1)

    def _write_in_place(self, k: KernelBuilder) -> None:
        """Join elements in the result's own memory."""
        pieces, out, kind = self._pieces(), k.result(), k.compute_type(self.dtype)
        length = -(-self.row_count // pieces)
        columns = [(name, k.size(size)) for name, size in self.columns]
        k.fits(self.row_count, self.count)
        with k.items(*self.outer, ("piece", pieces), steps=length * self.column_count + self.count):
            k.add(f"const {k.index_type} first = piece * {k.size(length)};")
            k.add(f"const {k.index_type} end = {k.least(f'first + {k.size(length)}', k.size(self.row_count))};")
            with k.loop("row", "end", "first"):
                k.add(*self.coordinates(k, self.rows, "row"))
                with nest(k, *columns):
                    k.store(self.place, k.read(self.self).at(*self.place))
            if not self.include_self:
                with self._each_source(k, columns):
                    k.store(self.place, identity(k, self.reduce, self.dtype))
            with self._each_source(k, columns):
                before = f"const {kind} before = {out.at(*self.place)};"
                k.add(*([before] if self.reduce else []), f"const {kind} source = {self.value('s')};")
                k.store(self.place, self.joined(k))

    @contextmanager
    def _each_source(self, k: KernelBuilder, columns: Sequence[tuple[str, str]]) -> Iterator[None]:
        with k.loop("s", self.sources(k)):
            inside = self.source_place(k, "s")
            with k.block(f"if ({inside} && at >= first && at < end)"), nest(k, *columns):
                yield

    def sources(self, k: KernelBuilder) -> str:
        """Return how many sources there are."""
        return f"({self.inside} ? {k.size(self.count)} : 0)" if self.inside else k.size(self.count)

    def _write_held(self, k: KernelBuilder) -> None:
        """Join elements in variables, for what the result's memory cannot hold: wider sums, counts."""
        kind = k.compute_type(self.dtype)
        width, cells = self._held(k, int(kind.lstrip("biuf")) // 8 + 4 * self.counts)
        height = cells // width
        chunks, strips = max(-(-self.row_count // height), 1), -(-self.column_count // width)
        index = k.index_type
        k.fits(self.row_count, self.count, self.column_count)
        with k.items(*self.outer, ("chunk", chunks), ("strip", strips), steps=cells + self.count):
            k.array(kind, "held", cells)
            if self.counts:
                k.array("i32", "sources", cells)
            k.add(
                f"const {index} first = chunk * {height}, from = strip * {width};",
                f"const {index} rows = {k.least(f'{k.size(self.row_count)} - first', str(height))};",
                f"const {index} columns = {k.least(f'{k.size(self.column_count)} - from', str(width))};",
            )
            self._cells(k, width, [f"held[cell] = {self.first(k)};", *(["sources[cell] = 0;"] * self.counts)])
            with k.loop("s", self.sources(k)):
                inside = self.source_place(k, "s")
                with k.block(f"if ({inside} && at >= first && at < first + rows)"), k.loop("column", "columns"):
                    k.add(*self.coordinates(k, self.columns, "(from + column)"))
                    k.add(f"const {index} cell = (at - first) * {width} + column;")
                    k.add(f"const {kind} before = held[cell], source = {self.value('s')};")
                    k.add(f"held[cell] = {self.joined(k)};", *(["sources[cell]++;"] * self.counts))
            self._cells(k, width, None)

    def _held(self, k: KernelBuilder, each: int) -> tuple[int, int]:
        """Return the columns and the elements, of so many bytes each, that a work-item holds at once."""
        # half of a work-item's own memory: the rest is the compiler's
        room = max(k.language.item_nbytes // 2 // each, 1)
        room = 1 << room.bit_length() - 1
        width = min(power_above(min(self.column_count, HELD)), room)
        wanted = min(max(power_above(self.row_count * width * self.outer_count // PIECES), HELD), MOST_HELD, room)
        # no more than there is to hold
        return width, max(min(wanted, power_above(self.row_count) * width), width)

    def _cells(self, k: KernelBuilder, width: int, lines: Sequence[str] | None) -> None:
        """Write lines, or what stores, for each element that is held."""
        with k.loop("row", "rows"), k.loop("column", "columns"):
            k.add(*self.coordinates(k, self.rows, "(first + row)"))
            k.add(*self.coordinates(k, self.columns, "(from + column)"))
            k.add(f"const {k.index_type} cell = row * {width} + column;")
            if lines is not None:
                k.add(*lines)
            else:
                k.store(self.place, self.finished(k, "held[cell]", "sources[cell]"))


def joined(reduce: str, dtype: str) -> str:
    """Return what becomes of ``before`` and ``source``."""
    if dtype == "bool":
        return "(before & source)" if reduce in ("prod", "amin") else "(before | source)"
    if reduce in ("amax", "amin"):
        return (greater if reduce == "amax" else smaller)(dtype, "before", "source")
    return f"before {'*' if reduce == 'prod' else '+'} source"


def identity(k: KernelBuilder, reduce: str, dtype: str) -> str:
    """Return what changes nothing when something joins it."""
    if reduce == "amax":
        return k.language.least(dtype)
    if reduce == "amin":
        return k.language.greatest(dtype)
    return k.number(1 if reduce == "prod" else 0, dtype)
