"""Chains of operators that a compiler can fuse, as they occur in models, at three sizes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
MakeInputs = Callable[[Shape, torch.dtype], tuple[Tensor, ...]]

SIZES = ("small", "middle", "large")
"""About 16 thousand, 1 million and 8 million elements."""


def _sizes(small: Shape, middle: Shape, large: Shape) -> Shapes:
    return MappingProxyType(dict(zip(SIZES, (small, middle, large), strict=True)))


TOKENS = _sizes((16, 1024), (4, 256, 1024), (8, 1024, 1024))  # batch, tokens, features
SCORES = _sizes((1, 4, 64, 64), (1, 16, 256, 256), (2, 16, 512, 512))  # batch, heads, queries, keys
HEADS = _sizes((1, 4, 64, 64), (1, 16, 1024, 64), (4, 16, 2048, 64))  # batch, heads, tokens, features of a head
MATRICES = _sizes((128, 128), (1024, 1024), (8, 1024, 1024))
TABLES = _sizes((128, 128), (1024, 1024), (4096, 2048))
ROWS = _sizes((16, 1024), (1024, 1024), (8192, 1024))


@dataclass(frozen=True)
class Chain:
    """A function that is measured.

    Attributes
    ----------
    name
        For the table and for ``--rows``.
    function
        What is computed.
    make_inputs
        Makes its arguments for a shape and a dtype.
    shapes
        By size, the shape of its largest argument.
    dtype
        Of the arguments.
    """

    name: str
    function: Callable[..., Tensor]
    make_inputs: MakeInputs
    shapes: Shapes
    dtype: torch.dtype = torch.float32


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


def _silu_mul(x: Tensor, y: Tensor) -> Tensor:
    return functional.silu(x) * y


def _layer_norm(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(functional.gelu(x + bias) + residual, weight.shape, weight, shift)


def _softmax_mask(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores * 0.125 + mask, dim=-1)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def _twelve_ops(x: Tensor, y: Tensor) -> Tensor:
    value = torch.tanh(x * y + x) - y
    value = torch.clamp(torch.sqrt(torch.abs(value)) * 0.5, 0.1, 2.0)
    return torch.sigmoid(torch.maximum(torch.exp(-value), y))


def _transposed(x: Tensor, y: Tensor) -> Tensor:
    return x.transpose(-1, -2) + y


def _broadcast(matrix: Tensor, column: Tensor, row: Tensor) -> Tensor:
    return (column[:, None] + row) * matrix


def _column_sum(x: Tensor) -> Tensor:
    return functional.gelu(x).sum(0)


def _alike(count: int) -> MakeInputs:
    """Return what makes arguments of one shape."""
    return lambda shape, dtype: tuple(torch.randn(shape, dtype=dtype) for _ in range(count))


def _features(alike: int, vectors: int) -> MakeInputs:
    """Return what makes arguments of one shape, and then vectors as long as their last dimension."""
    return lambda shape, dtype: (*_alike(alike)(shape, dtype), *_alike(vectors)(shape[-1:], dtype))


def _scores_and_causal_mask(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    mask = torch.full((1, 1, *shape[-2:]), float("-inf"), dtype=dtype).triu(1)
    return torch.randn(shape, dtype=dtype), mask


def _head_and_angles(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    frequencies = 1e4 ** -torch.linspace(0, 1, shape[-1] // 2)
    angles = torch.outer(torch.arange(shape[-2]), torch.cat((frequencies, frequencies)))
    return torch.randn(shape, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def _matrix_and_transposed(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype).transpose(-1, -2).contiguous()


def _table_and_edges(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, columns = shape
    return torch.randn(shape, dtype=dtype), torch.randn(rows, dtype=dtype), torch.randn(columns, dtype=dtype)


CHAINS = (
    Chain("gelu", _gelu, _alike(1), TOKENS),
    Chain("silu-mul", _silu_mul, _alike(2), TOKENS),
    Chain("layer-norm", _layer_norm, _features(2, 3), TOKENS),
    Chain("softmax-mask", _softmax_mask, _scores_and_causal_mask, SCORES),
    Chain("rms-norm", _rms_norm, _features(1, 1), TOKENS),
    Chain("rotary", _rotary, _head_and_angles, HEADS),
    Chain("twelve-ops", _twelve_ops, _alike(2), TOKENS),
    Chain("transposed", _transposed, _matrix_and_transposed, MATRICES),
    Chain("broadcast", _broadcast, _table_and_edges, TABLES),
    Chain("column-sum", _column_sum, _alike(1), ROWS),
    Chain("silu-mul-bf16", _silu_mul, _alike(2), TOKENS, torch.bfloat16),
    Chain("layer-norm-bf16", _layer_norm, _features(2, 3), TOKENS, torch.bfloat16),
)
"""What is measured."""
