"""Affine steps behind products and convolutions are folded into their weights.

A batch normalization of inference, a scale and a shift of each channel: where scale and shift are constants, so are the
weights that do it at once. These are computed in float64. Half types are left alone, whose every operator rounds as
eager PyTorch's does. So is a scale that is not finite, or makes weights that are not: it makes infinities of sums, but
NaN of sums of infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten

_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
_FOLDED_DTYPES = (torch.float32, torch.float64)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class NotFoldableError(Exception):
    """Parameters have values with which no weights do what an affine step does."""


def fold_affine_steps(graph: InferenceGraph) -> int:
    """Fold every affine step that follows a product or a convolution with constant weights; return how many."""
    folded = 0
    for node in list(graph.graph.nodes):
        if node._erased:
            continue
        linear = _linear(graph, node)
        while linear is not None and (step := _step_after(graph, linear)) is not None:
            node = _fold(graph, linear, step)
            folded += 1
            linear = _linear(graph, node)
    graph.clean()
    return folded


@dataclass(frozen=True)
class _Linear:
    """A product or a convolution with constant weights.

    Attributes
    ----------
    node
        The call.
    result
        What its users see: the call, or a view that leaves its last dimension alone.
    weight, bias
        Its constants; `bias` may be missing.
    weight_dim
        Along which dimension of the weight its channels lie.
    channels, channel_dim
        How many channels the result has, and along which dimension.
    """

    node: Node
    result: Node
    weight: Node
    bias: Node | None
    weight_dim: int
    channels: int
    channel_dim: int


@dataclass(frozen=True)
class _Step:
    """What follows: ``result * scale + shift`` in each channel, where the two come from constants by a function."""

    node: Node
    constants: tuple[Any, ...]
    scale_and_shift: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _linear(graph: InferenceGraph, node: Node) -> _Linear | None:
    if node.op != "call_function" or not graph.is_free(node) or not _is_folded_dtype(node):
        return None
    if node.target is aten.convolution.default:
        return _convolution(graph, node)
    if node.target in (aten.mm.default, aten.addmm.default):
        return _product(graph, node)
    return None


def _convolution(graph: InferenceGraph, node: Node) -> _Linear | None:
    _, weight, bias, _, _, _, transposed, _, groups = node.args
    if not isinstance(weight, Node) or not graph.is_constant(weight) or not graph.is_constant(bias):
        return None
    if transposed and groups != 1:  # whose weight has the channels of one group only
        return None
    channels = graph.fake(node).shape[1]
    assert bias is None or isinstance(bias, Node)
    return _Linear(node, node, weight, bias, int(bool(transposed)), channels, 1)


def _product(graph: InferenceGraph, node: Node) -> _Linear | None:
    is_addmm = node.target is aten.addmm.default
    bias, weight = (node.args[0] if is_addmm else None), node.args[-1]
    if node.kwargs or not isinstance(weight, Node) or not graph.is_constant(weight):  # alpha and beta are rare
        return None
    channels = graph.fake(node).shape[1]
    if is_addmm and (not graph.is_constant(bias) or graph.fake(bias).shape != (channels,)):
        return None
    assert bias is None or isinstance(bias, Node)
    result, user = node, graph.only_user(node)
    if user is not None and user.target in _VIEWS and graph.fake(user).shape[-1:] == (channels,):
        result = user
    return _Linear(node, result, weight, bias, 1, channels, graph.fake(result).dim() - 1)


def _step_after(graph: InferenceGraph, linear: _Linear) -> _Step | None:
    user = graph.only_user(linear.result)
    if user is None or not graph.is_free(user):
        return None
    if user.target is _BATCH_NORM:
        return _batch_norm(graph, linear, user)
    if not _is_like(graph, user, linear.result):
        return None
    known = _ARITHMETIC.get(user.target)
    if known is None or user.kwargs or len(user.args) != 2:
        return None
    one, other = user.args
    if user.target in (aten.mul.Tensor, aten.add.Tensor) and other is linear.result:
        one, other = other, one
    if one is not linear.result or not graph.is_constant(other) or not _is_per_channel(graph, other, linear):
        return None
    if user.target is aten.div.Tensor and not isinstance(other, Node) and other == 0:
        return None
    return _Step(user, (other,), known)


def _batch_norm(graph: InferenceGraph, linear: _Linear, node: Node) -> _Step | None:
    source, weight, bias, mean, variance, _, epsilon = node.args
    if source is not linear.result or linear.channel_dim != 1:
        return None
    if not all(graph.is_constant(each) for each in (weight, bias, mean, variance)):
        return None
    result = graph.only_user(node)
    if result is None or result.args[1] != 0 or not _is_like(graph, result, linear.result):
        return None
    return _Step(result, (weight, bias, mean, variance, epsilon), _of_batch_norm)


def _fold(graph: InferenceGraph, linear: _Linear, step: _Step) -> Node:
    """Replace a product or a convolution and the step behind it by one with other weights; return that."""
    node = linear.node
    weight_fake = graph.fake(linear.weight)
    bias_fake = weight_fake.new_empty((linear.channels,))
    given = (linear.weight, linear.bias, linear.weight_dim, step.scale_and_shift, *step.constants)
    with graph.before(node):
        # a constant may be made further down than the product that now needs it
        for constant in step.constants:
            if isinstance(constant, Node):
                _move_before(constant, node)
        # a weight with gaps, or one that was expanded, has neither when it is made anew
        pair = graph.prepared(_scaled_and_shifted, *given, like=(torch.empty_like(weight_fake), bias_fake))
        weight, bias = (graph.prepared(_item, pair, place, like=pair.meta["val"][place]) for place in (0, 1))
        if node.target is aten.convolution.default:
            made = graph.call(node.target, node.args[0], weight, bias, *node.args[3:])
        else:
            made = graph.call(aten.addmm.default, bias, node.args[-2], weight)
    graph.replace(node, made)
    graph.replace(step.node, made if linear.result is node else linear.result)
    graph.clean()
    return made


def _move_before(constant: Node, place: Node) -> None:
    """Move a constant, and what it is computed from, before a node."""
    if constant.op == "placeholder" or constant < place:
        return
    for source in constant.all_input_nodes:
        _move_before(source, place)
    place.prepend(constant)


def _is_folded_dtype(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _FOLDED_DTYPES


def _is_like(graph: InferenceGraph, node: Node, result: Node) -> bool:
    """Whether a step gives as many numbers of the same type as it is given: a float64 tensor makes float64 of them."""
    made, given = node.meta.get("val"), graph.fake(result)
    return isinstance(made, torch.Tensor) and (made.shape, made.dtype) == (given.shape, given.dtype)


def _is_per_channel(graph: InferenceGraph, value: Any, linear: _Linear) -> bool:
    """Whether a constant is a finite number, or has one number for each channel."""
    if not isinstance(value, Node):
        return isinstance(value, (int, float)) and math.isfinite(value)
    fake = value.meta.get("val")
    if not isinstance(fake, torch.Tensor) or fake.dtype not in (*_FOLDED_DTYPES,):
        return False
    dims = graph.fake(linear.result).dim()
    shape = (1,) * (dims - fake.dim()) + tuple(fake.shape)
    wanted = [1] * dims
    if fake.numel() != 1:
        wanted[linear.channel_dim] = linear.channels
    return list(shape) == wanted


# -- computed with constants


def _scaled_and_shifted(
    weight: torch.Tensor, bias: torch.Tensor | None, dim: int, scale_and_shift: Callable[..., Any], *constants: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight, of which channels lie along a dimension, and a bias that do an affine step as well.

    Raises
    ------
    NotFoldableError
        When weight or bias would have infinities that nobody gave: sums of those are infinite elsewhere, or NaN.
    """
    exact = [each.double() if isinstance(each, torch.Tensor) else each for each in constants]
    scale, shift = scale_and_shift(*exact)
    channels = weight.shape[dim]
    scale, shift = (each.reshape(-1).expand(channels) for each in (scale, shift))
    shape = [1] * weight.dim()
    shape[dim] = channels
    new_weight = (weight.double() * scale.reshape(shape)).to(weight.dtype)
    new_bias = (shift if bias is None else bias.double() * scale + shift).to(weight.dtype)
    if not scale.isfinite().all() or _overflows(new_weight, weight):
        raise NotFoldableError("a scale is not finite, or makes weights that are not")
    if _overflows(new_bias, shift if bias is None else shift + bias):
        raise NotFoldableError("a scale and a shift make a bias that is not finite")
    laid_out = torch.empty_like(weight)  # with the strides that the graph knows
    return laid_out.copy_(new_weight), new_bias.clone()


def _overflows(made: torch.Tensor, given: torch.Tensor) -> bool:
    return bool((given.isfinite() & ~made.isfinite()).any())


def _item(pair: tuple[torch.Tensor, torch.Tensor], place: int) -> torch.Tensor:
    return pair[place]


def _of_batch_norm(
    weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, variance: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(variance + epsilon)
    if weight is not None:
        scale = scale * weight
    return scale, (-mean * scale if bias is None else bias - mean * scale)


def _one() -> torch.Tensor:
    return torch.ones((), dtype=torch.float64)


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


_ARITHMETIC: dict[Any, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]] = {
    aten.mul.Tensor: lambda c: (_as_tensor(c), _one() * 0),
    aten.div.Tensor: lambda c: (_one() / _as_tensor(c), _one() * 0),
    aten.add.Tensor: lambda c: (_one(), _as_tensor(c)),
    aten.sub.Tensor: lambda c: (_one(), -_as_tensor(c)),
}
