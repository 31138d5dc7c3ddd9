"""Comparisons, logic, choices and bounds."""

from __future__ import annotations

from typing import Any

from kagent_core.codegen.dtypes import FLOATS
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.numbers import bounds, fits
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind, Operands

pointwise = RULES.pointwise


def _comparison(name: str) -> None:
    def rule(self: Element, other: Element) -> Element:
        return self.op(name, other)

    pointwise(f"aten::{name}.Tensor", f"aten::{name}.Scalar", operands=Operands.COMMON)(rule)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


# -- logic: everything but 0 is true


@pointwise("aten::logical_and", operands=Operands.OWN)
def logical_and(self: Element, other: Element) -> Element:
    return self.to("bool") & other.to("bool")


@pointwise("aten::logical_or", operands=Operands.OWN)
def logical_or(self: Element, other: Element) -> Element:
    return self.to("bool") | other.to("bool")


@pointwise("aten::logical_xor", operands=Operands.OWN)
def logical_xor(self: Element, other: Element) -> Element:
    return self.to("bool") ^ other.to("bool")


@pointwise("aten::logical_not", operands=Operands.OWN)
def logical_not(self: Element) -> Element:
    return ~self.to("bool")


# -- kinds of floats


@pointwise("aten::isnan", operands=Operands.OWN)
def isnan(self: Element) -> Element | bool:
    return self.op("isnan") if self.is_float else False


@pointwise("aten::isinf", operands=Operands.OWN)
def isinf(self: Element) -> Element | bool:
    return self.op("isinf") if self.is_float else False


@pointwise("aten::isfinite", operands=Operands.OWN)
def isfinite(self: Element) -> Element | bool:
    return self.op("abs") < float("inf") if self.is_float else True


@pointwise("aten::isposinf", operands=Operands.OWN)
def isposinf(self: Element) -> Element | bool:
    return self.equals(float("inf")) if self.is_float else False


@pointwise("aten::isneginf", operands=Operands.OWN)
def isneginf(self: Element) -> Element | bool:
    return self.equals(float("-inf")) if self.is_float else False


@pointwise("aten::signbit", "prims::signbit", operands=Operands.OWN)
def signbit(self: Element) -> Element | bool:
    return False if self.dtype == "bool" else self.op("signbit")


# -- choices


@pointwise("aten::where.self", "aten::where.ScalarSelf", "aten::where.ScalarOther", "aten::where.Scalar")
def where(condition: Element, self: Element, other: Element) -> Element:
    return condition.to("bool").where(self, other)


@pointwise("aten::masked_fill.Scalar", "aten::masked_fill.Tensor", accepts=fits("value"))
def masked_fill(self: Element, mask: Element, value: Element) -> Element:
    return mask.to("bool").where(value, self)


# -- bounds


@pointwise("aten::maximum", "aten::max.other", "prims::maximum")
def maximum(self: Element, other: Element) -> Element:
    return self.op("max", other)


@pointwise("aten::minimum", "aten::min.other", "prims::minimum")
def minimum(self: Element, other: Element) -> Element:
    return self.op("min", other)


@pointwise("aten::fmax", "prims::fmax")
def fmax(self: Element, other: Element) -> Element:
    return self.op("fmax" if self.is_float else "max", other)


@pointwise("aten::fmin", "prims::fmin")
def fmin(self: Element, other: Element) -> Element:
    return self.op("fmin" if self.is_float else "min", other)


@pointwise("aten::clamp", "aten::clamp.Tensor", "aten::clip", "aten::clip.Tensor", accepts=bounds("min", "max"))
def clamp(self: Element, min: Element | None, max: Element | None) -> Element:
    lifted = self if min is None else self.op("max", min)
    return lifted if max is None else lifted.op("min", max)


@pointwise("aten::clamp_min", "aten::clamp_min.Tensor", accepts=bounds("min"))
def clamp_min(self: Element, min: Element) -> Element:
    return self.op("max", min)


@pointwise("aten::clamp_max", "aten::clamp_max.Tensor", accepts=bounds("max"))
def clamp_max(self: Element, max: Element) -> Element:
    return self.op("min", max)


@RULES.indexed("aten::nan_to_num", kind=LoweringKind.GATHER)
def nan_to_num(k: Lowering, self: Operand, nan: float | None, posinf: float | None, neginf: float | None) -> Any:
    if self.dtype not in FLOATS:
        return self.element
    import torch

    limits = torch.finfo(getattr(torch, self.dtype))

    def at(index: Indices) -> Element:
        value = self.at(index).compute()
        kept = value.equals(float("-inf")).where(limits.min if neginf is None else neginf, value)
        kept = value.equals(float("inf")).where(limits.max if posinf is None else posinf, kept)
        return value.op("isnan").where(nan or 0.0, kept)

    return at
