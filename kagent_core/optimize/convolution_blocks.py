"""Convolutions with constant weights that were laid out in blocks: what the operator means, and how its weight is made.

Blocks are for devices whose kernels keep sums in registers: numbers that are multiplied one after the other lie one
after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_core.optimize.layout import channels_last

_LIBRARY = torch.library.Library("kagent", "FRAGMENT")
_LIBRARY.define(
    "block_convolution(Tensor source, Tensor weight, Tensor? bias, int channels, SymInt[2] stride, SymInt[2] padding,"
    " SymInt[2] dilation, Tensor? beside=None) -> Tensor"
)
_LIBRARY.define("block_transposed_convolution(Tensor source, Tensor weight, Tensor? bias, int channels) -> Tensor")


def block_convolution(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    channels: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a convolution in two dimensions and one group, as the operator ``kagent::block_convolution`` means it.

    Parameters
    ----------
    source
        [images, channels, lines, places].
    weight
        [blocks, lines, taps, channels, width]: a weight, as `in_blocks` lays it out.
    bias
        [channels], of what is made.
    channels
        That are made.
    stride, padding, dilation
        As of ``aten::convolution``.
    beside
        More channels, which follow those of `source`.

    Returns
    -------
    torch.Tensor
        The convolution, channels-last.
    """
    whole = out_of_blocks(weight, channels)
    if beside is not None:
        source = torch.cat([source, beside], 1)
    made: torch.Tensor = torch.ops.aten.convolution.default(
        source, whole, bias, stride, padding, dilation, False, [0, 0], 1
    )
    return made.contiguous(memory_format=torch.channels_last)


def _empty(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    channels: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    reach = [(taps - 1) * by + 1 for taps, by in zip(weight.shape[1:3], dilation, strict=True)]
    room = [size + 2 * pad for size, pad in zip(source.shape[2:], padding, strict=True)]
    sizes = [(have - need) // step + 1 for have, need, step in zip(room, reach, stride, strict=True)]
    made = (source.shape[0], channels, *sizes)
    return torch.empty(made, dtype=source.dtype, device=source.device, memory_format=torch.channels_last)


def block_transposed_convolution(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, channels: int
) -> torch.Tensor:
    """Return a transposed convolution in two dimensions and one group, whose taps never meet: its stride is its window.

    It is what the operator ``kagent::block_transposed_convolution`` means.

    Parameters
    ----------
    source
        [images, channels, lines, places].
    weight
        [lines, taps, blocks, channels, width]: a block of `in_blocks` for every tap.
    bias
        [channels], of what is made.
    channels
        That are made.

    Returns
    -------
    torch.Tensor
        The convolution, channels-last.
    """
    taps = [[out_of_blocks(tap[:, None, None], channels)[..., 0, 0] for tap in line] for line in weight]
    whole = torch.stack([torch.stack(line) for line in taps]).permute(3, 2, 0, 1)
    size = list(weight.shape[:2])
    made: torch.Tensor = torch.ops.aten.convolution.default(source, whole, bias, size, [0, 0], [1, 1], True, [0, 0], 1)
    return made.contiguous(memory_format=torch.channels_last)


def _empty_transposed(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, channels: int
) -> torch.Tensor:
    sizes = [size * taps for size, taps in zip(source.shape[2:], weight.shape[:2], strict=True)]
    made = (source.shape[0], channels, *sizes)
    return torch.empty(made, dtype=source.dtype, device=source.device, memory_format=torch.channels_last)


_LIBRARY.impl("block_convolution", block_convolution, "CompositeExplicitAutograd")
_LIBRARY.impl("block_convolution", _empty, "Meta")
_LIBRARY.impl("block_transposed_convolution", block_transposed_convolution, "CompositeExplicitAutograd")
_LIBRARY.impl("block_transposed_convolution", _empty_transposed, "Meta")


def in_blocks(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return a convolution's weight as blocks of so many channels that are made; the last one overlaps if it must."""
    made = weight.shape[0]
    starts = [min(first, made - width) for first in range(0, made, width)]
    blocks = [weight[first : first + width].permute(2, 3, 1, 0) for first in starts]
    return torch.stack(blocks)


def taps_in_blocks(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return a transposed convolution's weight [read, made, lines, taps] as `in_blocks` of each of its taps."""
    made = weight.shape[1]
    starts = [min(first, made - width) for first in range(0, made, width)]
    return torch.stack([weight[:, first : first + width].permute(2, 3, 0, 1) for first in starts], 2)


def out_of_blocks(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Return the weight that `in_blocks` was given."""
    blocks, *taps, read, width = weight.shape
    whole = weight.permute(0, 4, 3, 1, 2).reshape(blocks * width, read, *taps)
    return torch.cat([whole[: (blocks - 1) * width], whole[blocks * width - channels :][(blocks - 1) * width :]])


def use_blocks(graph: InferenceGraph, node: Node, width: int) -> None:
    """Replace ``aten::convolution`` of one group, whose weight is a constant, by a convolution with blocks."""
    arguments: Any = node.args
    source, weight, bias, stride, padding, dilation, *_ = arguments
    fake = graph.fake(weight)
    made, read, *taps = fake.shape
    like = torch.empty((-(-made // width), *taps, read, width), dtype=fake.dtype, device="meta")
    with graph.before(node):
        blocks = graph.prepared(in_blocks, weight, width, like=like)
        first, *beside = (channels_last(graph, part) for part in _parts(graph, source))
        passed = (first, blocks, bias, made, stride, padding, dilation, *beside)
        convolution = graph.call(torch.ops.kagent.block_convolution.default, *passed)
    graph.replace(node, convolution)


def _parts(graph: InferenceGraph, source: Node) -> list[Node]:
    """Return the two tensors whose channels a convolution reads, if nobody else needs them as one; else that one."""
    if source.target is not torch.ops.aten.cat.default or source.kwargs or graph.only_user(source) is None:
        return [source]
    arguments: Any = source.args
    parts, *dims = arguments
    fakes = [graph.fake(part) for part in parts]
    fits = all(fake.dim() == 4 and fake.dtype is graph.fake(source).dtype for fake in fakes)
    along_channels = [dim % 4 for dim in dims] == [1] and len(parts) == 2
    return list(parts) if fits and along_channels and graph.is_free(source) else [source]


def use_transposed_blocks(graph: InferenceGraph, node: Node, width: int) -> None:
    """Replace a transposed ``aten::convolution`` whose stride is its window, and whose weight is a constant."""
    arguments: Any = node.args
    source, weight, bias, *_ = arguments
    fake = graph.fake(weight)
    read, made, *taps = fake.shape
    like = torch.empty((*taps, -(-made // width), read, width), dtype=fake.dtype, device="meta")
    with graph.before(node):
        blocks = graph.prepared(taps_in_blocks, weight, width, like=like)
        passed = (channels_last(graph, source), blocks, bias, made)
        convolution = graph.call(torch.ops.kagent.block_transposed_convolution.default, *passed)
    graph.replace(node, convolution)
