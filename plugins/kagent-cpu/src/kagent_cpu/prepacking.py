"""Products and convolutions with constant weights run in oneDNN, with weights that were packed for it once.

On processors with AVX-512 that are not Intel's, a float32 product took half the time of ``aten::addmm``, which MKL
computes (``kagent bench models`` shows whole models). Convolutions give and take channels-last tensors, so that
neighbours need no conversion.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from kagent_core.device import GraphOptimizer
from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_cpu.activations import activation_after

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


class Prepacking(GraphOptimizer):
    """Packs weights for oneDNN."""

    def optimize(self, graph: InferenceGraph) -> None:
        """Replace products and convolutions whose weights are constants."""
        for node in graph.calls(aten.convolution.default):
            if _is_packable_convolution(graph, node):
                _pack_convolution(graph, node)
        for node in graph.calls(aten.addmm.default, aten.mm.default):
            if _is_packable_product(graph, node):
                _pack_product(graph, node)
        graph.clean()


def _is_packable_convolution(graph: InferenceGraph, node: Node) -> bool:
    _, weight, bias, *_, transposed, _, _ = node.args
    fake = graph.fake(node)
    constant = graph.is_constant(weight) and graph.is_constant(bias) and not graph.is_constant(node)
    known = fake.dim() == 4 and fake.dtype is torch.float32 and not transposed and _is_sized(fake)
    return constant and known and graph.is_free(node)


def _pack_convolution(graph: InferenceGraph, node: Node) -> None:
    source, weight, bias, stride, padding, dilation, _, _, groups = node.args
    geometry = (padding, stride, dilation, groups)
    activation = activation_after(graph, node)
    with graph.before(node):
        packed = graph.prepared(
            _packed_convolution_weight, weight, *geometry, list(graph.fake(source).shape), like=graph.fake(weight)
        )
        arguments = activation.arguments if activation is not None else ("none", [], "")
        made = graph.call(torch.ops.mkldnn._convolution_pointwise.default, source, packed, bias, *geometry, *arguments)
    graph.replace(activation.last if activation is not None else node, made)


def _packed_convolution_weight(
    weight: torch.Tensor, padding: list[int], stride: list[int], dilation: list[int], groups: int, size: list[int]
) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_convolution_weight(weight, padding, stride, dilation, groups, size)  # type: ignore[no-any-return]


def _is_packable_product(graph: InferenceGraph, node: Node) -> bool:
    weight, fake = node.args[-1], graph.fake(node)
    if node.kwargs or not graph.is_constant(weight) or graph.is_constant(node) or not graph.is_free(node):
        return False
    if node.target is aten.addmm.default:
        bias = node.args[0]
        if not graph.is_constant(bias) or graph.fake(bias).shape != fake.shape[1:]:
            return False
    rows = fake.shape[0]
    # a single row reads each weight once, in whatever order it lies
    return fake.dtype is torch.float32 and _is_sized(fake, graph.fake(weight)) and rows > 1


def _pack_product(graph: InferenceGraph, node: Node) -> None:
    bias = node.args[0] if node.target is aten.addmm.default else None
    source, weight = node.args[-2:]
    rows = graph.fake(node).shape[0]
    result = _seen_as(graph, node)
    activation = activation_after(graph, result)
    with graph.before(node):
        packed = graph.prepared(_packed_product_weight, weight, rows, like=graph.fake(weight).t())
        arguments = activation.arguments if activation is not None else ("none", [], "")
        made = graph.call(torch.ops.mkldnn._linear_pointwise.default, source, packed, bias, *arguments)
    graph.replace(node, made)
    if activation is not None:
        graph.replace(activation.last, made if result is node else result)


def _seen_as(graph: InferenceGraph, node: Node) -> Node:
    """Return the view through which alone a product is used, or the product."""
    user = graph.only_user(node)
    return user if user is not None and user.target in _VIEWS else node


def _packed_product_weight(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), rows)  # type: ignore[no-any-return]


def _is_sized(*fakes: torch.Tensor) -> bool:
    """Whether sizes are numbers rather than symbols, and none of them 0."""
    sizes: list[object] = [size for fake in fakes for size in fake.shape]
    return all(isinstance(size, int) and size > 0 for size in sizes)
