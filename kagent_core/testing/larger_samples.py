"""Calls of one operator with more elements, for timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kagent_core.testing.operator_samples import OperatorCall


def larger(call: OperatorCall, numel: int) -> OperatorCall | None:
    """Return a call like another one whose largest tensor has about so many elements; None where none can be made.

    Equal sizes stay equal, and lists of sizes among the arguments grow with the tensors. Values are random, within the
    limits of those that the tensors have.
    """
    largest = max(call.tensors, key=torch.Tensor.numel, default=None)
    if largest is None or largest.numel() == 0:
        return None
    growing = [size for size in largest.shape if size > 1]
    if not growing:
        return None
    factor = (numel / math.prod(growing)) ** (1 / len(growing))

    def grown(size: int) -> int:
        return size if size <= 1 else max(round(size * factor), 1)

    random_state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        for sizes_grow in (False, True):
            scaled = _scaled(call, grown, sizes_grow)
            args, kwargs = scaled.copied()
            try:
                with torch.no_grad():
                    call.overload(*args, **kwargs)
            except Exception:  # noqa: BLE001  such sizes make no call
                continue
            return scaled
    finally:
        torch.set_rng_state(random_state)
    return None


def _scaled(call: OperatorCall, grown: Callable[[int], int], sizes_grow: bool) -> OperatorCall:
    def scale(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _like(leaf, tuple(grown(size) for size in leaf.shape))
        return leaf

    def scale_list(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            return [grown(item) for item in value] if sizes_grow else value
        return pytree.tree_map(scale, value)

    args = tuple(scale_list(value) for value in call.args)
    kwargs = {name: scale_list(value) for name, value in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs, variant="larger")


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if tensor.is_complex():
        return torch.randn(shape, dtype=tensor.dtype)
    finite = tensor[tensor.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0, 1)
    if tensor.is_floating_point():
        return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).to(tensor.dtype)
    return torch.randint(int(low), int(high) + 1, tuple(shape), dtype=tensor.dtype)
