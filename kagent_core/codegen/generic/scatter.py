"""Scattering along one dimension: see `placing` for how the work is divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kagent_core.codegen.dtypes import FLOATS
from kagent_core.codegen.generic.block_placing import write_placing
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import Rows
from kagent_core.codegen.generic.placing import Placing
from kagent_core.codegen.numbers import fits
from kagent_core.specs import TensorSpec

_REDUCTIONS = {"add": "sum", "multiply": "prod"}


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
    extents = [size for d, size in enumerate(sizes) if d != rows.dim]
    others = [axis for axis in rows.axes if axis[0] != "d"]
    part = [f"{axis} < {k.size(extent)}" for (axis, size), extent in zip(others, extents, strict=True) if extent < size]
    placing = Placing(
        self=self,
        place=rows.place("row_at"),
        outer=rows.axes,
        rows=[("row_at", rows.length)],
        columns=(),
        count=count,
        locate=lambda s: [where.at(*rows.place(s, len(index.shape)))],
        value=element,
        reduce=reduce,
        include_self=include_self,
        wraps=False,
        inside=" && ".join(part) if count else "",
    )
    write_placing(k, placing)


# -- one index for all rows


def _along(
    k: KernelBuilder,
    self: TensorSpec,
    dim: int,
    index: TensorSpec,
    source: Callable[[str], str],
    reduce: str = "",
    include_self: bool = True,
    wraps: bool = False,
    wide: bool = True,
) -> None:
    where, rows = k.read(index), Rows(self, dim)
    placing = Placing(
        self=self,
        place=rows.place("row_at"),
        outer=(),
        rows=[("row_at", rows.length)],
        columns=[axis for axis in rows.axes if axis[0] != "d"],
        count=index.numel,
        locate=lambda s: [where.at(*([s] if index.shape else []))],
        value=source,
        reduce=reduce,
        include_self=include_self,
        wraps=wraps,
        wide=wide,
    )
    write_placing(k, placing)


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
