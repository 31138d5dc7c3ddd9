"""Operators that are one expression per element."""

from __future__ import annotations

from kagent_core.codegen.elements import Element
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import Operands

pointwise = RULES.pointwise


@pointwise("aten::add.Tensor", "aten::add.Scalar")
def add(self: Element, other: Element, alpha: Element) -> Element:
    return self + other * alpha


@pointwise("aten::sub.Tensor", "aten::sub.Scalar")
def sub(self: Element, other: Element, alpha: Element) -> Element:
    return self - other * alpha


@pointwise("aten::mul.Tensor", "aten::mul.Scalar")
def mul(self: Element, other: Element) -> Element:
    return self & other if self.dtype == "bool" else self * other


@pointwise("aten::relu")
def relu(self: Element) -> Element:
    return self.op("max", 0)


@pointwise("aten::exp")
def exp(self: Element) -> Element:
    return self.op("exp")


@pointwise("aten::sigmoid")
def sigmoid(self: Element) -> Element:
    return 1 / (1 + (-self).op("exp"))


@pointwise("aten::lt.Tensor", "aten::lt.Scalar", operands=Operands.COMMON)
def lt(self: Element, other: Element) -> Element:
    return self < other
