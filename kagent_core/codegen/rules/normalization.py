"""Operators that reduce rows and go over them again: softmax, and what subtracts a mean and divides by a deviation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_core.codegen.compound import SOFTMAX
from kagent_core.codegen.dtypes import compute_dtype
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.reduced import Reduced
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.rules.reductions import KEPT_ROW, At, Moments, total
from kagent_core.codegen.table import LoweringKind


def rows_rule(*signatures: str, accepts: Callable[[Any], str | None] | None = None) -> Callable[..., Any]:
    """Register a rule of an operator that goes over its rows again."""
    return RULES.indexed(*signatures, kind=LoweringKind.ROWS, accepts=accepts)


# -- softmax


def _keeps_type(call: Any) -> str | None:
    return "half types are to become float32" if call.arguments.get("half_to_float") else None


def _top_and_weights(rows: Reduced, operand: Operand, index: Indices) -> tuple[Element, Element]:
    """Return a row's greatest element, and the sum of exp of each element less it."""
    if rows.takes_one_pass(operand, KEPT_ROW):
        top, weights = rows.compound(SOFTMAX, index, lambda full: (operand.at(full).compute(),))
        return top, weights.op("isinf").where(math.nan, weights).to(top.dtype)
    # a NaN need not be the greatest: it makes the sum NaN, and so the whole row
    top = rows.reduce("fmax", index, lambda full: operand.at(full).compute())
    return top, total(rows, index, lambda full: (operand.at(full).compute() - top).op("exp"))


@rows_rule("aten::_softmax", accepts=_keeps_type)
def softmax(k: Lowering, self: Operand, dim: int, half_to_float: bool) -> At:
    rows = k.reduced(self.shape, dim)

    def at(index: Indices) -> Element:
        top, weights = _top_and_weights(rows, self, index)
        return (self.at(index).compute() - top).op("exp") * (1 / weights)

    return at


@rows_rule("aten::_log_softmax", accepts=_keeps_type)
def log_softmax(k: Lowering, self: Operand, dim: int, half_to_float: bool) -> At:
    rows = k.reduced(self.shape, dim)

    def at(index: Indices) -> Element:
        top, weights = _top_and_weights(rows, self, index)
        return self.at(index).compute() - top - weights.op("log")

    return at


@rows_rule("aten::_softmax_backward_data")
def softmax_backward(k: Lowering, grad_output: Operand, output: Operand, dim: int, input_dtype: torch.dtype) -> At:
    rows = k.reduced(output.shape, dim)

    def at(index: Indices) -> Element:
        both = total(rows, index, lambda full: grad_output.at(full).compute() * output.at(full).compute())
        return (grad_output.at(index).compute() - both) * output.at(index).compute()

    return at


@rows_rule("aten::_log_softmax_backward_data")
def log_softmax_backward(k: Lowering, grad_output: Operand, output: Operand, dim: int, input_dtype: torch.dtype) -> At:
    rows = k.reduced(output.shape, dim)

    def at(index: Indices) -> Element:
        gradients = total(rows, index, lambda full: grad_output.at(full).compute())
        return grad_output.at(index).compute() - output.at(index).compute().op("exp") * gradients

    return at


# -- normalization


def _scaled(value: Element, weight: Element | None, bias: Element | None) -> Element:
    value = value if weight is None else value * weight
    return value if bias is None else value + bias


def _at(operand: Operand | None, index: Sequence[Index]) -> Element | None:
    return None if operand is None else operand.at(tuple(index)).compute()


@rows_rule("aten::native_layer_norm")
def layer_norm(
    k: Lowering,
    input: Operand,
    normalized_shape: Sequence[int],
    weight: Operand | None,
    bias: Operand | None,
    eps: float,
) -> tuple[At, At, At]:
    first = len(input.shape) - len(normalized_shape)
    rows = k.reduced(input.shape, range(first, len(input.shape)))
    moments = Moments(rows, input.at, compute_dtype(input.dtype), input)

    def out(index: Indices) -> Element:
        value = (input.at(index).compute() - moments.mean(index)) * moments.scale(index, eps)
        return _scaled(value, _at(weight, index[first:]), _at(bias, index[first:]))

    return out, moments.mean, lambda index: moments.scale(index, eps)


