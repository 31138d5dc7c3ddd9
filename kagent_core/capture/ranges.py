"""Inputs that share memory with an input that is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from kagent_core.specs import MemRange

_ADDRESS_SPACE = 0


def address_range(tensor: torch.Tensor) -> MemRange:
    """Return the bytes that a tensor covers, as a range of the process's memory."""
    if tensor.numel() == 0:
        return MemRange(_ADDRESS_SPACE, tensor.data_ptr(), 0)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return MemRange(_ADDRESS_SPACE, tensor.data_ptr(), span * tensor.element_size())


def overlap_with_written(args: Sequence[Any], written: Collection[int]) -> tuple[int, int] | None:
    """Return the first pair (written input, other input) that shares bytes, or None.

    Ranges are covering ranges: interleaved tensors count as overlapping, which costs speed but never a result.
    A sweep over the sorted ranges, so n log n in the number of inputs.
    """
    if not written:
        return None
    spans = [
        (address_range(arg), index)
        for index, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and arg.numel() > 0
    ]
    spans.sort(key=lambda entry: entry[0].offset)
    for position, (span, index) in enumerate(spans):
        for other, other_index in spans[position + 1 :]:
            if other.offset >= span.end:
                break
            if index in written:
                return index, other_index
            if other_index in written:
                return other_index, index
    return None
