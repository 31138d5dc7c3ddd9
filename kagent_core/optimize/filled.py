"""Tensors filled with a number like an input depend on its shape only: where that is known, they are constants."""

from __future__ import annotations

from typing import Any

import torch

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten


def fill_by_shape(graph: InferenceGraph) -> int:
    """Fill by shape what is filled like a tensor of known shape; return how many are.

    What is laid out in another way than contiguously stays: ``aten::full`` does not make it.
    """
    changed = 0
    for node in graph.calls(aten.full_like.default):
        fake = graph.fake(node)
        sizes: list[Any] = list(fake.shape)
        if not all(isinstance(size, int) for size in sizes) or not fake.is_contiguous() or not graph.is_free(node):
            continue
        with graph.before(node):
            options = {"dtype": fake.dtype, "layout": torch.strided, "device": fake.device, "pin_memory": False}
            made = graph.call(aten.full.default, sizes, node.args[1], **options)
        graph.replace(node, made)
        changed += 1
    if changed:
        graph.clean()
        graph.note_constants()
    return changed
