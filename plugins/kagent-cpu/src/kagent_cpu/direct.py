"""Convolutions for which generated kernels are faster than oneDNN, laid out as those take them.

A call of oneDNN from PyTorch takes some 30 microseconds before it computes anything, which is most of a small network's
time. Generated kernels have no such time, compute what follows where they store, NaN included, and keep their sums in
registers as oneDNN does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_core.optimize.layout import channels_last

aten = torch.ops.aten

_FEW_CHANNELS = 8
"""Channels to read up to which windows of more than one place are better computed directly."""

_BY_LINE, _BY_BLOCK = 256 * 1024, 2048 * 1024
"""Most bytes of a weight that is read again for each line of the result, or for each block of places."""


def is_direct(graph: InferenceGraph, node: Node) -> bool:
    """Whether a convolution with constant weights is better computed by a generated kernel."""
    arguments: Any = node.args
    source, weight, _, stride, padding, _, transposed, _, groups = arguments
    made, read, *taps = graph.fake(weight).shape
    if transposed or graph.fake(node).dtype is not torch.float32 or graph.fake(node).dim() != 4:
        return False
    if graph.fake(source).shape[1] == 1:
        # ATen, which says how the result lies, takes a single channel for contiguous, not for channels-last
        return False
    if groups != 1:
        return bool(groups == made == graph.fake(source).shape[1] and read == 1)
    if any(tap != 1 for tap in taps):
        return bool(read <= _FEW_CHANNELS)
    by_line = any(step != 1 for step in stride) or any(padding)
    return graph.fake(weight).nbytes <= (_BY_LINE if by_line else _BY_BLOCK)


def lay_out(graph: InferenceGraph, node: Node) -> None:
    """Give a convolution tensors as the generated kernel takes them."""
    arguments: Any = node.args
    source, weight, *rest = arguments
    with graph.before(node):
        laid_out = graph.prepared(_made_innermost, weight, like=_made_innermost(graph.fake(weight)))
        made = graph.call(aten.convolution.default, channels_last(graph, source), laid_out, *rest)
    graph.replace(node, made)


def _made_innermost(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight whose channels of what is made are neighbours in memory."""
    return weight.permute(2, 3, 1, 0).clone(memory_format=torch.contiguous_format).permute(3, 2, 0, 1)
