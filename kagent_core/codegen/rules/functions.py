"""Functions of real numbers, beyond arithmetic."""

from __future__ import annotations

import math
from typing import Any

from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind

pointwise = RULES.pointwise


def _function(primitive: str, *signatures: str) -> None:
    def rule(self: Element) -> Element:
        return self.op(primitive)

    pointwise(*signatures)(rule)


for _name in (
    *("exp", "expm1", "log", "log10", "log1p", "sqrt", "erf", "lgamma"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
):
    _function(_name, f"aten::{_name}")
_function("exp2", "aten::exp2", "aten::special_exp2", "prims::exp2")
_function("log2", "aten::log2", "prims::log2")
_function("erfc", "aten::erfc", "aten::special_erfc")


@pointwise("aten::rsqrt", "prims::rsqrt")
def rsqrt(self: Element) -> Element:
    return 1 / self.op("sqrt")


@pointwise("aten::atan2")
def atan2(self: Element, other: Element) -> Element:
    return self.op("atan2", other)


@pointwise("aten::sinc")
def sinc(self: Element) -> Element:
    scaled = self * math.pi
    return self.equals(0).where(1, scaled.op("sin") / scaled)


# -- logarithms with a meaning where the plain formula has none


@pointwise("aten::xlogy.Tensor", "aten::xlogy.Scalar_Self", "aten::xlogy.Scalar_Other")
def xlogy(self: Element, other: Element) -> Element:
    return _times_log(self, other, "log")


@pointwise(
    *("aten::special_xlog1py", "aten::special_xlog1py.self_scalar", "aten::special_xlog1py.other_scalar"),
)
def xlog1py(self: Element, other: Element) -> Element:
    return _times_log(self, other, "log1p")


def _times_log(self: Element, other: Element, log: str) -> Element:
    product = self.equals(0).where(0.0, self * other.op(log))
    return other.op("isnan").where(other, product)


@pointwise("aten::special_entr")
def entr(self: Element) -> Element:
    inside = (self > 0).where(-self * self.op("log"), self.equals(0).where(self.number(0), float("-inf")))
    return self.op("isnan").where(self, inside)


@pointwise("aten::logaddexp")
def logaddexp(self: Element, other: Element) -> Element:
    return _log_add(self, other, self.op("max", other) + (-(self - other).op("abs")).op("exp").op("log1p"))


@pointwise("aten::logaddexp2")
def logaddexp2(self: Element, other: Element) -> Element:
    smaller = (-(self - other).op("abs")).op("exp2").op("log1p") * (1 / math.log(2))
    return _log_add(self, other, self.op("max", other) + smaller)


def _log_add(self: Element, other: Element, total: Element) -> Element:
    """Two equal infinities have no difference."""
    return (self.op("isinf") & self.equals(other)).where(self, total)


@pointwise("aten::logit")
def logit(self: Element, eps: float | None) -> Element:
    inside = self
    if eps is not None:
        inside = (self < eps).where(eps, (self > 1 - self.number(eps)).where(1 - self.number(eps), self))
    return (inside / (1 - inside)).op("log")


@pointwise("aten::logit_backward")
def logit_backward(grad_output: Element, self: Element, eps: float | None) -> Element:
    low = self.number(eps or 0.0)
    inside = (self >= low) & (self <= 1 - low)
    return inside.where(grad_output / (self * (1 - self)), 0.0 if eps is not None else float("nan"))


# -- inverse error function, digamma


def _polynomial(at: Element, *coefficients: float) -> Element:
    """Evaluate a polynomial, highest power first."""
    total = at.number(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * at + coefficient
    return total


@pointwise("aten::erfinv", "aten::special_erfinv")
def erfinv(self: Element) -> Element:
    """Rational approximations for the middle and for the tails, then two steps of Newton's, as ATen has it.

    In float64: the steps multiply what erf is off by, the more the nearer to 1 and -1.
    """
    self = self.to("float64")
    square = self * self
    middle = (
        self
        * _polynomial(square, -0.140543331, 0.914624893, -1.645349621, 0.886226899)
        / _polynomial(square, 0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0)
    )
    size = self.op("abs")
    depth = (-((1 - size) / 2).op("log")).op("sqrt")
    tail = _polynomial(depth, 1.641345311, 3.429567803, -1.624906493, -1.970840454) / _polynomial(
        depth, 1.637067800, 3.543889200, 1.0
    )
    found = (size <= 0.7).where(middle, tail.op("copysign", self))
    for _ in range(2):
        slope = (-found * found).op("exp") * (2 / math.sqrt(math.pi))
        found = found - (found.op("erf") - self) / slope
    end = size.equals(1).where(self.number(float("inf")).op("copysign", self), found)
    return (size > 1).where(float("nan"), end)


PSI_OF_10 = 2.25175258906672110764
"""digamma(10)."""

DIGAMMA = (
    *(8.33333333333333333333e-2, -2.10927960927960927961e-2, 7.57575757575757575758e-3, -4.16666666666666666667e-3),
    *(3.96825396825396825397e-3, -8.33333333333333333333e-3, 8.33333333333333333333e-2),
)
"""Coefficients of the asymptotic series, in powers of 1 / x², highest first."""


@pointwise("aten::digamma", "aten::special_digamma", "prims::digamma")
def digamma(self: Element) -> Element:
    """Reflected into the positive half, moved up beyond 10, and there the asymptotic series."""
    x = self
    negative = x < 0
    at = negative.where(1 - x, x)
    shift = at.number(0)
    for _ in range(10):
        small = at < 10
        shift = small.where(shift - 1 / at, shift)
        at = small.where(at + 1, at)
    inverse = 1 / (at * at)
    series = (at < 1e17).where(inverse * _polynomial(inverse, *DIGAMMA), 0.0)
    psi = at.equals(10).where(shift + PSI_OF_10, shift + at.op("log") - 0.5 / at - series)
    rest = (x - x.op("trunc")).to("float64")  # near a pole, float32 has too few digits
    reflected = psi - (math.pi / (rest * math.pi).op("tan")).to(x.dtype)
    whole = x.equals(x.op("trunc"))
    found = negative.where(whole.where(float("nan"), reflected), psi)
    return x.equals(0).where(x.number(float("inf")).op("copysign", -x), found)


@RULES.indexed("aten::frexp.Tensor", kind=LoweringKind.GATHER)
def frexp(k: Lowering, self: Operand) -> Any:
    """By the bits of a float64, in which every number of the other types is normal."""

    def parts(index: Indices) -> tuple[Element, Element, Element]:
        value = self.at(index).compute()
        return value, *_split(value.to("float64"))

    def mantissa(index: Indices) -> Element:
        value, significand, _ = parts(index)
        return significand.to(value.dtype)

    return mantissa, lambda index: parts(index)[2]


def _split(value: Element) -> tuple[Element, Element]:
    whole = value.equals(0) | ~(value.op("abs") < float("inf"))
    tiny = value.op("abs") < 2.0**-1022
    scaled = tiny.where(value * 2.0**64, value)
    bits = Element(value.made_by.bitcast(scaled.expr, "int64"), value.made_by)
    exponent = (bits.op("shr", 52) & 0x7FF) - 1022
    exponent = tiny.where(exponent - 64, exponent)
    significand = Element(
        value.made_by.bitcast(((bits & ~(0x7FF << 52)) | (1022 << 52)).expr, "float64"), value.made_by
    )
    return whole.where(value, significand), whole.where(0, exponent)
