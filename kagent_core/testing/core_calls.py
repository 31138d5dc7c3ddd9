"""A call of each of core ATen's overloads that kagent generates kernels for: what plugins run on their devices.

torch's operator database calls functions, which capture takes apart into some of these overloads; others are reached
only when they are called themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Arguments = tuple[Any, ...]


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randint(1, 9, shape)


def _flags(*shape: int) -> torch.Tensor:
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


def core_calls() -> dict[str, Arguments]:
    """Return arguments for core ATen's overloads by signature: always the same numbers, which is what they compute."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return dict(_calls())


def _calls() -> Iterator[tuple[str, Arguments]]:
    for name in UNARY:
        yield f"aten::{name}", (_floats(5, 7).abs() + 1 if name == "acosh" else _floats(5, 7).sigmoid() * 0.9,)
    for name in BINARY:
        yield f"aten::{name}.Tensor", (_floats(5, 7), _floats(7) + 3)
        yield f"aten::{name}.Scalar", (_floats(5, 7), 1.5)
    for name in BITS:
        yield f"aten::{name}.Tensor", (_numbers(5, 7), _numbers(7))
        yield f"aten::{name}.Scalar", (_numbers(5, 7), 5)
    for name in LOGIC:
        yield f"aten::{name}", (_flags(5, 7), _flags(7))
    for name in ("bitwise_not", "logical_not", "any"):
        yield f"aten::{name}", (_flags(5, 7),)
    for name in ("maximum", "minimum", "atan2", "pow.Tensor_Tensor"):
        yield f"aten::{name}", (_floats(5, 7).abs(), _floats(7))
    yield from _windows()
    yield from _reductions()
    yield from _others()


WITH_DIMS = ("amax", "amin", "mean.dim", "sum.dim_IntList", "var.dim", "var.correction", "any.dims")
WITH_DIM = ("argmax", "argmin", "max.dim", "min.dim", "prod.dim_int", "cumsum", "any.dim")
POOLS = {"avg_pool": "", "max_pool": "_with_indices"}


def _windows() -> Iterator[tuple[str, Arguments]]:
    """Yield calls of overloads of images."""
    for dims in (1, 2, 3):
        yield f"aten::reflection_pad{dims}d", (_floats(2, *[5] * dims), [1, 2] * dims)
    for dims in (2, 3):
        image = _floats(1, 2, *[6] * dims)
        yield f"aten::replication_pad{dims}d", (image, [1, 2] * dims)
        yield f"aten::_adaptive_avg_pool{dims}d", (image, [3] * dims)
        for name, ending in POOLS.items():
            yield f"aten::{name}{dims}d{ending}", (image, [2] * dims)


def _reductions() -> Iterator[tuple[str, Arguments]]:
    """Yield calls of overloads that reduce."""
    yield from ((f"aten::{name}", (_floats(5, 7), [1])) for name in WITH_DIMS)
    yield from ((f"aten::{name}", (_floats(5, 7), 1)) for name in WITH_DIM)
    yield from ((f"aten::{name}", (_floats(5, 7),)) for name in ("mean", "prod"))
    yield from ((f"aten::{name}", (_floats(5, 7), 1, False)) for name in ("_softmax", "_log_softmax"))


