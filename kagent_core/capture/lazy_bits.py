"""PyTorch's lazy conjugation and negation: inputs that come with other bits than their graph was captured with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

GraphRunner = Callable[[list[Any]], list[Any]]


def lazy_bits_as_captured(graph_module: GraphModule, run: GraphRunner) -> GraphRunner:
    """Return a runner that gives each input the lazy bits that the graph's operators were captured for.

    A graph's views say which of them are lazily conjugated. An input that comes conjugated where it was not, or the
    other way round, holds the same numbers in other bytes, so it is copied.
    """
    expected = [
        (index, node.meta["val"].is_conj(), node.meta["val"].is_neg())
        for index, node in enumerate(n for n in graph_module.graph.nodes if n.op == "placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]

    def run_with_bits(args: list[Any]) -> list[Any]:
        for index, conj, neg in expected:
            arg = args[index]
            if arg is not None and (arg.is_conj() != conj or arg.is_neg() != neg):
                args[index] = with_bits(arg, conj, neg)
        return run(args)

    return run_with_bits


def with_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """Return the same numbers with the same strides, stored so that these lazy bits read them right."""
    stored = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    stored.copy_(tensor)  # what `tensor` stands for, written out
    if conj:
        stored = torch._conj(stored.conj_physical_())
    return torch._neg_view(stored.neg_()) if neg else stored
