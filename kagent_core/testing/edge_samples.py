"""Calls of one operator at the edges of blocks: sizes one below, at and one above a whole number of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kagent_core.testing.larger_samples import larger
from kagent_core.testing.operator_samples import OperatorCall

EDGES = (1023, 1024, 1025, 4095, 4096, 4097)
"""Elements: around multiples of every usual size of a block. Beside a multiple, a grid of whole blocks has threads to
spare."""


def at_edges(base: OperatorCall) -> Iterator[OperatorCall]:
    """Yield calls like another one whose largest tensor has about as many elements as `EDGES` say.

    It has exactly as many where the operator takes tensors of one dimension. Sizes that make no call are left out.
    """
    largest = max(base.tensors, key=torch.Tensor.numel, default=None)
    if largest is None:
        return
    shape = largest.shape

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1) if tensor.shape == shape else tensor

    for numel in EDGES:
        call = larger(base.with_tensors(flat, base.variant), numel) or larger(base, numel)
        if call is not None:
            yield replace(call, variant=f"{numel} elements")