def _others() -> Iterator[tuple[str, Arguments]]:
    """Yield calls of overloads that have no like."""
    yield "aten::pow.Scalar", (2.0, _floats(5, 7))
    yield "aten::pow.Tensor_Scalar", (_floats(5, 7), 2)
    yield "aten::clamp", (_floats(5, 7), -0.5, 0.5)
    yield "aten::clamp.Tensor", (_floats(5, 7), _floats(7) - 2, _floats(7) + 2)
    yield "aten::where.self", (_flags(5, 7), _floats(5, 7), _floats(7))
    yield "aten::addmm", (_floats(7), _floats(5, 3), _floats(3, 7))
    yield "aten::mm", (_floats(5, 3), _floats(3, 7))
    yield "aten::bmm", (_floats(2, 5, 3), _floats(2, 3, 7))
    yield "aten::cat", ([_floats(5, 7), _floats(5, 2)], 1)
    yield "aten::constant_pad_nd", (_floats(5, 7), [1, 2], 0.5)
    yield "aten::convolution", (_floats(1, 2, 6, 6), _floats(4, 2, 3, 3), _floats(4), ONES, ONES, ONES, False, NONE, 1)
    given = (_floats(1, 4, 6, 6), _floats(1, 2, 6, 6), _floats(4, 2, 3, 3))
    yield "aten::convolution_backward", (*given, [4], ONES, ONES, ONES, False, NONE, 1, [True] * 3)
    yield "aten::copy", (_floats(5, 7), _floats(7))
    yield "aten::embedding", (_floats(9, 7), _numbers(3) - 1)
    yield "aten::fill.Scalar", (_floats(5, 7), 3.0)
    yield "aten::flip", (_floats(5, 7), [1])
    yield "aten::full_like", (_floats(5, 7), 3.0)
    yield "aten::gather", (_floats(9, 7), 0, _numbers(3, 7) - 1)
    yield "aten::grid_sampler_2d", (_floats(1, 2, 6, 6), _floats(1, 3, 3, 2).tanh(), 0, 0, False)
    yield "aten::index.Tensor", (_floats(9, 7), [_numbers(3) - 1])
    yield "aten::index_put", (_floats(9, 7), [_numbers(3) - 1], _floats(3, 7), True)
    yield "aten::index_select", (_floats(9, 7), 0, _numbers(3) - 1)
    yield "aten::masked_scatter", (_floats(5, 7), _flags(5, 7), _floats(35))
    yield "aten::native_layer_norm", (_floats(5, 7), [7], _floats(7), _floats(7), 1e-5)
    yield "aten::native_group_norm", (_floats(2, 4, 6), _floats(4), _floats(4), 2, 4, 6, 2, 1e-5)
    yield "aten::_native_batch_norm_legit.no_stats", (_floats(2, 4, 6), _floats(4), _floats(4), True, 0.1, 1e-5)
    yield (
        "aten::_native_batch_norm_legit_no_training",
        (_floats(2, 4, 6), _floats(4), _floats(4), _floats(4), _floats(4).abs() + 1, 0.1, 1e-5),
    )
    yield (
        "aten::avg_pool2d_backward",
        (_floats(1, 2, 3, 3), _floats(1, 2, 6, 6), [2, 2], [2, 2], NONE, False, True, None),
    )
    yield "aten::_adaptive_avg_pool2d_backward", (_floats(1, 2, 3, 3), _floats(1, 2, 6, 6))
    yield "aten::repeat", (_floats(5, 7), [2, 3])
    yield "aten::scatter.src", (_floats(9, 7), 0, _numbers(1, 7) - 1, _floats(1, 7))
    yield "aten::scatter.value", (_floats(9, 7), 0, _numbers(3, 7) - 1, 2.5)
    yield "aten::scatter_add", (_floats(9, 7), 0, _numbers(3, 7) - 1, _floats(3, 7))
    yield "aten::scatter_reduce.two", (_floats(9, 7), 0, _numbers(3, 7) - 1, _floats(3, 7), "amax")
    yield "aten::select_scatter", (_floats(5, 7), _floats(7), 0, 2)
    yield "aten::slice_scatter", (_floats(5, 7), _floats(2, 7), 0, 1, 3)
    yield "aten::sort", (_floats(5, 7),)
    yield "aten::topk", (_floats(5, 7), 3)
    yield "aten::upsample_nearest2d.vec", (_floats(1, 2, 3, 3), [6, 6], None)
    yield "aten::upsample_bilinear2d.vec", (_floats(1, 2, 3, 3), [6, 6], False, None)
    yield "aten::_cdist_forward", (_floats(5, 3), _floats(4, 3), 2.0, None)
    yield "aten::_pdist_forward", (_floats(5, 3), 2.0)
    yield "aten::arange.start_step", (0, 9, 2)
    yield "aten::full", ([5, 7], 2.5)
    yield "aten::scalar_tensor", (2.5,)
