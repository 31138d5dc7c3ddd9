"""Activation functions, and their gradients."""

from __future__ import annotations

import math
from typing import Any

from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.numbers import alike_when_rounded, fits
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind

pointwise = RULES.pointwise

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


def logistic(x: Element) -> Element:
    return 1 / (1 + (-x).op("exp"))


# -- piecewise linear


@pointwise("aten::relu")
def relu(self: Element) -> Element:
    return self.op("max", 0)


@pointwise("aten::relu6")
def relu6(self: Element) -> Element:
    return self.op("max", 0).op("min", 6)


@pointwise("aten::threshold", unrounded=("threshold", "value"), accepts=fits("value"))
def threshold(self: Element, threshold: Element, value: Element) -> Element:
    return (self <= threshold).where(value, self)


@pointwise("aten::threshold_backward", unrounded=("threshold",))
def threshold_backward(grad_output: Element, self: Element, threshold: Element) -> Element:
    return (self <= threshold).where(0, grad_output)


@pointwise("aten::leaky_relu", unrounded=("negative_slope",))
def leaky_relu(self: Element, negative_slope: Element) -> Element:
    return (self > 0).where(self, self * negative_slope)


@pointwise("aten::leaky_relu_backward", unrounded=("negative_slope",))
def leaky_relu_backward(grad_output: Element, self: Element, negative_slope: Element, self_is_result: bool) -> Element:
    return (self > 0).where(grad_output, grad_output * negative_slope)


@pointwise("aten::_prelu_kernel")
def prelu(self: Element, weight: Element) -> Element:
    return (self > 0).where(self, weight * self)


@RULES.indexed("aten::_prelu_kernel_backward", kind=LoweringKind.GATHER)
def prelu_backward(k: Lowering, grad_output: Operand, self: Operand, weight: Operand) -> Any:
    def read(index: Indices) -> tuple[Element, Element, Element, Element]:
        x, grad = self.at(index).compute(), grad_output.at(index).compute()
        return x > 0, x, grad, weight.broadcast_at(index).compute()

    def of_self(index: Indices) -> Element:
        positive, _, grad, slope = read(index)
        return positive.where(grad, slope * grad)

    def of_weight(index: Indices) -> Element:
        positive, x, grad, _ = read(index)
        return positive.where(0, x * grad)

    return of_self, of_weight


@pointwise("aten::hardtanh", accepts=fits("min_val", "max_val"))
def hardtanh(self: Element, min_val: Element, max_val: Element) -> Element:
    return self.op("max", min_val).op("min", max_val)


@pointwise("aten::hardtanh_backward")
def hardtanh_backward(grad_output: Element, self: Element, min_val: Element, max_val: Element) -> Element:
    return ((self > min_val) & (self < max_val)).where(grad_output, 0)


@pointwise("aten::hardsigmoid")
def hardsigmoid(self: Element) -> Element:
    return (self + 3).op("max", 0).op("min", 6) / 6


@pointwise("aten::hardsigmoid_backward")
def hardsigmoid_backward(grad_output: Element, self: Element) -> Element:
    return ((self > -3) & (self < 3)).where(grad_output * (1 / 6), 0)


@pointwise("aten::hardswish")
def hardswish(self: Element) -> Element:
    return self * (self + 3).op("max", 0).op("min", 6) / 6


@pointwise("aten::hardswish_backward")
def hardswish_backward(grad_output: Element, self: Element) -> Element:
    middle = grad_output * (self / 3 + 0.5)
    return (self <= -3).where(0, (self >= 3).where(grad_output, middle))


@pointwise("aten::hardshrink")
def hardshrink(self: Element, lambd: Element) -> Element:
    return ((self >= -lambd) & (self <= lambd)).where(0, self)


@pointwise("aten::softshrink", accepts=alike_when_rounded("lambd"))
def softshrink(self: Element, lambd: Element) -> Element:
    below = (self < -lambd).where(self + lambd, self * 0)
    return (self > lambd).where(self - lambd, below)


@pointwise("aten::hardshrink_backward")
def hardshrink_backward(grad_out: Element, self: Element, lambd: Element) -> Element:
    return ((self < -lambd) | (self > lambd)).where(grad_out, 0)


@pointwise("aten::softshrink_backward")
def softshrink_backward(grad_output: Element, self: Element, lambd: Element) -> Element:
    return ((self < -lambd) | (self > lambd)).where(grad_output, 0)


# -- with exponentials


@pointwise("aten::sigmoid")
def sigmoid(self: Element) -> Element:
    return logistic(self)


