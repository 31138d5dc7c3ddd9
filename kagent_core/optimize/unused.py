"""Operators of several results of which one is used give just that one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten

_POOLINGS: dict[Any, tuple[Any, int]] = {
    aten.max_pool2d_with_indices.default: (aten.max_pool2d.default, 2),
    aten.max_pool3d_with_indices.default: (aten.max_pool3d.default, 3),
}

SMALL_WINDOW = 27
"""Elements of the largest window that kernels of loop nests take, which need no places."""


def drop_unused_results(graph: InferenceGraph) -> int:
    """Rewrite pooling operators whose places nobody asks for; return how many."""
    dropped = 0
    for node in graph.calls(*_POOLINGS):
        target, dims = _POOLINGS[node.target]
        values = graph.only_user(node)
        if values is None or values.args[1] != 0 or not graph.is_free(node):
            continue
        if math.prod(_spread(node.args[1], dims)) > SMALL_WINDOW:
            continue
        with graph.before(node):
            made = graph.call(target, *node.args, **node.kwargs)
        graph.replace(values, made)
        dropped += 1
    graph.clean()
    return dropped


def leave_out_logarithms(graph: InferenceGraph) -> int:
    """Mark attentions that need not give the logarithms of their sums, which gradients need; return how many.

    Strides are known by then: whatever asks for a node's results anew gets all of them again.
    """
    marked = 0
    for node in graph.calls(aten._scaled_dot_product_flash_attention_for_cpu.default):
        if graph.is_free(node) and all(user.args[1] == 0 for user in node.users):
            node.meta = {**node.meta, "val": (node.meta["val"][0], None)}
            marked += 1
    return marked


def _spread(sizes: Any, dims: int) -> Sequence[int]:
    return list(sizes) * (dims if len(sizes) == 1 else 1)
