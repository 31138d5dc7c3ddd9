"""Tensors made from numbers and from places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kagent_core.codegen.elements import Element, Indices, Number
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.numbers import fits
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind

pointwise, indexed = RULES.pointwise, RULES.indexed
At = Callable[[Indices], Element]


@pointwise("aten::full", "aten::full_like", accepts=fits("fill_value"))
def full(fill_value: Element, **options: Any) -> Element:
    return fill_value


@pointwise("aten::zeros", "aten::zeros_like")
def zeros(**options: Any) -> bool:
    return False


@pointwise("aten::ones", "aten::ones_like")
def ones(**options: Any) -> bool:
    return True


@pointwise("aten::scalar_tensor", accepts=fits("s"))
def scalar_tensor(s: Element, **options: Any) -> Element:
    return s


@pointwise("aten::fill.Scalar", "aten::fill.Tensor", "aten::fill_.Scalar", "aten::fill_.Tensor", accepts=fits("value"))
def fill(self: Element, value: Element) -> Element:
    return value


# the tensor that these are called on tells the type and is not read: its shape may be any


@indexed("aten::new_full", kind=LoweringKind.GATHER, accepts=fits("fill_value"))
def new_full(k: Lowering, self: Any, fill_value: Number, **options: Any) -> At:
    return lambda index: k.constant(fill_value, _constant_type(fill_value))


@indexed("aten::new_zeros", kind=LoweringKind.GATHER)
def new_zeros(k: Lowering, **options: Any) -> At:
    return lambda index: k.constant(False, "bool")


@indexed("aten::new_ones", kind=LoweringKind.GATHER)
def new_ones(k: Lowering, **options: Any) -> At:
    return lambda index: k.constant(True, "bool")


# -- ranges


@indexed("aten::arange", kind=LoweringKind.GATHER)
def arange_to(k: Lowering, end: Number, **options: Any) -> At:
    return arange(k, 0, end, 1, **options)


@indexed("aten::arange.start", kind=LoweringKind.GATHER)
def arange_from(k: Lowering, start: Number, end: Number, **options: Any) -> At:
    return arange(k, start, end, 1, **options)


@indexed("aten::arange.start_step", kind=LoweringKind.GATHER)
def arange(k: Lowering, start: Number, end: Number, step: Number, dtype: Any = None, **options: Any) -> At:
    counted = _is_float(dtype, start, end, step)
    whole = all(abs(number) < 2**31 and number == int(number) for number in (start, step))

    def at(index: Indices) -> Element:
        if not counted:
            return k.index_value(index[0] * int(step) + int(start))
        if whole:
            return k.index_value(index[0] * int(step) + int(start))
        return k.index_value(index[0], "float64") * float(step) + float(start)

    return at


@indexed("aten::eye", kind=LoweringKind.GATHER)
def eye(k: Lowering, n: int, **options: Any) -> At:
    return eye_m(k, n, n)


@indexed("aten::eye.m", kind=LoweringKind.GATHER)
def eye_m(k: Lowering, n: int, m: int, **options: Any) -> At:
    return lambda index: k.index_value(index[0]).equals(k.index_value(index[1]))


def _is_float(dtype: Any, *numbers: Number) -> bool:
    if dtype is not None:
        return bool(dtype.is_floating_point)
    return any(isinstance(number, float) for number in numbers)


def _constant_type(value: Number) -> str:
    if isinstance(value, bool):
        return "bool"
    return "float64" if isinstance(value, float) else "int64"