@pointwise("aten::sigmoid_backward")
def sigmoid_backward(grad_output: Element, output: Element) -> Element:
    return grad_output * (1 - output) * output


@pointwise("aten::tanh_backward")
def tanh_backward(grad_output: Element, output: Element) -> Element:
    return grad_output * (1 - output * output)


@pointwise("aten::silu")
def silu(self: Element) -> Element:
    return self / (1 + (-self).op("exp"))


@pointwise("aten::silu_backward")
def silu_backward(grad_output: Element, self: Element) -> Element:
    gate = logistic(self)
    return grad_output * gate * (1 + self * (1 - gate))


@pointwise("aten::mish")
def mish(self: Element) -> Element:
    return self * self.op("exp").op("log1p").op("tanh")


@pointwise("aten::mish_backward")
def mish_backward(grad_output: Element, self: Element) -> Element:
    gate = logistic(self)
    bent = self.op("exp").op("log1p").op("tanh")
    return grad_output * (bent + self * gate * (1 - bent * bent))


@pointwise("aten::elu", unrounded=("alpha", "scale", "input_scale"))
def elu(self: Element, alpha: Element, scale: Element, input_scale: Element) -> Element:
    return (self < 0).where((self * input_scale).op("expm1") * (alpha * scale), self * scale)


@pointwise("aten::elu_backward", unrounded=("alpha", "scale", "input_scale"))
def elu_backward(
    grad_output: Element,
    alpha: Element,
    scale: Element,
    input_scale: Element,
    is_result: bool,
    self_or_result: Element,
) -> Element:
    slope = alpha * scale
    below = (
        grad_output * input_scale * (self_or_result + slope)
        if is_result
        else grad_output * input_scale * slope * (self_or_result * input_scale).op("exp")
    )
    return (self_or_result <= 0).where(below, grad_output * scale)


@pointwise("aten::celu", unrounded=("alpha",))
def celu(self: Element, alpha: Element) -> Element:
    return elu(self, alpha, self.number(1), 1 / alpha)


@pointwise("aten::selu")
def selu(self: Element) -> Element:
    return elu(self, self.number(SELU_ALPHA), self.number(SELU_SCALE), self.number(1))


@pointwise("aten::softplus", unrounded=("beta", "threshold"))
def softplus(self: Element, beta: Element, threshold: Element) -> Element:
    scaled = self * beta
    return (scaled > threshold).where(self, scaled.op("exp").op("log1p") / beta)


@pointwise("aten::softplus_backward", unrounded=("beta", "threshold"))
def softplus_backward(grad_output: Element, self: Element, beta: Element, threshold: Element) -> Element:
    scaled = self * beta
    grown = scaled.op("exp")
    return (scaled > threshold).where(grad_output, grad_output * grown / (grown + 1))


@RULES.indexed("aten::log_sigmoid_forward", kind=LoweringKind.GATHER)
def log_sigmoid_forward(k: Lowering, self: Operand) -> Any:
    def buffer(index: Indices) -> Element:
        return (-self.at(index).compute().op("abs")).op("exp")

    def output(index: Indices) -> Element:
        return self.at(index).compute().op("min", 0) - buffer(index).op("log1p")

    return output, buffer


@pointwise("aten::log_sigmoid_backward")
def log_sigmoid_backward(grad_output: Element, self: Element, buffer: Element) -> Element:
    share = buffer / (1 + buffer)
    return grad_output * (self < 0).where(1 - share, share)


# -- gelu


@pointwise("aten::gelu")
def gelu(self: Element, approximate: str) -> Element:
    if approximate == "tanh":
        return self * 0.5 * (1 + _gelu_inner(self).op("tanh"))
    return self * 0.5 * (1 + (self * math.sqrt(0.5)).op("erf"))


@pointwise("aten::gelu_backward")
def gelu_backward(grad_output: Element, self: Element, approximate: str) -> Element:
    if approximate == "tanh":
        bent = _gelu_inner(self).op("tanh")
        slope = (1 - bent * bent) * (math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * (self * self)))
        return grad_output * (0.5 * (1 + bent) + 0.5 * self * slope)
    below = 0.5 * (1 + (self * math.sqrt(0.5)).op("erf"))
    density = (self * self * -0.5).op("exp") * (1 / math.sqrt(2 * math.pi))
    return grad_output * (below + self * density)


def _gelu_inner(x: Element) -> Element:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))


# -- dropout's gradient


@pointwise("aten::native_dropout_backward")
def native_dropout_backward(grad_output: Element, mask: Element, scale: float) -> Element:
    return grad_output * mask.to(grad_output.dtype) * scale
