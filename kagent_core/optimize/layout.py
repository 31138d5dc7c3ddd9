"""Strides after a rewrite: what kernels give now is carried through the graph, and results come laid out as before."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


_CONVERSION = "conversion"


class LayoutError(Exception):
    """A graph whose strides cannot be kept: it is not rewritten."""


def channels_last(graph: InferenceGraph, source: Node) -> Node:
    """Insert a conversion to channels-last, which `propagate_strides` drops where the tensor turns out to be so."""
    node = graph.call(aten.clone.default, source, memory_format=torch.channels_last)
    node.meta[_CONVERSION] = True
    return node


def propagate_strides(graph: InferenceGraph) -> int:
    """Let every node tell the strides that it has now; return how many copies keep what depends on the old ones.

    The caller gets its results with the strides that the graph was captured with, which are eager PyTorch's. A view
    that cannot be had of a tensor as it lies now is had of a copy.

    Raises
    ------
    LayoutError
        When old strides are needed that no copy has.
    """
    before = graph.captured
    copies = 0
    for node in list(graph.graph.nodes):
        if node.op == "output":
            copies += _restore(graph, node, before)
        elif node.op == "call_function" and "prepared" not in node.meta:
            copies += _update(graph, node, before)
            copies += _convert(graph, node)
    return copies


def _update(graph: InferenceGraph, node: Node, before: dict[Node, Any]) -> int:
    # a view of what is made otherwise now lies in other memory, whatever its strides
    if all(source.meta.get("val") is before.get(source) for source in node.all_input_nodes):
        return 0
    copies = 0
    if node.target is aten.as_strided.default or (node.target in _VIEWS and not _is_viewable(graph, node)):
        copies = _restore(graph, node, before)
    node.meta = {**node.meta, "val": graph.evaluated(node)}
    return copies


def _convert(graph: InferenceGraph, node: Node) -> int:
    """Drop a conversion of what is laid out so already; return 1 for one that stays."""
    if _CONVERSION not in node.meta:
        return 0
    [source] = node.all_input_nodes
    if not graph.fake(source).is_contiguous(memory_format=torch.channels_last):
        return 1
    node.replace_all_uses_with(source)
    graph.graph.erase_node(node)
    return 0


def _is_viewable(graph: InferenceGraph, node: Node) -> bool:
    try:
        graph.evaluated(node)
    except (RuntimeError, ValueError):
        return False
    return True


def _restore(graph: InferenceGraph, user: Node, before: dict[Node, Any]) -> int:
    """Give a node its arguments as they were laid out; return how many had to be copied."""
    copies = 0
    for source in list(user.all_input_nodes):
        old = before.get(source)
        if not isinstance(old, torch.Tensor) or _same_strides(source.meta.get("val"), old):
            continue
        with graph.before(user):
            user.replace_input_with(source, _laid_out(graph, source, old))
        copies += 1
    return copies


def _laid_out(graph: InferenceGraph, source: Node, old: torch.Tensor) -> Node:
    """Insert a copy of a tensor that has the strides of another one."""
    dims, strides = range(old.dim()), old.stride()
    order = sorted(dims, key=lambda dim: (-strides[dim], -old.shape[dim], dim))
    permuted = graph.call(aten.permute.default, source, order)
    copied = graph.call(aten.clone.default, permuted, memory_format=torch.contiguous_format)
    made = graph.call(aten.permute.default, copied, [order.index(dim) for dim in dims])
    if not _same_strides(made.meta["val"], old):
        raise LayoutError(f"no copy has the strides {tuple(old.stride())}")
    return made


def _same_strides(new: Any, old: Any) -> bool:
    """Whether two values are laid out alike; strides of dimensions of size 1 lay nothing out."""
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor) == isinstance(old, torch.Tensor)
    pairs = zip(new.shape, new.stride(), old.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in pairs)
