"""Convolutions for which generated kernels are faster than oneDNN, laid out as those take them.

A call of oneDNN from PyTorch takes some 30 microseconds before it computes anything, which is most of a small network's
time. Generated kernels have no such time, compute what follows where they store, NaN included, and keep their sums in
registers as oneDNN does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kagent_core.codegen.generic.dense_tiles import choose_tile
from kagent_core.codegen.generic.register_rows import GAP
from kagent_core.codegen.generic.scaled_rows import MOST_BYTES
from kagent_core.optimize.convolution_blocks import use_blocks, use_transposed_blocks
from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_core.optimize.layout import channels_last
from kagent_cpu.language import CLanguage

aten = torch.ops.aten

_FEW_CHANNELS = 8
"""Channels to read up to which a window that has several places is not read from blocks: its numbers are few."""

_NEAR, _BY_BLOCK = 192 * 1024, 2048 * 1024
"""Most bytes of the weight of a window of one place that is not read from blocks: where a line has at least
`_LONG_ENOUGH` places, and blocks several vectors of channels; and otherwise.

Weights that other layers have driven out of the caches are fetched ahead from blocks: those of 192 to 1,152 channels
and 7 by 7 places took three quarters of the time. Smaller ones took the same.
"""

_LONG_ENOUGH = 7

_MANY_REGISTERS, _BY_FEW = 32, 4 * 1024 * 1024
"""Registers with which weights of any size are read from blocks, and the most bytes with fewer: with 16 registers of 32
bytes, larger windows took 4 to 12 % longer than in oneDNN, smaller ones and strides 6 % longer to 18 % less."""

_ANY_LENGTH = 28
"""Places that a line is taken to have when it may have any number of them."""

_MOST_THREADS = 8
"""Threads up to which convolutions of all channels with all channels are generated. Their kernels have few pieces of
work, 8 in a layer of a ResNet; oneDNN cuts a layer up as finely as there are threads. More than 2 were not measured."""


def is_direct(graph: InferenceGraph, node: Node, threads: int = 1) -> bool:
    """Whether a convolution with constant weights is better computed by a generated kernel, in so many threads."""
    arguments: Any = node.args
    source, weight, *_, transposed, _, groups = arguments
    made, read, *_ = graph.fake(weight).shape
    if transposed or graph.fake(node).dtype is not torch.float32 or graph.fake(node).dim() != 4:
        return False
    if groups == 1:
        fits = CLanguage.register_tiles.registers >= _MANY_REGISTERS or graph.fake(weight).nbytes <= _BY_FEW
        return (fits and threads <= _MOST_THREADS) or not _is_in_blocks(graph, node)
    # ATen, which says how the result lies, takes a single channel for contiguous, not for channels-last
    return bool(groups == made == graph.fake(source).shape[1] and read == 1 < groups)


def lay_out(graph: InferenceGraph, node: Node) -> None:
    """Give a convolution tensors as the generated kernel takes them."""
    arguments: Any = node.args
    source, weight, *rest = arguments
    if _is_in_blocks(graph, node):
        use_blocks(graph, node, _width(graph.fake(node).shape[3], graph.fake(weight).shape[0]))
        return
    with graph.before(node):
        laid_out = graph.prepared(_made_innermost, weight, like=_made_innermost(graph.fake(weight)))
        made = graph.call(aten.convolution.default, channels_last(graph, source), laid_out, *rest)
    graph.replace(node, made)


def is_direct_transposed(graph: InferenceGraph, node: Node) -> bool:
    """Whether a transposed convolution with constant weights has taps that never meet, for which there is a kernel."""
    arguments: Any = node.args
    _, weight, _, stride, padding, dilation, transposed, output_padding, groups = arguments
    fake = graph.fake(node)
    apart = list(graph.fake(weight).shape[2:]) == list(stride) and not any(padding) and not any(output_padding)
    return bool(
        transposed and apart and groups == 1 == max(dilation) and fake.dim() == 4 and fake.dtype is torch.float32
    )


def lay_out_transposed(graph: InferenceGraph, node: Node) -> None:
    """Give such a convolution its weight as the generated kernel takes it."""
    arguments: Any = node.args
    source, weight, *_ = arguments
    use_transposed_blocks(graph, node, _width(graph.fake(source).shape[3], graph.fake(weight).shape[1]))


def _width(length: object, made: int) -> int:
    """Return how many channels a block of a weight has, for lines of so many places."""
    return choose_tile(CLanguage.register_tiles, length if isinstance(length, int) else _ANY_LENGTH, made).width


def _is_in_blocks(graph: InferenceGraph, node: Node) -> bool:
    """Whether the weight of a convolution is better laid out in blocks of the channels that are made."""
    arguments: Any = node.args
    _, weight, _, stride, padding, *_, groups = arguments
    made, read, *taps = graph.fake(weight).shape
    if groups != 1:
        return False
    if any(tap != 1 for tap in taps):
        return bool(read > _FEW_CHANNELS or read == 1)
    by_line = any(step != 1 for step in stride) or any(padding)
    length: object = graph.fake(node).shape[3]
    fills_tiles = not isinstance(length, int) or (length >= _LONG_ENOUGH and _is_wide(length, made))
    most = _NEAR if fills_tiles else _BY_BLOCK
    return read == 1 or by_line or graph.fake(weight).nbytes > (MOST_BYTES if _is_scaled(graph, node) else most)


def _is_scaled(graph: InferenceGraph, node: Node) -> bool:
    """Whether numbers that an image's channels are multiplied with are better multiplied with the weight.

    They are where there are more places than channels that are made. With 14 by 14 places of 672 channels, of which 112
    are made, that took 3% less than a kernel for the product and a convolution in blocks; with 7 by 7, 5 to 15% more.
    """
    arguments: Any = node.args
    source, weight, *_ = arguments
    if source.target is not aten.mul.Tensor or graph.only_user(source) is not node:
        return False
    sizes: list[object] = list(graph.fake(source).shape[2:])
    if not all(isinstance(size, int) for size in sizes):
        return False
    scaled = any(map(_is_same_at_all_places, map(graph.fake, source.all_input_nodes)))
    return scaled and graph.fake(source).shape[2:].numel() > graph.fake(weight).shape[0]


def _is_same_at_all_places(fake: torch.Tensor) -> bool:
    return fake.dim() == 4 and all(fake.shape[dim] == 1 or fake.stride(dim) == 0 for dim in (2, 3))


def _is_wide(length: int, made: int) -> bool:
    """Whether a block has several vectors of channels: then what a place has is loaded for more than one product."""
    return _width(length, made) > CLanguage.register_tiles.lanes


def _made_innermost(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight whose channels of what is made are neighbours in memory."""
    made, read, *taps = weight.shape
    return weight.new_empty(*taps, read, made + GAP)[..., :made].copy_(weight.permute(2, 3, 1, 0)).permute(3, 2, 0, 1)
