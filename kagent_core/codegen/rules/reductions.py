"""Operators that reduce along dimensions: what is left of a row is one element, or a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_core.codegen.compound import ARGMAX, ARGMIN, SOFTMAX, WELFORD
from kagent_core.codegen.dtypes import FLOATS, INTEGERS, accumulate_dtype, compute_dtype, name_of
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.reduced import CACHED, Reduced
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind

At = Callable[[Indices], Element]
Dims = int | Sequence[int] | None


def reduction(*signatures: str, accepts: Callable[[Any], str | None] | None = None) -> Callable[..., Any]:
    """Register a rule of a reduction."""
    return RULES.indexed(*signatures, kind=LoweringKind.REDUCTION, accepts=accepts)


# -- sums and products


def summed_dtype(operand: Operand, dtype: torch.dtype | None) -> str:
    """Return the type in which elements are added or multiplied: for integers int64, unless another is asked for."""
    if dtype is not None:
        return name_of(dtype)
    return "int64" if operand.dtype == "bool" or operand.dtype in INTEGERS else operand.dtype


def total(rows: Reduced, index: Indices, value: Callable[[Indices], Element]) -> Element:
    """Return the sum of what `value` gives along the rows, in the type that ATen accumulates in."""

    def taken(full: Indices) -> Element:
        element = value(full)
        return element.to(accumulate_dtype(element.dtype))

    return rows.reduce("sum", index, taken)


@reduction("aten::sum", "aten::sum.dim_IntList")
def sum_dim(k: Lowering, self: Operand, dtype: torch.dtype | None, dim: Dims = None, keepdim: bool = False) -> At:
    rows, target = k.reduced(self.shape, dim), summed_dtype(self, dtype)
    if target == "bool":
        return lambda index: rows.reduce("any", index, lambda full: self.at(full).to("bool"))
    return lambda index: total(rows, index, lambda full: self.at(full).to(target))


@reduction("aten::nansum")
def nansum(k: Lowering, self: Operand, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> At:
    rows, target = k.reduced(self.shape, dim), summed_dtype(self, dtype)

    def number(full: Indices) -> Element:
        value = self.at(full).to(target).compute()
        return value.op("isnan").where(0, value) if value.is_float else value

    return lambda index: total(rows, index, number)


@reduction("aten::mean", "aten::mean.dim")
def mean(k: Lowering, self: Operand, dtype: torch.dtype | None, dim: Dims = None, keepdim: bool = False) -> At:
    rows, target = k.reduced(self.shape, dim), compute_dtype(summed_dtype(self, dtype))
    return lambda index: rows.share(total(rows, index, lambda full: self.at(full).to(target)))


@reduction("aten::prod", "aten::prod.dim_int")
def prod(k: Lowering, self: Operand, dtype: torch.dtype | None, dim: int | None = None, keepdim: bool = False) -> At:
    rows, target = k.reduced(self.shape, dim), summed_dtype(self, dtype)
    if target == "bool":
        return lambda index: rows.reduce("all", index, lambda full: self.at(full).to("bool"))
    return lambda index: rows.reduce("prod", index, lambda full: self.at(full).to(target).compute())


@reduction("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(k: Lowering, self: Operand, dim: Dims) -> At:
    rows = k.reduced(self.shape, dim)
    return lambda index: total(rows, index, lambda full: self.at(full).to("bool"))


def truth(k: Lowering, kind: str, operand: Operand, dim: Dims) -> At:
    """Return whether any or all elements along some dimensions are true; without dimensions, each by itself."""
    if dim == ():
        return lambda index: operand.at(index).to("bool")
    rows = k.reduced(operand.shape, dim)
    return lambda index: rows.reduce(kind, index, lambda full: operand.at(full).to("bool"))


@reduction("aten::any", "aten::any.dim", "aten::any.dims")
def any_of(k: Lowering, self: Operand, dim: Dims = None, keepdim: bool = False) -> At:
    return truth(k, "any", self, dim)


@reduction("aten::all", "aten::all.dim", "aten::all.dims")
def all_of(k: Lowering, self: Operand, dim: Dims = None, keepdim: bool = False) -> At:
    return truth(k, "all", self, dim)


# -- extremes


def extreme(k: Lowering, kind: str, operand: Operand, dim: Dims) -> At:
    """Return the greatest or least element along some dimensions."""
    rows = k.reduced(operand.shape, dim)
    return lambda index: rows.reduce(kind, index, lambda full: operand.at(full).compute())


SEARCHED_ROW = 1024
"""Longest row in which an extreme is looked for when it is known. In longer ones, every block of elements is compared
with what was found before, and few are searched: rows of 1000 take as long one way as the other, and long ones half."""


def extreme_and_position(k: Lowering, kind: str, operand: Operand, dim: Dims) -> tuple[At, At]:
    """Return the greatest or least element along some dimensions, and where the first one is; or the first NaN."""
    rows = k.reduced(operand.shape, dim)
    kept = "int32" if rows.count < 2**31 else "int64"  # positions as wide as the elements make full vectors
    if not rows.takes_one_pass(operand, SEARCHED_ROW):
        return extreme(k, kind, operand, dim), _searched_position(k, rows, kind, operand, kept)

    def taken(full: Indices) -> tuple[Element, Element]:
        return operand.at(full).compute(), k.index_value(rows.position(full), kept)

    compound = ARGMAX if kind == "max" else ARGMIN
    return (
        lambda index: rows.compound(compound, index, taken)[0],
        lambda index: rows.compound(compound, index, taken)[1],
    )


def _searched_position(k: Lowering, rows: Reduced, kind: str, operand: Operand, kept: str) -> At:
    """Return where the first greatest or least element is, or the first NaN: a search for what `extreme` found."""
    nowhere = 2**31 - 1 if kept == "int32" else 2**63 - 1

    def at(index: Indices) -> Element:
        top = rows.reduce(kind, index, lambda full: operand.at(full).compute())

        def position(full: Indices) -> Element:
            value = operand.at(full).compute()
            found = value.equals(top) | value.op("isnan") if value.is_float else value.equals(top)
            return found.where(k.index_value(rows.position(full), kept), nowhere)

        return rows.reduce("min", index, position)

    return at


@reduction("aten::amax", "aten::max")
def amax(k: Lowering, self: Operand, dim: Dims = None, keepdim: bool = False) -> At:
    return extreme(k, "max", self, dim)


@reduction("aten::amin", "aten::min")
def amin(k: Lowering, self: Operand, dim: Dims = None, keepdim: bool = False) -> At:
    return extreme(k, "min", self, dim)


@reduction("aten::aminmax")
def aminmax(k: Lowering, self: Operand, dim: int | None, keepdim: bool) -> tuple[At, At]:
    return extreme(k, "min", self, dim), extreme(k, "max", self, dim)


@reduction("aten::argmax")
def argmax(k: Lowering, self: Operand, dim: int | None, keepdim: bool) -> At:
    return extreme_and_position(k, "max", self, dim)[1]


@reduction("aten::argmin")
def argmin(k: Lowering, self: Operand, dim: int | None, keepdim: bool) -> At:
    return extreme_and_position(k, "min", self, dim)[1]


@reduction("aten::max.dim")
def max_dim(k: Lowering, self: Operand, dim: int, keepdim: bool) -> tuple[At, At]:
    return extreme_and_position(k, "max", self, dim)


@reduction("aten::min.dim")
def min_dim(k: Lowering, self: Operand, dim: int, keepdim: bool) -> tuple[At, At]:
    return extreme_and_position(k, "min", self, dim)


# -- mean and variance


class Moments:
    """Mean and variance of rows.

    Parameters
    ----------
    rows
        The loops over a row.
    value
        Gives an element at an index of the rows' shape.
    dtype
        What to compute in.
    operand
        The tensor that they are of, where it has the rows' shape.
    """

    def __init__(self, rows: Reduced, value: At, dtype: str, operand: Operand | None = None) -> None:
        self._rows = rows
        self._value = value
        self._dtype = dtype
        self._one_pass = rows.takes_one_pass(operand, CACHED)

    def mean(self, index: Indices) -> Element:
        """Return the mean of the row of an index."""
        if self._one_pass:
            return self._moments(index)[1].to(self._dtype)
        return self._rows.share(total(self._rows, index, self._taken))

    def squares(self, index: Indices) -> Element:
        """Return the sum of the squares of the differences from the mean: exact where a sum of squares is not."""
        if self._one_pass:
            return self._moments(index)[2].to(self._dtype)
        mean = self.mean(index)

        def square(full: Indices) -> Element:
            difference = self._taken(full) - mean
            return difference * difference

        return total(self._rows, index, square)

    def variance(self, index: Indices) -> Element:
        """Return the mean of the squares of the differences from the mean."""
        return self._rows.share(self.squares(index))

    def scale(self, index: Indices, eps: float) -> Element:
        """Return 1 over the standard deviation."""
        return 1 / (self.variance(index) + eps).op("sqrt")

    def _taken(self, full: Indices) -> Element:
        return self._value(full).to(self._dtype)

    def _moments(self, index: Indices) -> tuple[Element, ...]:
        return self._rows.compound(WELFORD, index, lambda full: (self._taken(full),))


def spread(k: Lowering, operand: Operand, dim: Dims, correction: float | None) -> tuple[At, At]:
    """Return the variance and the mean along some dimensions: in float64, as ATen does, where the device has it."""
    rows = k.reduced(operand.shape, dim)
    left = max(rows.count - (1 if correction is None else correction), 0)
    moments = Moments(rows, operand.at, k.expressions.wide, operand)

    def variance(index: Indices) -> Element:
        squares = moments.squares(index)
        return squares / (k.size(int(left), squares.dtype) if left == int(left) else left)

    return variance, moments.mean


@reduction("aten::var.correction")
def var(k: Lowering, self: Operand, dim: Dims, correction: float | None, keepdim: bool) -> At:
    return spread(k, self, dim, correction)[0]


@reduction("aten::var", "aten::var.dim")
def var_unbiased(k: Lowering, self: Operand, unbiased: bool, dim: Dims = None, keepdim: bool = False) -> At:
    return spread(k, self, dim, int(unbiased))[0]


@reduction("aten::std.correction")
def std(k: Lowering, self: Operand, dim: Dims, correction: float | None, keepdim: bool) -> At:
    return root(spread(k, self, dim, correction)[0])


@reduction("aten::std", "aten::std.dim")
def std_unbiased(k: Lowering, self: Operand, unbiased: bool, dim: Dims = None, keepdim: bool = False) -> At:
    return root(spread(k, self, dim, int(unbiased))[0])


@reduction("aten::var_mean.correction")
def var_mean(k: Lowering, self: Operand, dim: Dims, correction: float | None, keepdim: bool) -> tuple[At, At]:
    return spread(k, self, dim, correction)


@reduction("aten::var_mean", "aten::var_mean.dim")
def var_mean_unbiased(
    k: Lowering, self: Operand, unbiased: bool, dim: Dims = None, keepdim: bool = False
) -> tuple[At, At]:
    return spread(k, self, dim, int(unbiased))


@reduction("aten::std_mean.correction")
def std_mean(k: Lowering, self: Operand, dim: Dims, correction: float | None, keepdim: bool) -> tuple[At, At]:
    variance, middle = spread(k, self, dim, correction)
    return root(variance), middle


@reduction("aten::std_mean", "aten::std_mean.dim")
def std_mean_unbiased(
    k: Lowering, self: Operand, unbiased: bool, dim: Dims = None, keepdim: bool = False
) -> tuple[At, At]:
    variance, middle = spread(k, self, dim, int(unbiased))
    return root(variance), middle


def root(of: At) -> At:
    """Return square roots."""
    return lambda index: of(index).op("sqrt")


# -- norms


def _has_norm(call: Any) -> str | None:
    if call.inputs[0].dtype.name not in FLOATS:
        return f"a norm of {call.inputs[0].dtype}"
    order = float(call.arguments.get("ord", 2))
    empty = math.prod(call.inputs[0].shape) == 0
    return f"the norm of order {order} of nothing" if empty and (order < 0 or math.isinf(order)) else None


@reduction("aten::linalg_vector_norm", accepts=_has_norm)
def vector_norm(k: Lowering, self: Operand, ord: float, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> At:
    rows, target = k.reduced(self.shape, dim), summed_dtype(self, dtype)

    def size(full: Indices) -> Element:
        return self.at(full).to(target).compute().op("abs")

    if math.isinf(ord):
        return lambda index: rows.reduce("max" if ord > 0 else "min", index, size)
    if ord == 0:
        return lambda index: total(rows, index, lambda full: size(full).differs(0).to(size(full).dtype))
    if ord == 1:
        return lambda index: total(rows, index, size)
    if ord == 2:
        return root(lambda index: total(rows, index, lambda full: size(full) * size(full)))
    return lambda index: total(rows, index, lambda full: size(full).op("pow", ord)).op("pow", 1 / ord)


def _is_float(call: Any) -> str | None:
    name = call.inputs[0].dtype.name
    return None if name in FLOATS else f"a tensor of {name}"


KEPT_ROW = 8192
"""Elements of a row whose exponentials are kept from one pass to the next. In longer rows they are summed up block by
block, each less the greatest of its block, so that memory is read once less."""


@reduction("aten::logsumexp", accepts=_is_float)
def logsumexp(k: Lowering, self: Operand, dim: Dims, keepdim: bool) -> At:
    rows = k.reduced(self.shape, dim)
    one_pass = rows.takes_one_pass(self, KEPT_ROW)

    def at(index: Indices) -> Element:
        if one_pass:
            top, weights = rows.compound(SOFTMAX, index, lambda full: (self.at(full).compute(),))
            return weights.op("log").to(top.dtype) + top.op("isinf").where(0, top)
        top = rows.reduce("max", index, lambda full: self.at(full).compute())
        shift = top.op("isinf").where(0, top)
        return total(rows, index, lambda full: (self.at(full).compute() - shift).op("exp")).op("log") + shift

    return at
