"""Products of which some rows are needed only: those are picked before the product.

So it is with a language model's head where the logits of the last token are asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_PICKS = (aten.select.int, aten.slice.Tensor)


def compute_needed_rows(graph: InferenceGraph) -> int:
    """Pick rows before a product instead of after it; return for how many products.

    Rows come in any number of dimensions, [..., N], of which `select` and `slice` take some. Products whose number of
    rows is a symbol stay.
    """
    changed = 0
    for node in graph.calls(aten.addmm.default, aten.mm.default):
        rows = _rows_of(graph, node)
        picks = _picks_after(graph, rows)
        if picks and _can_pick(graph, node, rows, picks):
            _pick_first(graph, node, rows, picks)
            changed += 1
    if changed:
        graph.clean()
    return changed


def _rows_of(graph: InferenceGraph, node: Node) -> Node:
    """Return the view [..., N] through which alone a product is used, or the product."""
    user = graph.only_user(node)
    if user is None or user.target not in _VIEWS:
        return node
    return user if graph.fake(user).shape[-1:] == graph.fake(node).shape[-1:] else node


def _picks_after(graph: InferenceGraph, node: Node) -> list[Node]:
    """Return the calls, one after the other, that take some of a tensor's rows: all that becomes of it."""
    picks: list[Node] = []
    user = graph.only_user(node)
    while user is not None and user.target in _PICKS and _keeps_columns(graph, user):
        picks.append(user)
        user = graph.only_user(user)
    return picks


def _keeps_columns(graph: InferenceGraph, pick: Node) -> bool:
    source = graph.fake(pick.args[0])
    if pick.kwargs or pick.args[0] is not pick.all_input_nodes[0] or len(pick.all_input_nodes) > 1:
        return False
    dim: Any = pick.args[1] if len(pick.args) > 1 else 0
    return bool(dim % source.dim() != source.dim() - 1 or source.shape == graph.fake(pick).shape)


def _can_pick(graph: InferenceGraph, node: Node, rows: Node, picks: list[Node]) -> bool:
    if not all(map(graph.is_free, (node, *picks))) or node.kwargs or graph.is_constant(node):
        return False
    sizes: list[Any] = [*graph.fake(rows).shape, *graph.fake(node).shape, *graph.fake(node.args[-2]).shape]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or not graph.fake(picks[-1]).numel():
        return False
    if node.target is aten.addmm.default and graph.fake(node.args[0]).dim() > 1:
        return False  # a summand for each row
    return graph.fake(picks[-1]).numel() < graph.fake(rows).numel()


def _pick_first(graph: InferenceGraph, node: Node, rows: Node, picks: list[Node]) -> None:
    *bias, source, weight = node.args
    width, columns = graph.fake(source).shape[-1], graph.fake(node).shape[-1]
    with graph.before(node):
        picked = graph.call(aten.view.default, source, [*graph.fake(rows).shape[:-1], width])
        for pick in picks:
            # what is the whole width of the result may be more than that of the source
            if graph.fake(pick).shape != graph.fake(pick.args[0]).shape:
                picked = graph.call(pick.target, picked, *pick.args[1:])
        sizes = list(graph.fake(picked).shape[:-1])
        if not graph.fake(picked).is_contiguous():
            picked = graph.call(aten.clone.default, picked, memory_format=torch.contiguous_format)
        flat = graph.call(aten.view.default, picked, [math.prod(sizes), width])
        product = graph.call(node.target, *bias, flat, weight)
        made = graph.call(aten.view.default, product, [*sizes, columns])
        size, strides = graph.fake(picks[-1]).shape, graph.fake(picks[-1]).stride()
        if math.prod(sizes) == 1 and strides[-1] == 1:  # one row: strides of 1 dimension lay it out, and any do
            made = graph.call(aten.as_strided.default, made, list(size), list(strides))
    graph.replace(picks[-1], made)
