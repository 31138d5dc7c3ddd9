"""Operators to compare with eager PyTorch: a few of every kind, in programs that make many results of one input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Inputs = Mapping[str, Tensor]
Program = Mapping[str, Callable[..., Any]]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Group:
    """Operators that take the same tensors.

    Attributes
    ----------
    name
        For the table.
    dtypes
        In which it is run.
    inputs
        Makes the tensors for a dtype.
    program
        By name, what is computed of them.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    inputs: Callable[[torch.dtype], tuple[Tensor, ...]]
    program: Program


POINTWISE: Program = {
    "add with alpha": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x - y,
    "mul by a number": lambda x, y: x * 0.3,
    "div": lambda x, y: x / y,
    "relu": lambda x, y: torch.relu(x),
    "gelu": lambda x, y: functional.gelu(x.clamp(-9, 9)),  # of infinity, eager makes NaN on some processors
    "gelu by tanh": lambda x, y: functional.gelu(x, approximate="tanh"),
    "silu times": lambda x, y: functional.silu(x) * y,
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "tanh": lambda x, y: torch.tanh(x),
    "exp": lambda x, y: torch.exp(x),
    "log": lambda x, y: torch.log(x.abs() + 0.5),
    "sqrt": lambda x, y: torch.sqrt(x),
    "rsqrt": lambda x, y: torch.rsqrt(x.abs() + 0.1),
    "pow": lambda x, y: torch.pow(x.abs() + 0.1, 2.5),
    "sin": lambda x, y: torch.sin(x),
    "erf": lambda x, y: torch.erf(x),
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "clamp": lambda x, y: torch.clamp(x, -0.5, 0.7),
    "floor": lambda x, y: torch.floor(x * 3),
    "round": lambda x, y: torch.round(x * 3),
    "fmod": lambda x, y: torch.fmod(x, 0.7),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "leaky_relu": lambda x, y: functional.leaky_relu(x, 0.1),
    "softplus": lambda x, y: functional.softplus(x),
    "hardswish": lambda x, y: functional.hardswish(x),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "isnan": lambda x, y: torch.isnan(x),
    "less": lambda x, y: x < y,
}

VIEWS: Program = {
    "transposed": lambda x, y: x.t() * 2,
    "every other row": lambda x, y: x[::2] + y[1::2],
    "cat": lambda x, y: torch.cat((x, y[:, 1:]), 1),
    "stack": lambda x, y: torch.stack((x, y), 1),
    "flip": lambda x, y: x.flip(1) + y,
    "roll": lambda x, y: torch.roll(x, 3, 1),
    "pad": lambda x, y: functional.pad(x, (1, 2)),
    "expand": lambda x, y: x[:, :1].expand(-1, 5) + 1,
    "a column and a row": lambda x, y: x[:, 0][:, None] * y[0],
    "tril": lambda x, y: torch.tril(x, 1),
    "to float32": lambda x, y: x.float(),
    "to int32": lambda x, y: (x.nan_to_num(0, 9, -9) * 5).to(torch.int32),
}

REDUCTIONS: Program = {
    "sum": lambda x, w, b: x.sum(),
    "sum of rows": lambda x, w, b: x.sum(-1),
    "sum of columns": lambda x, w, b: x.sum(0),
    "mean": lambda x, w, b: x.mean(-1, keepdim=True),
    "amax": lambda x, w, b: x.amax(-1),
    "argmax": lambda x, w, b: x.float().cumsum(-1).argmax(-1),
    "var": lambda x, w, b: x.var(-1),
    "std": lambda x, w, b: x.std(0),
    "logsumexp": lambda x, w, b: torch.logsumexp(x, -1),
    "norm": lambda x, w, b: torch.linalg.vector_norm(x, dim=-1),
    "any": lambda x, w, b: (x > 2).any(-1),
    "cumsum": lambda x, w, b: x.cumsum(-1),
    "softmax": lambda x, w, b: torch.softmax(x, -1),
    "log_softmax": lambda x, w, b: torch.log_softmax(x, 0),
    "layer_norm": lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
    "rms_norm": lambda x, w, b: functional.rms_norm(x, w.shape, w, 1e-6),
    "group_norm": lambda x, w, b: functional.group_norm(x.unsqueeze(-1), 2),
}

PRODUCTS: Program = {
    "mm": lambda a, b, c, q: a @ b,
    "mm of a transposed one": lambda a, b, c, q: b.t() @ a.t(),
    "addmm": lambda a, b, c, q: torch.addmm(b[0], a, b, beta=0.5),
    "linear and gelu": lambda a, b, c, q: functional.gelu(functional.linear(a, b.t())),
    "bmm": lambda a, b, c, q: torch.bmm(q[0], q[0].transpose(1, 2)),
    "attention": lambda a, b, c, q: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
}

