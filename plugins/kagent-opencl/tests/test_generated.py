"""Generated kernels on an OpenCL device compute what eager PyTorch does, with vectors and beside them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.testing.compare import assert_as_exact
from kagent_opencl.language import OpenClLanguage
from kagent_opencl.platforms import list_devices

from .comparing import Function, check, run

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 88.0, -104.0, 1e-30, -3e38)


def check_sums(device: str, function: Function, *args: torch.Tensor) -> None:
    """Compare with float64: the error is at most twice eager's."""
    [got] = run(device, function, *args)
    assert_as_exact(got, function(*args), function(*(arg.double() for arg in args)), 2, "sums")


@pytest.fixture(scope="module")
def width(device: str) -> int:
    """Return how many elements a vector has."""
    [info] = [info for info in list_devices() if str(info.device) == device]
    return OpenClLanguage.of(info).vector_width


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of a type: floats with special ones among them, where there is room."""
    if not dtype.is_floating_point:
        return torch.randint(
            0 if dtype in (torch.bool, torch.uint8) else -9, 2 if dtype == torch.bool else 9, shape
        ).to(dtype)
    made = torch.randn(shape).to(dtype)
    if made.numel() >= 100:
        made.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    return made


def sizes(width: int) -> Sequence[int]:
    """Return lengths around the width of vectors."""
    return (0, 1, max(width - 1, 1), width, width + 1, 1000)


# -- elements


def finite(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def gelu_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return aten.gelu(x) * 2 + y


@pytest.mark.parametrize("dtype", FLOATS)
def test_elements_of_every_length(device: str, width: int, dtype: torch.dtype) -> None:
    for size in sizes(width):
        # eager's gelu of infinity is NaN, or not, by the length
        check(device, gelu_add, finite(size, dtype=dtype), numbers(size, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(device: str, width: int, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * y + 3, x.abs(), torch.where(x < y, x, -y), torch.maximum(x, y), x.float() * 0.5, x.bool(), x & y, ~x

    for size in (width + 1, 1000):
        check(device, function, numbers(size, dtype=dtype), numbers(size, dtype=dtype))


def test_booleans(device: str, width: int) -> None:
    def function(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
        chosen = torch.where(a, x, x.double().long().float())
        return a & b, a | ~b, a ^ b, a == b, a < b, chosen, a.float() - x, a.long() + 1, a.double() * 2, a.half()

    for size in (width + 1, 1000):
        a, b = numbers(size, dtype=torch.bool), numbers(size, dtype=torch.bool)
        check(device, function, a, b, torch.randn(size))


def test_comparisons_of_every_width_choose_between_every_width(device: str) -> None:
    def function(x: torch.Tensor, d: torch.Tensor, n: torch.Tensor, h: torch.Tensor) -> Any:
        return (
            torch.where(x > 0, d, d * 2),
            torch.where(d > 0, x, x * 2),
            torch.where(n > 0, h, -h),
            torch.where(h > 0, n, n + 1),
            (x > 0) & (d > 0) | (n > 0),
        )

    given = [numbers(1003, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64, torch.float16)]
    check(device, function, *given)


UNARY = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "silu"),
    *("floor", "ceil", "trunc", "round", "sign", "abs", "neg", "isnan", "isinf", "signbit", "relu", "lgamma"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_floats(device: str, dtype: torch.dtype) -> None:
    ops = [getattr(aten, name) for name in UNARY]
    check(device, lambda x: tuple(op(x) for op in ops), numbers(1001, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_two_floats(device: str, dtype: torch.dtype) -> None:
    names = ("maximum", "minimum", "fmax", "fmin", "pow", "atan2", "hypot", "copysign", "div", "eq", "lt")

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return tuple(getattr(aten, name)(x, y) for name in names)

    x, y = numbers(1001, dtype=dtype), numbers(1001, dtype=dtype).flip(0)
    check(device, function, x, y)
    # eager's remainders of vectors are NaN where the quotient has more digits than the type
    check(device, aten.fmod, x.clamp(-100, 100), y.sign() * y.abs().clamp(0.001, 100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lanes_do_not_depend_on_their_neighbours(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(1000, dtype=dtype)
    x[::5] = torch.randn(200, dtype=dtype).mul(20).exp()
    x[3::7] = 1e-30
    check(device, lambda x: (x.sin(), x.cos(), x.tan(), aten.fmod(x.clamp(-100, 100), x.flip(0) + 0.5)), x)


def test_extremes_with_a_number_keep_nan(device: str) -> None:
    check(device, lambda x: (x.clamp(-0.5, 0.5), x.clamp_min(0.25), x.clamp_max(-1)), numbers(1001))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_the_half_types(device: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    check(device, lambda x: (x.float(), x + 0, x * 1.5), every)
    check(device, lambda x: x.to(dtype), every.float() * 1.0009765625)


# -- where elements lie


def test_offsets_that_are_no_multiple_of_a_vector(device: str, width: int) -> None:
    base = torch.randn(3 * width + 1000)
    for offset in (1, width - 1, width + 3, 33):
        check(device, gelu_add, base[offset : offset + 1000], base[2 * width : 2 * width + 1000])
        check(device, lambda x: x.sum(-1), base[offset : offset + 999])


def test_transposed_and_broadcast_reads(device: str, width: int) -> None:
    x, y, row = torch.randn(70, 100), torch.randn(100, 70), torch.randn(100)
    check(device, lambda x, y: x * 2 + y.t(), x, y)
    check(device, lambda x, row: aten.gelu(x + row), x, row)
    check(device, lambda x, row: x * row[:70, None] + 1, x, row)
    check(device, lambda x: x.t().contiguous() * 2, x)
    check(device, lambda x: x[:, ::2] + 1, x)
    check(device, lambda x: x.flip(1) * 2, x)
    check(device, lambda x: x.expand(5, 70, 100) * 2, x)
    check(device, lambda x: x.unfold(0, 3, 1) + 1, row)


def test_places_that_count_as_values(device: str) -> None:
    x = torch.randn(37, 53)
    check(device, lambda x: torch.tril(x) + torch.triu(x, 3), x)
    check(device, lambda x: torch.arange(53, device=x.device) * 3 + x, x)
    check(device, lambda x: torch.where(torch.arange(53) <= torch.arange(37)[:, None], x, -1.0), x)


def test_rows_that_are_looked_up(device: str) -> None:
    weight, index = torch.randn(50, 67), torch.randint(-50, 50, (3, 5))
    check(device, lambda w, i: w[i] * 2, weight, index)
    check(device, lambda x: torch.cat([-x[:, 20:], x[:, :20]], 1) * 2, torch.randn(9, 53))
    check(device, lambda x: aten.constant_pad_nd(x, [3, 2, 1, 1], 0.5), torch.randn(9, 53))


# -- rows and columns

REDUCTIONS: dict[str, Function] = {
    "amax": lambda x, dim: x.amax(dim),
    "amin": lambda x, dim: x.amin(dim),
    "prod": lambda x, dim: x.prod(dim),
    "any": lambda x, dim: (x > 1).any(dim),
    "all": lambda x, dim: (x > -3).all(dim),
    "softmax": lambda x, dim: aten._softmax(x, dim, False),
    "log_softmax": lambda x, dim: aten._log_softmax(x, dim, False),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "max": lambda x, dim: tuple(x.max(dim)),
    "variance": lambda x, dim: x.var(dim),
    "count": lambda x, dim: (x > 0).sum(dim),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_along_and_across_memory(device: str, width: int, name: str, dim: int) -> None:
    function = REDUCTIONS[name]
    for size in (1, width - 1, width, width + 1, 1000):
        for other in (3, width + 1):
            shape = (size, other) if dim == 0 else (other, size)
            check(device, lambda x: function(x, dim), torch.randn(shape))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["amax", "amin", "softmax", "logsumexp", "any"])
def test_reductions_of_nan_and_infinity(device: str, name: str, dim: int) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(101, 103)
        x.fill_diagonal_(value)
        x[7], x[:, 9] = value, value
        check(device, lambda x: REDUCTIONS[name](x, dim), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(20, 300), (20, 1003), (20, 70_001), (7, 33, 65)])
def test_sums_are_as_accurate_as_eagers(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).add(0.5).to(dtype)
    for dims in ([0], [-1], list(range(len(shape)))):
        check_sums(device, functools.partial(aten.sum.dim_IntList, dim=dims), x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_sums_and_extremes_of_integers(device: str, dtype: torch.dtype) -> None:
    x = numbers(37, 69, dtype=dtype)

    def function(x: torch.Tensor, dim: int) -> Any:
        return x.sum(dim), x.amax(dim), x.amin(dim), x.any(dim), x.all(dim)

    for dim in (0, 1):
        check(device, functools.partial(function, dim=dim), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm(device: str, width: int, dtype: torch.dtype) -> None:
    for size in (width - 1, width, width + 1, 384, 1000):
        given = [torch.randn(s).to(dtype) for s in ((5, size), (size,), (size,))]
        check(device, lambda x, w, b: aten.native_layer_norm(x, [x.shape[-1]], w, b, 1e-5)[0], *given)


# -- products and what follows them


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "depth"), [(1, 1, 1), (5, 15, 7), (13, 53, 100), (64, 96, 300), (70, 33, 1)])
def test_products_with_an_epilogue(device: str, m: int, n: int, depth: int, dtype: torch.dtype) -> None:
    x, w, bias = (torch.randn(s).to(dtype) for s in ((m, depth), (n, depth), (n,)))

    def function(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return aten.relu(aten.addmm(bias, x, w.t()))

    exact = function(x.double(), w.double(), bias.double())
    [got] = run(device, function, x, w, bias)
    ours, eagers = (float((made.double() - exact).square().mean().sqrt()) for made in (got, function(x, w, bias)))
    assert ours <= (3 if dtype in (torch.float16, torch.bfloat16) else 2) * eagers + 1e-6
    check(device, lambda x, w: aten.mm(x.t(), w), x[:, :1].float(), w[:m, :].float() if n >= m else x[:, :1].float())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("stride", "transposed"), [(1, False), (2, False), (2, True)])
def test_convolutions_with_an_epilogue(device: str, stride: int, transposed: bool, last: bool) -> None:
    x, weight, bias = (
        torch.randn(2, 6, 19, 37),
        torch.randn(*((6, 20) if transposed else (20, 6)), 3, 3),
        torch.randn(20),
    )
    if last:
        x = x.to(memory_format=torch.channels_last)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return aten.relu(aten.convolution(x, weight, bias, [stride] * 2, [1, 1], [1, 1], transposed, [0, 0], 1))

    exact = function(x.double(), weight.double(), bias.double())
    [got] = run(device, function, x, weight, bias)
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(device: str, causal: bool) -> None:
    query, key, value = (torch.randn(2, 3, 53, 20) for _ in range(3))
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    check(device, lambda q, k, v: tuple(attend(q, k, v, 0.0, causal)), query, key, value)
    made, logs = attend(query, key, value, 0.0, causal)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = (torch.randn_like(made), query, key, value, made, logs)
    check(device, lambda *given: tuple(backward(*given, 0.0, causal)), *given)


def test_one_operator_by_itself(device: str) -> None:
    x = torch.randn(1000)
    torch.testing.assert_close(kagent_core.run_op("aten::gelu", x, device=device), aten.gelu(x))
