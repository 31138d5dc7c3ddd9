"""Inputs that share memory with an input that is written."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from kagent_core.runs import byte_runs
from kagent_core.specs import MemRange

_ADDRESS_SPACE = 0


def address_ranges(tensor: torch.Tensor) -> list[MemRange]:
    """Return the bytes that a tensor touches, as ranges of the process's memory; none for one that is not strided."""
    if tensor.layout is not torch.strided:
        return []
    first = tensor.data_ptr()
    runs = byte_runs(tensor.shape, tensor.stride(), tensor.element_size())
    return [MemRange(_ADDRESS_SPACE, first + offset, nbytes) for offset, nbytes in runs]


def overlap_with_written(args: Sequence[Any], written: Collection[int]) -> tuple[int, int] | None:
    """Return the first pair (written input, other input) that shares bytes, or None.

    Tensors that only lie between each other's elements do not overlap, unless they are in very many pieces
    (`byte_runs`). A sweep over the sorted ranges, so n log n in their number.
    """
    if not written:
        return None
    spans = [
        (span, index) for index, arg in enumerate(args) if isinstance(arg, torch.Tensor) for span in address_ranges(arg)
    ]
    spans.sort(key=lambda entry: entry[0].offset)
    for position, (span, index) in enumerate(spans):
        for other, other_index in itertools.islice(spans, position + 1, None):
            if other.offset >= span.end:
                break
            if index in written:  # of two tensors: one tensor's own pieces never overlap
                return index, other_index
            if other_index in written:
                return other_index, index
    return None
