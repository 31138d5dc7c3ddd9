"""Convolutions of images of a single place, as of what is left of an image behind a global mean, are products."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten


def is_of_single_places(graph: InferenceGraph, node: Node) -> bool:
    """Whether ``aten::convolution`` multiplies the channels of one place by a matrix that is a constant."""
    arguments: Any = node.args
    source, weight, _, _, padding, _, transposed, _, groups = arguments
    if transposed or groups != 1 or any(padding) or not graph.is_constant(weight):
        return False
    sizes: list[object] = [size for tensor in (source, weight) for size in graph.fake(tensor).shape[2:]]
    return all(isinstance(size, int) and size == 1 for size in sizes)


def as_product(graph: InferenceGraph, node: Node) -> Node:
    """Replace a convolution of single places by ``aten::mm`` or ``aten::addmm`` between views; return the product."""
    arguments: Any = node.args
    source, weight, bias, *_ = arguments
    made, read, *places = graph.fake(weight).shape
    with graph.before(node):
        rows = graph.call(aten.view.default, source, [-1, read])
        matrix = graph.call(aten.permute.default, graph.call(aten.view.default, weight, [made, read]), [1, 0])
        if bias is None:
            product = graph.call(aten.mm.default, rows, matrix)
        else:
            product = graph.call(aten.addmm.default, bias, rows, matrix)
        seen = graph.call(aten.view.default, product, [-1, made, *places])
    graph.replace(node, seen)
    return product