@rows_rule("aten::native_group_norm")
def group_norm(
    k: Lowering,
    input: Operand,
    weight: Operand | None,
    bias: Operand | None,
    N: int,  # noqa: N803  the schema's names
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[At, At, At]:
    cut = C // group
    shape = (input.shape[0], group, cut, *input.shape[2:])
    rows = k.reduced(shape, range(2, len(shape)))

    def value(full: Indices) -> Element:
        sample, number, within, *place = full
        return input.at((sample, number * cut + within, *place))

    moments = Moments(rows, value, compute_dtype(input.dtype))

    def out(index: Indices) -> Element:
        row = (index[0], index[1] // cut)
        scaled = (input.at(index).compute() - moments.mean(row)) * moments.scale(row, eps)
        return _scaled(scaled, _at(weight, index[1:2]), _at(bias, index[1:2]))

    return out, moments.mean, lambda index: moments.scale(index, eps)


# -- batch norm


@RULES.indexed("aten::_native_batch_norm_legit_no_training", kind=LoweringKind.GATHER)
def batch_norm_inference(
    k: Lowering,
    input: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_var: Operand,
    momentum: float,
    eps: float,
) -> tuple[At, At, At]:
    def out(index: Indices) -> Element:
        channel = index[1:2]
        scale = 1 / (running_var.at(channel).compute() + eps).op("sqrt")
        factor = scale if weight is None else scale * weight.at(channel).compute()
        shift = -running_mean.at(channel).compute() * factor
        shift = shift if bias is None else shift + bias.at(channel).compute()
        return input.at(index).compute() * factor + shift

    nothing = nothing_of(k)
    return out, nothing, nothing


def nothing_of(k: Lowering) -> At:
    """Return what gives the elements of a result that has none."""
    return lambda index: k.constant(0, "float32")


def _is_training(call: Any) -> str | None:
    if call.arguments.get("training") is False:
        return "not in training, statistics are not computed"
    if math.prod(call.inputs[0].shape) == 0:
        return "statistics of nothing"
    return None


class BatchStatistics:
    """Mean and variance of a batch's channels, and the running ones that they become part of.

    In float64, as ATen's, where the device has it.
    """

    def __init__(self, k: Lowering, input: Operand, eps: float) -> None:
        self._input = input
        self._eps = eps
        self._rows = k.reduced(input.shape, (0, *range(2, len(input.shape))))
        self._moments = Moments(self._rows, input.at, k.expressions.wide, input)

    def out(self, weight: Operand | None, bias: Operand | None) -> At:
        """Return the normalized elements."""

        def at(index: Indices) -> Element:
            channel = index[1:2]
            value = self._input.at(index).compute()
            value = (value - self.mean(channel).to(value.dtype)) * self.scale(channel).to(value.dtype)
            return _scaled(value, _at(weight, channel), _at(bias, channel))

        return at

    def mean(self, index: Indices) -> Element:
        """Return the batch's mean of a channel."""
        return self._moments.mean(index)

    def scale(self, index: Indices) -> Element:
        """Return 1 over a channel's standard deviation in the batch."""
        return self._moments.scale(index, self._eps)

    def updated(self, mean: Operand, variance: Operand, momentum: float) -> tuple[At, At]:
        """Return the running statistics after the batch; of the variance, without bias."""
        unbiased = self._rows.count / (self._rows.count - 1) if self._rows.count > 1 else math.nan

        def mean_at(index: Indices) -> Element:
            return self.mean(index) * momentum + mean.at(index).widened() * (1 - momentum)

        def variance_at(index: Indices) -> Element:
            own = self._moments.variance(index) * unbiased
            return own * momentum + variance.at(index).widened() * (1 - momentum)

        return mean_at, variance_at


@rows_rule("aten::_native_batch_norm_legit.no_stats", accepts=_is_training)
def batch_norm(
    k: Lowering,
    input: Operand,
    weight: Operand | None,
    bias: Operand | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[At, At, At]:
    batch = BatchStatistics(k, input, eps)
    return batch.out(weight, bias), batch.mean, batch.scale


@rows_rule("aten::_native_batch_norm_legit_functional", accepts=_is_training)
def batch_norm_functional(
    k: Lowering,
    input: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_var: Operand,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[At, At, At, At, At]:
    batch = BatchStatistics(k, input, eps)
    return batch.out(weight, bias), batch.mean, batch.scale, *batch.updated(running_mean, running_var, momentum)


@rows_rule("aten::_batch_norm_with_update_functional", accepts=_is_training)
def batch_norm_with_update(
    k: Lowering,
    input: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_var: Operand,
    momentum: float,
    eps: float,
) -> tuple[At, At, At, At, At, At]:
    batch = BatchStatistics(k, input, eps)
    running = batch.updated(running_mean, running_var, momentum)
    return batch.out(weight, bias), batch.mean, batch.scale, nothing_of(k), *running