IMAGES: Program = {
    "conv2d": lambda x, w, d: functional.conv2d(x, w, padding=1),
    "conv2d with a stride": lambda x, w, d: functional.conv2d(x, w, stride=2),
    "conv2d by channel": lambda x, w, d: functional.conv2d(x, d, padding=1, groups=4),
    "max_pool2d": lambda x, w, d: functional.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x, w, d: functional.avg_pool2d(x, 2),
    "mean of an image": lambda x, w, d: functional.adaptive_avg_pool2d(x, 1),
    "twice as large": lambda x, w, d: functional.interpolate(x, scale_factor=2, mode="nearest"),
}

INDICES: Program = {
    "gather": lambda x, i: torch.gather(x, 1, i),
    "index_select": lambda x, i: x.index_select(0, i[:, 0] % 4),
    "embedding": lambda x, i: functional.embedding(i % 4, x),
    "scatter": lambda x, i: torch.zeros_like(x).scatter(1, i, 1.0),
    "scatter_add": lambda x, i: torch.zeros_like(x).scatter_add(0, i % 4, x),
    "index_put": lambda x, i: torch.zeros_like(x).index_put((i[:, 0] % 4,), x[:, :1] * 2, accumulate=True),
    "sort": lambda x, i: torch.sort(x, dim=-1)[0],
    "topk": lambda x, i: torch.topk(x, 3, dim=-1)[0],
    "masked_fill": lambda x, i: x.masked_fill(i > 2, 0.5),
    "one_hot": lambda x, i: functional.one_hot(i % 4, 4),
}

INTEGERS: Program = {
    "add": lambda i, j: i + j,
    "mul": lambda i, j: i * j,
    "floor division": lambda i, j: torch.div(i, j, rounding_mode="floor"),
    "remainder": torch.remainder,
    "division": lambda i, j: i / j,
    "shift": lambda i, j: i << 2,
    "bits": lambda i, j: (i & j) ^ (i | 3),
    "sum": lambda i, j: i.sum(-1),
    "cumsum": lambda i, j: i.cumsum(0),
    "amax": lambda i, j: i.amax(0),
    "to bool": lambda i, j: i.bool(),
    "to float32": lambda i, j: i.float() * 0.5,
}


def groups(tiny: bool) -> tuple[Group, ...]:
    """Return all of them, on a few thousand elements, or the fewest that still make every kind, on a few."""
    rows, columns = (4, 6) if tiny else (68, 1030)
    all_groups = (
        Group("pointwise", FLOATS, lambda dtype: _special(rows, columns, dtype), POINTWISE),
        Group("views", FLOATS[:2], lambda dtype: _special(rows, columns, dtype), VIEWS),
        Group("reductions", FLOATS, lambda dtype: _rows(rows, columns, dtype), REDUCTIONS),
        Group("products", FLOATS, lambda dtype: _matrices(8 if tiny else 136, dtype), PRODUCTS),
        Group("images", FLOATS[:2], lambda dtype: _images(8 if tiny else 33, dtype), IMAGES),
        Group("indices", FLOATS[:2], lambda dtype: _indexed(rows, columns, dtype), INDICES),
        Group("integers", (torch.int64, torch.int32), lambda dtype: _integers(rows, columns, dtype), INTEGERS),
    )
    if not tiny:
        return all_groups
    return tuple(_few(group) for group in all_groups)


def _few(group: Group) -> Group:
    """Return a group with every sixth operator, in its first dtype."""
    some = {name: function for place, (name, function) in enumerate(group.program.items()) if place % 6 == 2}
    return Group(group.name, group.dtypes[:1], group.inputs, some)


def _special(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, y = torch.randn(rows, columns), torch.randn(rows, columns)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    y[1, :3] = torch.tensor([float("nan"), float("-inf"), 0.0])
    return x.to(dtype), y.to(dtype)


def _rows(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, weight, bias = torch.randn(rows, columns), 1 + torch.randn(columns) / 8, torch.randn(columns)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def _matrices(size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    heads = torch.randn(2, 3, size // 2, 8)
    shapes = ((size, size + 1), (size + 1, size // 2), (size // 2,))
    return (*(torch.randn(shape).to(dtype) for shape in shapes), heads.to(dtype))


def _images(size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = ((2, 4, size, size), (6, 4, 3, 3), (4, 1, 3, 3))
    return tuple((torch.randn(shape) / 2).to(dtype) for shape in shapes)


def _indexed(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    places = torch.arange(columns).repeat(rows, 1).roll(1, 1)
    values = torch.randperm(rows * columns).reshape(rows, columns) % 251  # that every dtype has
    return (values / 4 - 30).to(dtype), places


def _integers(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    i, j = torch.randint(-1000, 1000, (rows, columns)), torch.randint(1, 40, (rows, columns))
    return i.to(dtype), (j * torch.where(torch.rand(rows, columns) < 0.5, -1, 1)).to(dtype)
