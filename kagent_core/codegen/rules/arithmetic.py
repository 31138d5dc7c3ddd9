"""Sums, products, divisions, powers and bits: one expression per element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kagent_core.codegen.dtypes import FLOATS, common_dtype
from kagent_core.codegen.elements import Element, Indices, Number, Operand
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind

pointwise = RULES.pointwise

INTEGERS_ALONE = "shifts are of integers"


def multiply_add(a: Element, b: Element, c: Element) -> Element:
    """Return ``a * b + c``, of floats rounded once, as ATen's vectors compute it."""
    return a.op("fma", b, c) if a.is_float and not _is_one(a) and not _is_one(b) else a * b + c


def _is_one(element: Element) -> bool:
    return element.expr.op == "constant" and element.expr.payload == 1


@pointwise("aten::add.Tensor", "aten::add.Scalar")
def add(self: Element, other: Element, alpha: Element) -> Element:
    return self | (other & alpha) if self.dtype == "bool" else multiply_add(other, alpha, self)


@pointwise("aten::sub.Tensor", "aten::sub.Scalar")
def sub(self: Element, other: Element, alpha: Element) -> Element:
    return self - other if _is_one(alpha) else multiply_add(other, -alpha, self)


@pointwise("aten::rsub.Tensor", "aten::rsub.Scalar")
def rsub(self: Element, other: Element, alpha: Element) -> Element:
    return sub(other, self, alpha)


@pointwise("aten::mul.Tensor", "aten::mul.Scalar", unrounded=("other",))
def mul(self: Element, other: Element) -> Element:
    return self & other if self.dtype == "bool" else self * other


@pointwise("aten::square")
def square(self: Element) -> Element:
    return mul(self, self)


@pointwise("aten::addcmul", unrounded=("value",))
def addcmul(self: Element, tensor1: Element, tensor2: Element, value: Element) -> Element:
    return multiply_add(value * tensor1, tensor2, self)


@pointwise("prims::fma")
def fma(a: Element, b: Element, c: Element) -> Element:
    return multiply_add(a, b, c)


@pointwise("aten::addcdiv", unrounded=("value",))
def addcdiv(self: Element, tensor1: Element, tensor2: Element, value: Element) -> Element:
    return self + value * tensor1 / tensor2


@pointwise("aten::lerp.Tensor")
def lerp(self: Element, end: Element, weight: Element) -> Element:
    # from the nearer end, as ATen does: at both ends the result is exact
    near = weight.op("abs") < 0.5
    return multiply_add(near.where(weight, weight - 1), end - self, near.where(self, end))


@pointwise("aten::lerp.Scalar", unrounded=("weight",))
def lerp_scalar(self: Element, end: Element, weight: Element) -> Element:
    return lerp(self, end, weight)


# -- division


@pointwise("aten::div.Tensor", "aten::div.Scalar", "aten::true_divide.Tensor", unrounded=("other",))
def div(self: Element, other: Element) -> Element:
    return self / other


@pointwise("aten::div.Tensor_mode", "aten::div.Scalar_mode", unrounded=("other",))
def div_mode(self: Element, other: Element, rounding_mode: str | None) -> Element:
    if rounding_mode == "floor":
        return floor_divide(self, other)
    if not self.is_float:
        return self.op("trunc_div", other)
    return (self / other).op("trunc") if rounding_mode == "trunc" else self / other


@pointwise("aten::floor_divide", "aten::floor_divide.Scalar", unrounded=("other",))
def floor_divide(self: Element, other: Element) -> Element:
    """By way of the remainder, as CPython does: the quotient of what is left is whole but for its rounding."""
    if not self.is_float:
        return self.op("floor_div", other)
    quotient = self / other
    rest = self.op("fmod", other)
    whole = (self - rest) / other
    whole = (rest.differs(0) & ((other < 0) ^ (rest < 0))).where(whole - 1, whole)
    floor = whole.op("floor")
    floor = (whole - floor > 0.5).where(floor + 1, floor)
    result = whole.differs(0).where(floor, quotient.number(0).op("copysign", quotient))
    return other.equals(0).where(quotient, result)


@pointwise("aten::remainder.Tensor", "aten::remainder.Scalar", "aten::remainder.Scalar_Tensor")
def remainder(self: Element, other: Element) -> Element:
    if not self.is_float:
        return self.op("rem", other)
    rest = self.op("fmod", other)
    return (rest.differs(0) & ((other < 0) ^ (rest < 0))).where(rest + other, rest)


@pointwise("aten::fmod.Tensor", "aten::fmod.Scalar")
def fmod(self: Element, other: Element) -> Element:
    return self.op("fmod", other)


@pointwise("aten::reciprocal", "prims::reciprocal")
def reciprocal(self: Element) -> Element:
    return 1 / self


# -- powers


@pointwise("aten::pow.Tensor_Tensor")
def power(self: Element, exponent: Element) -> Element:
    return self.op("pow" if self.is_float else "ipow", exponent)


@RULES.indexed("aten::pow.Tensor_Scalar", kind=LoweringKind.POINTWISE)
def power_of_tensor(k: Lowering, self: Operand, exponent: Number) -> Callable[[Indices], Element]:
    dtype = common_dtype([self.spec, exponent])

    def at(index: Indices) -> Element:
        base = self.at(index).to(dtype).compute()
        special = _special_power(base, exponent, dtype)
        return power(base, k.constant(exponent, dtype).compute()) if special is None else special

    return at


