"""Products and convolutions in bfloat16: which processors have units for them, and float32 models by request.

A bfloat16 operand has 8 significant bits. Its products are exact in float32, in which oneDNN adds them up; the result
is rounded to bfloat16 once.
"""

from __future__ import annotations

import platform

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten


def packed_dtypes() -> frozenset[torch.dtype]:
    """Return the types of products and convolutions for which oneDNN packs weights on this processor."""
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset({torch.float32, torch.bfloat16} if half else {torch.float32})


def why_not_in(dtype: str) -> str | None:
    """Return why float32 products cannot be computed in another type on this processor; None where they can."""
    if dtype != "bfloat16":
        return f"it has no products in {dtype}"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 products for this processor"
    if not has_bfloat16_units():
        return "this processor has no units for bfloat16, such as avx512_bf16, and would be slower than in float32"
    return None


def has_bfloat16_units() -> bool:
    """Whether the processor multiplies bfloat16 numbers itself, rather than after converting them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True  # elsewhere oneDNN takes bfloat16 only where there are units
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def in_bfloat16(graph: InferenceGraph, node: Node) -> Node:
    """Let a float32 product or convolution be computed in bfloat16, and return the call that does.

    What neighbours it stays in float32: its arguments are rounded in front of it, and its result is converted back.
    """
    rounded: dict[Node, Node] = {}
    with graph.before(node):
        for source in node.all_input_nodes:
            rounded[source] = _rounded(graph, source, node)
        arguments = [rounded[arg] if isinstance(arg, Node) else arg for arg in node.args]
        made = graph.call(node.target, *arguments)
        back = graph.call(aten._to_copy.default, made, dtype=torch.float32)
    back.meta["reduced"] = True
    graph.replace(node, back)
    return made


def _rounded(graph: InferenceGraph, source: Node, user: Node) -> Node:
    """Return a value in bfloat16; products that share it, such as queries and keys, share that."""
    for other in source.users:
        if other.target is aten._to_copy.default and other.kwargs == {"dtype": torch.bfloat16} and other < user:
            return other
    return graph.call(aten._to_copy.default, source, dtype=torch.bfloat16)
