"""Scattering along one dimension: a row of the result per work-item, which goes over all sources of the row in order.

So results do not depend on timing, and of equal places the last source wins, as in ATen on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.codegen.c_family import INDEX_OUT_OF_RANGE
from kagent_core.codegen.dtypes import FLOATS, HALVES
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import Rows, greater, smaller
from kagent_core.codegen.numbers import fits
from kagent_core.specs import TensorSpec

CHUNK = 64
"""Elements of a row that one work-item sums up in a wider type at a time, in variables of its own."""

_REDUCTIONS = {"add": "sum", "multiply": "prod"}


@dataclass(frozen=True)
class Scatter:
    """What is scattered into the rows of a tensor.

    Attributes
    ----------
    self
        The tensor.
    dim
        The dimension of the rows.
    extents
        Sizes of the part of the rows' other dimensions that has sources.
    count
        Number of sources of a row.
    index, source
        Given the number of a source, return the text of where it goes and of what it is.
    reduce
        How it joins what is there: ``sum``, ``prod``, ``mean``, ``amax``, ``amin``, or ``""`` to replace it.
    include_self
        Whether what was there before takes part.
    wraps
        Whether negative indices count from the end.
    wide
        Whether sums of half types are rounded once, at the end.
    """

    self: TensorSpec
    dim: int
    extents: Sequence[int]
    count: int
    index: Callable[[str], str]
    source: Callable[[str], str]
    reduce: str = ""
    include_self: bool = True
    wraps: bool = False
    wide: bool = True

    def write(self, k: KernelBuilder) -> None:
        """Write the kernel."""
        dtype = self.self.dtype.name
        if self.reduce == "mean" or (self.wide and dtype in HALVES and self.reduce in ("sum", "prod")):
            self._write_chunks(k)
        else:
            self._write_rows(k)

    # -- in the result's own memory

    def _write_rows(self, k: KernelBuilder) -> None:
        x, out, rows = k.read(self.self), k.result(), Rows(self.self, self.dim)
        place = rows.place("at")
        with k.items(*rows.axes, steps=rows.length + self.count):
            with k.loop("at", k.size(rows.length)):
                k.store(place, x.at(*place))
            if not self.include_self:
                with self._sources(k, rows):
                    k.store(place, _identity(k, self.reduce, out.dtype))
            with self._sources(k, rows):
                if self.reduce:
                    self._declare(k, out.at(*place))
                    k.store(place, _joined(self.reduce, out.dtype))
                else:
                    k.store(place, self.source("s"))

    def _declare(self, k: KernelBuilder, before: str) -> None:
        kind = k.compute_type(self.self.dtype.name)
        k.add(f"const {kind} before = {before};", f"const {kind} source = {self.source('s')};")

    def _sources(self, k: KernelBuilder, rows: Rows, condition: str = "") -> _Sources:
        return _Sources(k, rows, self, condition)

    # -- in variables, for what the result's memory cannot hold: wider sums, counts

    def _write_chunks(self, k: KernelBuilder) -> None:
        x, rows, dtype = k.read(self.self), Rows(self.self, self.dim), self.self.dtype.name
        kind, length = k.compute_type(dtype), k.size(rows.length)
        chunks = -(-rows.length // CHUNK)
        with k.items(*rows.axes, ("chunk", chunks), steps=CHUNK + self.count):
            k.add(f"{kind} held[{CHUNK}];", f"i64 sources[{CHUNK}];", f"const {k.index_type} first = chunk * {CHUNK};")
            k.add(f"const {k.index_type} width = {length} - first < {CHUNK} ? {length} - first : {CHUNK};")
            with k.loop("c", "width"):
                start = x.at(*rows.place("first + c")) if self.include_self else _identity(k, self.reduce, dtype)
                k.add(f"held[c] = {start};", "sources[c] = 0;")
            with self._sources(k, rows, "at >= first && at < first + width"):
                self._declare(k, "held[at - first]")
                k.add(f"held[at - first] = {_joined(self.reduce, dtype)};", "sources[at - first]++;")
            with k.loop("c", "width"):
                self._finish(k, rows)

    def _finish(self, k: KernelBuilder, rows: Rows) -> None:
        dtype = self.self.dtype.name
        if self.reduce == "mean":
            kind = k.compute_type(dtype)
            count = f"({kind})(sources[c] + {int(self.include_self)})"
            divided = f"held[c] / {count}" if dtype in FLOATS else f"floor_div_{kind}(held[c], {count})"
        else:
            divided = "held[c]"
        if not self.include_self:
            untouched = k.read(self.self).at(*rows.place("first + c"))
            divided = f"(sources[c] ? {divided} : {untouched})"
        k.store(rows.place("first + c"), divided)


class _Sources:
    """Writes what is done with each source of a row, ``s``, and its place in the row, ``at``."""

    def __init__(self, k: KernelBuilder, rows: Rows, scatter: Scatter, condition: str) -> None:
        length = k.size(rows.length)
        others = [(axis, size) for axis, size in rows.axes if axis != "d"]
        part = [
            f"{axis} < {k.size(extent)}"
            for (axis, size), extent in zip(others, scatter.extents, strict=True)
            if extent < size
        ]
        self._k = k
        self._heads = [f"if ({' && '.join(part)})"] if part else []
        self._count = k.size(scatter.count)
        self._place = scatter.index("s")
        self._wraps = f"if (at < 0) at += {length};" if scatter.wraps else ""
        self._outside = f"at < 0 || at >= {length}"
        self._inside = condition or f"at >= 0 && at < {length}"
        self._opened = 0

    def __enter__(self) -> None:
        k = self._k
        heads = [*self._heads, f"for ({k.index_type} s = 0; s < {self._count}; s++)"]
        for head in heads:
            k.text.open(f"{head} {{")
        k.add(f"i64 at = {self._place};")
        if self._wraps:
            k.add(self._wraps)
        k.report(self._outside, INDEX_OUT_OF_RANGE)
        k.text.open(f"if ({self._inside}) {{")
        self._opened = len(heads) + 1

    def __exit__(self, *failure: object) -> None:
        self._k.text.close(self._opened)


def _joined(reduce: str, dtype: str) -> str:
    """Return what becomes of ``before`` and ``source``."""
    if dtype == "bool":
        return "(before & source)" if reduce in ("prod", "amin") else "(before | source)"
    if reduce in ("amax", "amin"):
        return (greater if reduce == "amax" else smaller)(dtype, "before", "source")
    return f"before {'*' if reduce == 'prod' else '+'} source"


def _identity(k: KernelBuilder, reduce: str, dtype: str) -> str:
    """Return what changes nothing when something joins it."""
    if reduce == "amax":
        return k.language.least(dtype)
    if reduce == "amin":
        return k.language.greatest(dtype)
    return k.number(1 if reduce == "prod" else 0, dtype)


# -- scatter


@GENERIC.kernel("aten::scatter.src")
def scatter_src(k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec) -> None:
    """Write a tensor with elements of another at some places."""
    _scatter(k, self, dim, index, src)


@GENERIC.kernel("aten::scatter.value", accepts=fits("value"))
def scatter_value(k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, value: Any) -> None:
    """Write a tensor with a number at some places."""
    _scatter(k, self, dim, index, value)


@GENERIC.kernel("aten::scatter_add")
def scatter_add(k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec) -> None:
    """Write a tensor with elements of another added at some places."""
    _scatter(k, self, dim, index, src, "sum")


@GENERIC.kernel("aten::scatter.reduce")
def scatter_src_reduce(
    k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec, reduce: str
) -> None:
    """Write a tensor with elements of another added or multiplied at some places."""
    _scatter(k, self, dim, index, src, _REDUCTIONS[reduce])


@GENERIC.kernel("aten::scatter.value_reduce", accepts=fits("value"))
def scatter_value_reduce(
    k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, value: Any, reduce: str
) -> None:
    """Write a tensor with a number added or multiplied at some places."""
    _scatter(k, self, dim, index, value, _REDUCTIONS[reduce])


@GENERIC.kernel("aten::scatter_reduce.two")
def scatter_reduce(
    k: KernelBuilder,
    self: TensorSpec,
    dim: int,
    index: TensorSpec,
    src: TensorSpec,
    reduce: str,
    include_self: bool,
) -> None:
    """Write a tensor with elements of another joined to it at some places."""
    _scatter(k, self, dim, index, src, reduce, include_self)


def _scatter(
    k: KernelBuilder,
    self: TensorSpec,
    dim: int,
    index: TensorSpec,
    source: TensorSpec | Any,
    reduce: str = "",
    include_self: bool = True,
) -> None:
    rows, where = Rows(self, dim), k.read(index)
    sizes = index.shape or (1,)
    dtype = self.dtype.name

    def element(s: str) -> str:
        if isinstance(source, TensorSpec):
            return k.read(source).at(*rows.place(s, len(source.shape)))
        return k.number(source if dtype in FLOATS else bool(source) if dtype == "bool" else int(source), dtype)

    # an index without elements scatters nothing, whatever its other sizes are
    count = sizes[rows.dim] if index.numel else 0
    extents = [size for d, size in enumerate(sizes) if d != rows.dim] if index.numel else [0] * (rows.rank - 1)
    Scatter(
        self, dim, extents, count, lambda s: where.at(*rows.place(s, len(index.shape))), element, reduce, include_self
    ).write(k)


# -- one index for all rows


def _along(
    k: KernelBuilder,
    self: TensorSpec,
    dim: int,
    index: TensorSpec,
    source: Callable[[str], str],
    reduce: str = "",
    **how: bool,
) -> None:
    where, rows = k.read(index), Rows(self, dim)
    extents = [size for axis, size in rows.axes if axis != "d"]
    step: Callable[[str], list[str]] = (lambda s: [s]) if index.shape else lambda s: []
    Scatter(self, dim, extents, index.numel, lambda s: where.at(*step(s)), source, reduce, **how).write(k)


def _element(k: KernelBuilder, self: TensorSpec, dim: int, source: TensorSpec) -> Callable[[str], str]:
    rows, x = Rows(self, dim), k.read(source)
    if not source.shape:
        return lambda s: x.at()
    return lambda s: x.at(*rows.place(s, len(source.shape)))


@GENERIC.kernel("aten::index_add")
def index_add(k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, alpha: Any) -> None:
    """Write a tensor with slices of another added at some places."""
    element = _element(k, self, dim, source)
    if alpha == 1:
        _along(k, self, dim, index, element, "sum")
        return
    dtype = self.dtype.name
    factor = k.number(alpha if dtype in FLOATS else int(alpha), dtype)
    sign = "&" if dtype == "bool" else "*"
    _along(k, self, dim, index, lambda s: f"{factor} {sign} {element(s)}", "sum")


@GENERIC.kernel("aten::index_copy")
def index_copy(k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec) -> None:
    """Write a tensor with slices of another at some places."""
    _along(k, self, dim, index, _element(k, self, dim, source))


@GENERIC.kernel("aten::index_fill.int_Scalar", accepts=fits("value"))
def index_fill(k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, value: Any) -> None:
    """Write a tensor with a number in some slices."""
    dtype = self.dtype.name
    number = k.number(value if dtype in FLOATS else bool(value) if dtype == "bool" else int(value), dtype)
    _along(k, self, dim, index, lambda s: number, wraps=True)


@GENERIC.kernel("aten::index_fill.int_Tensor")
def index_fill_from(k: KernelBuilder, self: TensorSpec, dim: int, index: TensorSpec, value: TensorSpec) -> None:
    """Write a tensor with the one element of another in some slices."""
    element = k.language.cast(k.read(value).at(*["0"] * len(value.shape)), value.dtype.name, self.dtype.name)
    _along(k, self, dim, index, lambda s: element, wraps=True)


@GENERIC.kernel("aten::index_reduce")
def index_reduce(
    k: KernelBuilder,
    self: TensorSpec,
    dim: int,
    index: TensorSpec,
    source: TensorSpec,
    reduce: str,
    include_self: bool,
) -> None:
    """Write a tensor with slices of another joined to it at some places."""
    # ATen rounds each product here, where `scatter_reduce` rounds the last
    _along(k, self, dim, index, _element(k, self, dim, source), reduce, include_self=include_self, wide=False)