def _special_power(base: Element, exponent: Number, dtype: str) -> Element | None:
    """Return the power for an exponent that ATen treats apart: a root is not what a power gives for all operands."""
    if exponent == 0:
        return base.number(1)
    if exponent == 1:
        return base
    square = base * base
    if dtype == "bfloat16":  # whose vectors ATen rounds after each product
        square = square.to(dtype).compute()
    if exponent in (2, 3):
        return square if exponent == 2 else square * base
    if dtype not in FLOATS or dtype == "float16":
        return None
    if exponent in (-1, -2):
        return 1 / (base if exponent == -1 else square)
    if exponent in (0.5, -0.5):
        return base.op("sqrt") if exponent == 0.5 else 1 / base.op("sqrt")
    return None


@pointwise("aten::pow.Scalar")
def power_of_number(self: Element, exponent: Element) -> Element:
    value = self.expr.payload
    if value == 1:
        return self
    return exponent.op("exp2") if value == 2 and self.is_float else power(self, exponent)


@pointwise("aten::hypot", "prims::hypot")
def hypot(self: Element, other: Element) -> Element:
    return self.op("hypot", other)


@pointwise("aten::float_power.Tensor_Tensor", "aten::float_power.Tensor_Scalar", "aten::float_power.Scalar")
def float_power(self: Element, exponent: Element) -> Element:
    return self.op("pow", exponent)


# -- the parts of numbers


@pointwise("aten::neg")
def neg(self: Element) -> Element:
    return -self


@pointwise("aten::abs", "prims::abs")
def absolute(self: Element) -> Element:
    return self.op("abs")


@pointwise("aten::positive", "aten::conj_physical", "aten::_conj_physical", "prims::conj_physical")
def positive(self: Element) -> Element:
    return self


@pointwise("aten::sign", "aten::sgn", "prims::sign")
def sign(self: Element) -> Element:
    if self.dtype == "bool":
        return self
    return (self > 0).to(self.dtype) - (self < 0).to(self.dtype)


@pointwise("aten::angle")
def angle(self: Element) -> Element:
    return self.op("isnan").where(self, (self < 0).where(self.number(math.pi), 0))


@pointwise("aten::copysign.Tensor", "aten::copysign.Scalar")
def copysign(self: Element, other: Element) -> Element:
    return self.op("copysign", other)


@pointwise("aten::heaviside")
def heaviside(self: Element, values: Element) -> Element:
    return self.equals(0).where(values, (self > 0).to(self.dtype))


def _not_half(call: Any) -> str | None:
    name = call.outputs[0].dtype.name
    return None if name in ("float32", "float64") else f"the next number of {name} is not that of float32"


@pointwise("aten::nextafter", accepts=_not_half)
def nextafter(self: Element, other: Element) -> Element:
    return self.op("nextafter", other)


# -- rounding


def _rounding(primitive: str, *signatures: str) -> None:
    def rule(self: Element) -> Element:
        return self.op(primitive) if self.is_float else self

    pointwise(*signatures)(rule)


_rounding("floor", "aten::floor")
_rounding("ceil", "aten::ceil")
_rounding("trunc", "aten::trunc", "aten::fix", "prims::trunc")
_rounding("rint", "aten::round")


@pointwise("aten::round.decimals")
def round_decimals(self: Element, decimals: int) -> Element:
    if not self.is_float:
        return self
    scale = 10.0 ** abs(decimals)
    return (self / scale).op("rint") * scale if decimals < 0 else (self * scale).op("rint") / scale


@pointwise("aten::frac")
def frac(self: Element) -> Element:
    return self - self.op("trunc")


@pointwise("aten::deg2rad")
def deg2rad(self: Element) -> Element:
    return self * (math.pi / 180)


@pointwise("aten::rad2deg")
def rad2deg(self: Element) -> Element:
    return self * (180 / math.pi)


# -- bits


@pointwise("aten::bitwise_and.Tensor", "aten::bitwise_and.Scalar", "aten::bitwise_and.Scalar_Tensor")
def bitwise_and(self: Element, other: Element) -> Element:
    return self & other


@pointwise("aten::bitwise_or.Tensor", "aten::bitwise_or.Scalar", "aten::bitwise_or.Scalar_Tensor")
def bitwise_or(self: Element, other: Element) -> Element:
    return self | other


@pointwise("aten::bitwise_xor.Tensor", "aten::bitwise_xor.Scalar", "aten::bitwise_xor.Scalar_Tensor")
def bitwise_xor(self: Element, other: Element) -> Element:
    return self ^ other


@pointwise("aten::bitwise_not", "prims::bitwise_not")
def bitwise_not(self: Element) -> Element:
    return ~self


def _not_float(call: Any) -> str | None:
    return INTEGERS_ALONE if "float" in call.outputs[0].dtype.name else None


@pointwise(
    *("aten::bitwise_left_shift.Tensor", "aten::bitwise_left_shift.Tensor_Scalar"),
    *("aten::bitwise_left_shift.Scalar_Tensor", "aten::__lshift__.Tensor", "aten::__lshift__.Scalar"),
    accepts=_not_float,
)
def left_shift(self: Element, other: Element) -> Element:
    return self.op("shl", other)


@pointwise(
    *("aten::bitwise_right_shift.Tensor", "aten::bitwise_right_shift.Tensor_Scalar"),
    *("aten::bitwise_right_shift.Scalar_Tensor", "aten::__rshift__.Tensor", "aten::__rshift__.Scalar"),
    accepts=_not_float,
)
def right_shift(self: Element, other: Element) -> Element:
    return self.op("shr", other)
