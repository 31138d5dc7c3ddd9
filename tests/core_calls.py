"""A call of each of core ATen's overloads that kagent generates kernels for: what plugins run on their devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def n(*shape: int) -> torch.Tensor:
    return torch.randint(1, 9, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


ONES, NONE = [1, 1], [0, 0]
UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "exp", "expm1", "floor"),
    *("gelu", "isinf", "isnan", "leaky_relu", "log", "log10", "log1p", "log2", "neg", "reciprocal", "relu", "round"),
    *("rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "elu", "hardtanh", "clone"),
)
BINARY = ("add", "sub", "mul", "div", "fmod", "remainder", "eq", "ne", "lt", "le", "gt", "ge")
LOGIC = ("logical_and", "logical_or", "logical_xor")
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")


def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls of core ATen's overloads."""
    for name in UNARY:
        yield f"aten::{name}", (f(5, 7).abs() + 1 if name == "acosh" else f(5, 7).sigmoid() * 0.9,)
    for name in BINARY:
        yield f"aten::{name}.Tensor", (f(5, 7), f(7) + 3)
        yield f"aten::{name}.Scalar", (f(5, 7), 1.5)
    for name in BITS:
        yield f"aten::{name}.Tensor", (n(5, 7), n(7))
        yield f"aten::{name}.Scalar", (n(5, 7), 5)
    for name in LOGIC:
        yield f"aten::{name}", (b(5, 7), b(7))
    for name in ("bitwise_not", "logical_not", "any"):
        yield f"aten::{name}", (b(5, 7),)
    for name in ("maximum", "minimum", "atan2", "pow.Tensor_Tensor"):
        yield f"aten::{name}", (f(5, 7).abs(), f(7))
    yield from windows()
    yield from reductions()
    yield from others()


WITH_DIMS = ("amax", "amin", "mean.dim", "sum.dim_IntList", "var.dim", "var.correction", "any.dims")
WITH_DIM = ("argmax", "argmin", "max.dim", "min.dim", "prod.dim_int", "cumsum", "any.dim")
POOLS = {"avg_pool": "", "max_pool": "_with_indices"}


def windows() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls of overloads of images."""
    for dims in (1, 2, 3):
        yield f"aten::reflection_pad{dims}d", (f(2, *[5] * dims), [1, 2] * dims)
    for dims in (2, 3):
        image = f(1, 2, *[6] * dims)
        yield f"aten::replication_pad{dims}d", (image, [1, 2] * dims)
        yield f"aten::_adaptive_avg_pool{dims}d", (image, [3] * dims)
        for name, ending in POOLS.items():
            yield f"aten::{name}{dims}d{ending}", (image, [2] * dims)


def reductions() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls of overloads that reduce."""
    yield from ((f"aten::{name}", (f(5, 7), [1])) for name in WITH_DIMS)
    yield from ((f"aten::{name}", (f(5, 7), 1)) for name in WITH_DIM)
    yield from ((f"aten::{name}", (f(5, 7),)) for name in ("mean", "prod"))
    yield from ((f"aten::{name}", (f(5, 7), 1, False)) for name in ("_softmax", "_log_softmax"))


def others() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls of overloads that have no like."""
    yield "aten::pow.Scalar", (2.0, f(5, 7))
    yield "aten::pow.Tensor_Scalar", (f(5, 7), 2)
    yield "aten::clamp", (f(5, 7), -0.5, 0.5)
    yield "aten::clamp.Tensor", (f(5, 7), f(7) - 2, f(7) + 2)
    yield "aten::where.self", (b(5, 7), f(5, 7), f(7))
    yield "aten::addmm", (f(7), f(5, 3), f(3, 7))
    yield "aten::mm", (f(5, 3), f(3, 7))
    yield "aten::bmm", (f(2, 5, 3), f(2, 3, 7))
    yield "aten::cat", ([f(5, 7), f(5, 2)], 1)
    yield "aten::constant_pad_nd", (f(5, 7), [1, 2], 0.5)
    yield "aten::convolution", (f(1, 2, 6, 6), f(4, 2, 3, 3), f(4), ONES, ONES, ONES, False, NONE, 1)
    given = (f(1, 4, 6, 6), f(1, 2, 6, 6), f(4, 2, 3, 3))
    yield "aten::convolution_backward", (*given, [4], ONES, ONES, ONES, False, NONE, 1, [True] * 3)
    yield "aten::copy", (f(5, 7), f(7))
    yield "aten::embedding", (f(9, 7), n(3) - 1)
    yield "aten::fill.Scalar", (f(5, 7), 3.0)
    yield "aten::flip", (f(5, 7), [1])
    yield "aten::full_like", (f(5, 7), 3.0)
    yield "aten::gather", (f(9, 7), 0, n(3, 7) - 1)
    yield "aten::grid_sampler_2d", (f(1, 2, 6, 6), f(1, 3, 3, 2).tanh(), 0, 0, False)
    yield "aten::index.Tensor", (f(9, 7), [n(3) - 1])
    yield "aten::index_put", (f(9, 7), [n(3) - 1], f(3, 7), True)
    yield "aten::index_select", (f(9, 7), 0, n(3) - 1)
    yield "aten::masked_scatter", (f(5, 7), b(5, 7), f(35))
    yield "aten::native_layer_norm", (f(5, 7), [7], f(7), f(7), 1e-5)
    yield "aten::native_group_norm", (f(2, 4, 6), f(4), f(4), 2, 4, 6, 2, 1e-5)
    yield "aten::_native_batch_norm_legit.no_stats", (f(2, 4, 6), f(4), f(4), True, 0.1, 1e-5)
    yield "aten::_native_batch_norm_legit_no_training", (f(2, 4, 6), f(4), f(4), f(4), f(4).abs() + 1, 0.1, 1e-5)
    yield "aten::avg_pool2d_backward", (f(1, 2, 3, 3), f(1, 2, 6, 6), [2, 2], [2, 2], NONE, False, True, None)
    yield "aten::_adaptive_avg_pool2d_backward", (f(1, 2, 3, 3), f(1, 2, 6, 6))
    yield "aten::repeat", (f(5, 7), [2, 3])
    yield "aten::scatter.src", (f(9, 7), 0, n(1, 7) - 1, f(1, 7))
    yield "aten::scatter.value", (f(9, 7), 0, n(3, 7) - 1, 2.5)
    yield "aten::scatter_add", (f(9, 7), 0, n(3, 7) - 1, f(3, 7))
    yield "aten::scatter_reduce.two", (f(9, 7), 0, n(3, 7) - 1, f(3, 7), "amax")
    yield "aten::select_scatter", (f(5, 7), f(7), 0, 2)
    yield "aten::slice_scatter", (f(5, 7), f(2, 7), 0, 1, 3)
    yield "aten::sort", (f(5, 7),)
    yield "aten::topk", (f(5, 7), 3)
    yield "aten::upsample_nearest2d.vec", (f(1, 2, 3, 3), [6, 6], None)
    yield "aten::upsample_bilinear2d.vec", (f(1, 2, 3, 3), [6, 6], False, None)
    yield "aten::_cdist_forward", (f(5, 3), f(4, 3), 2.0, None)
    yield "aten::_pdist_forward", (f(5, 3), 2.0)
    yield "aten::arange.start_step", (0, 9, 2)
    yield "aten::full", ([5, 7], 2.5)
    yield "aten::scalar_tensor", (2.5,)


@contextmanager
def as_eager() -> Iterator[None]:
    """Let no gradient be asked for, and every run draw the same numbers."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
