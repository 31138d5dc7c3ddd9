"""Reductions whose rows the threads of a block share compute what eager PyTorch does, on a device like a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kagent_core.codegen.groups import WorkGroups
from kagent_core.testing.compare import assert_as_exact
from kagent_core.testing.conformance.case import Target
from kagent_core.testing.conformance.models import check_model, inference

from .architectures import architecture
from .comparing import Function, check, check_samples, run
from .gpu_like import FUNCTIONS, SHUFFLES, UNKNOWN_SHUFFLES, gpu_like

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAN, INFINITY = float("nan"), float("inf")
SIZES = (1, 2, 31, 32, 33, 255, 256, 257, 1000, 4097)

GROUPS = {
    "32 threads": WorkGroups(threads=32),
    "64 threads": WorkGroups(threads=64),
    "256 threads": WorkGroups(threads=256),
    "64 threads that shuffle": WorkGroups(threads=64, sub_groups=SHUFFLES),
    "64 threads that shuffle, by how many they are": WorkGroups(threads=64, sub_groups=UNKNOWN_SHUFFLES),
    "64 threads with functions": WorkGroups(threads=64, sub_groups=FUNCTIONS),
}


OFTEN = [name for name in GROUPS if name not in ("32 threads", "64 threads")]  # the nightly run has the others, too


@pytest.fixture(params=[*OFTEN, *(pytest.param(n, marks=pytest.mark.nightly) for n in GROUPS if n not in OFTEN)])
def shared(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Name of a device whose blocks share rows, of every kind."""
    with gpu_like(GROUPS[request.param]) as name:
        yield name


@pytest.fixture
def shared_by_64(device: str) -> Iterator[str]:
    """Name of a device whose blocks of 64 threads share rows."""
    with gpu_like(GROUPS["64 threads"]) as name:
        yield name


def each(function: Function, *given: Any) -> tuple[torch.Tensor, ...]:
    """Return what a function gives for each of something, one after the other."""
    made = [function(one) for one in given]
    return tuple(itertools.chain.from_iterable(part if isinstance(part, tuple) else (part,) for part in made))


REDUCTIONS: dict[str, Function] = {
    "amax": lambda x, dim: x.amax(dim),
    "amin": lambda x, dim: x.amin(dim),
    "prod": lambda x, dim: (x * 1.5).prod(dim),
    "any": lambda x, dim: (x > 3).any(dim),
    "all": lambda x, dim: (x > -3).all(dim),
    "argmax": lambda x, dim: x.argmax(dim),
    "argmin": lambda x, dim: x.argmin(dim),
    "max": lambda x, dim: tuple(x.max(dim)),
    "softmax": lambda x, dim: aten._softmax(x, dim, False),
    "log_softmax": lambda x, dim: aten._log_softmax(x, dim, False),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "var": lambda x, dim: x.var(dim, correction=0),
    "several": lambda x, dim: (x.square().sum(dim), x.abs().amax(dim), (x > 0).any(dim), x.exp().mean(dim)),
    "norm": lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
    "standardized": lambda x, dim: (x - x.mean(dim, keepdim=True)) * torch.rsqrt(x.var(dim, keepdim=True) + 1),
}


def along(dim: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors whose columns, or whose rows, are those of the given ones' rows."""
    return list(tensors) if dim == 1 else [x.t().contiguous() for x in tensors]


@pytest.mark.nightly
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_of_every_length_along_and_across_memory(shared_by_64: str, name: str, dim: int) -> None:
    sizes = SIZES[1:] if name == "standardized" else SIZES
    given = along(dim, *(torch.randn(9 if size % 2 else 40, size) for size in sizes))
    check(shared_by_64, functools.partial(each, functools.partial(REDUCTIONS[name], dim=dim)), *given)


def test_every_way_to_put_together_what_threads_find(shared: str) -> None:
    names = ("prod", "any", "argmax", "max", "softmax", "logsumexp", "var", "several")

    def function(x: torch.Tensor) -> Any:
        return each(lambda name: REDUCTIONS[name](x, 1), *names)

    for size in (33, 9001):
        check(shared, function, torch.randn(9, size))


def test_rows_with_nan_and_infinity(shared: str) -> None:
    short, long = torch.randn(6, 100), torch.randn(6, 20_000)
    long[0, 19_000], long[1, 5], long[2], long[3, 12_345] = NAN, INFINITY, -INFINITY, -INFINITY
    short[0, 90], short[1, 5], short[2], short[3, 12], short[4] = NAN, INFINITY, -INFINITY, -INFINITY, NAN
    names = ("softmax", "logsumexp", "argmax", "max", "amin")
    check(shared, lambda *given: each(lambda name: each(lambda x: REDUCTIONS[name](x, 1), *given), *names), short, long)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_and_columns_with_nan_and_infinity(shared_by_64: str, dim: int) -> None:
    names = ("amax", "amin", "softmax", "logsumexp", "argmax", "any")

    def function(*given: torch.Tensor) -> Any:
        return each(lambda name: each(functools.partial(REDUCTIONS[name], dim=dim), *given), *names)

    given = []
    for value in (NAN, INFINITY, -INFINITY):
        x = torch.randn(101, 103)
        x.fill_diagonal_(value)
        x[7], x[:, 9] = value, value
        given.append(x)
    check(shared_by_64, function, *given)


def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return where extremes are first."""
    return x.argmax(1), x.argmin(1), *x.max(0)


def test_the_first_of_equals_is_found(shared: str) -> None:
    check(shared, functools.partial(each, places), *(torch.randint(0, 3, (37, n)).float() for n in (33, 5000)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_the_first_of_equal_integers_is_found(shared_by_64: str, dtype: torch.dtype) -> None:
    given = [torch.randint(0, 3, (37, n)).to(dtype) for n in (33, 5000)]
    check(shared_by_64, functools.partial(each, places), *given)


def test_the_first_nan_is_found(shared: str) -> None:
    x = torch.randn(20, 3000)
    for row in range(20):
        x[row, 131 * row :: 700] = NAN
    check(shared, lambda x: (x.argmax(1), x.argmin(1), x.t().argmax(0)), x)


def check_sums(device: str, *given: torch.Tensor) -> None:
    """Compare sums with those of float64: the error is at most twice eager's."""
    for dims in ([0], [-1], [0, -1]):
        function = functools.partial(each, functools.partial(aten.sum.dim_IntList, dim=dims))
        exact = function(*(x.double() for x in given))
        assert_as_exact(run(device, function, *given), function(*given), exact, 2, f"sums along {dims}")


LONG = ((9, 300), (3, 70_001), (7, 33, 65), (1, 1 << 19))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_as_accurate_as_eagers(shared_by_64: str, dtype: torch.dtype) -> None:
    check_sums(shared_by_64, *(torch.randn(shape).add(0.5).to(dtype) for shape in LONG))


@pytest.mark.parametrize("groups", ["64 threads", "64 threads that shuffle"])
def test_sums_without_a_wider_type_are_as_accurate_as_eagers(device: str, groups: str) -> None:
    with gpu_like(GROUPS[groups], wide="float32") as name:
        check_sums(name, *(torch.randn(shape).add(0.5) for shape in LONG))
        check(name, lambda x: (x.var(1), x.logsumexp(1), x.softmax(1)), torch.randn(3, 70_001))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(shared_by_64: str, dtype: torch.dtype) -> None:
    low, high = (0, 2) if dtype == torch.bool else (0, 255) if dtype == torch.uint8 else (-100, 100)

    def function(x: torch.Tensor, dim: int) -> Any:
        return x.sum(dim), x.amax(dim), x.amin(dim), x.any(dim), x.all(dim), x.prod(dim)

    for dim in (0, 1):
        given = [torch.randint(low, high, (37, 1003)).to(dtype)]
        check(shared_by_64, functools.partial(each, functools.partial(function, dim=dim)), *given)


@pytest.mark.parametrize(
    "dtype", [*FLOATS[::2], *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in FLOATS[1::2])], ids=str
)
def test_floats_of_every_type(shared_by_64: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> Any:
        weight = x[0] * 2
        wide = x if x.dtype is torch.float64 else x.float()
        return (
            *(REDUCTIONS[name](x, 1) for name in ("amax", "softmax", "log_softmax", "logsumexp", "argmax")),
            aten.native_layer_norm(x, [x.shape[1]], weight, weight, 1e-5)[0],
            x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * weight,
        )

    check(
        shared_by_64, functools.partial(each, function), *(torch.randn(5, size).to(dtype) for size in (33, 257, 1000))
    )


def test_strides_and_offsets(shared_by_64: str) -> None:
    base = torch.rand(40, 50, 70)

    def function(x: torch.Tensor) -> Any:
        return (
            *(x[3:, 1:].transpose(0, 1)[::2].softmax(dim) for dim in (0, 1, 2)),
            *(x[:, ::3, 5:].sum(dims) for dims in ((0, 1), (0, 2), (1, 2), (0, 1, 2))),
            x.permute(2, 0, 1).amax((0, 2)),
            x[:1].expand(40, 50, 70).mean((0, 2)),
            x.flip(2).logsumexp(2),
            *x[5].t().max(0),
        )

    check(shared_by_64, function, base)


def test_what_is_fused_before_and_after(shared_by_64: str) -> None:
    scores, mask, table = torch.randn(6, 40, 100), torch.rand(40, 100) > 0.5, torch.randn(50, 200)
    mask[:, 0] = True
    places = torch.randint(0, 50, (33,))

    def function(scores: torch.Tensor, mask: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> Any:
        looked_up = table[places]
        return (
            aten._softmax(torch.where(mask, scores * 0.125, float("-inf")), -1, False),
            aten.native_layer_norm(aten.gelu(looked_up) + looked_up, [200], None, None, 1e-5)[0],
            torch.tanh((scores * scores).sum(-1) * 0.01) * 2,
            torch.tril(scores).amax(-1).exp(),
        )

    check(shared_by_64, function, scores, mask, table, places)


def test_an_index_out_of_range_is_an_error(shared_by_64: str) -> None:
    table, places = torch.randn(50, 200), torch.tensor([3, 50, 7])
    with pytest.raises(IndexError):
        run(shared_by_64, lambda t, i: t[i].softmax(-1), table, places)


def test_rows_that_are_empty_or_not_there(shared_by_64: str) -> None:
    check(shared_by_64, lambda x: (x.sum(1), x.any(1), x.prod(1)), torch.randn(5, 0))
    check(shared_by_64, lambda x: (x.sum(1), x.softmax(1), x.argmax(1)), torch.randn(0, 100))
    check(shared_by_64, lambda x: (x.sum(), x.amax(), x.argmax(), x.var()), torch.randn(5000))
    check(shared_by_64, lambda x: (x.sum(), x.softmax(0)), torch.tensor(2.0))


def test_batch_and_group_norm(shared_by_64: str) -> None:
    x, weight, bias = torch.randn(8, 12, 9, 11), torch.randn(12), torch.randn(12)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return (
            aten.native_group_norm(x, weight, bias, 8, 12, 99, 3, 1e-5)[0],
            aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)[0],
            torch.nn.functional.adaptive_avg_pool2d(x, 1),
        )

    check(shared_by_64, function, x, weight, bias)


def gradients(device: str | None, function: Function, *args: torch.Tensor) -> list[torch.Tensor]:
    """Return a function's results and its gradients."""
    leaves = [arg.clone().requires_grad_(arg.is_floating_point()) for arg in args]
    torch._dynamo.reset()
    called = function
    if device is not None:
        called = torch.compile(function, backend="kagent", options={"device": device}, dynamic=False)
    made = called(*leaves)
    generator = torch.Generator().manual_seed(3)
    (made * torch.randn(made.shape, generator=generator)).sum().backward()
    return [made.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("size", [33, 257])
def test_gradients(shared_by_64: str, size: int) -> None:
    functional = torch.nn.functional

    def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (size,), weight, bias) + functional.rms_norm(x, (size,), weight, 1e-6)

    x, weight, bias = torch.randn(40, size), torch.randn(size), torch.randn(size)
    for function, given in (
        (normed, (x, weight, bias)),
        (lambda x: x.softmax(-1) + x.log_softmax(-1) * 2, (x,)),
        (lambda x: x.logsumexp(0) + x.var(0) + x.amax(0), (x,)),
        (lambda x: torch.linalg.vector_norm(x, dim=-1) + x.mean(-1) + x.prod(-1), (x,)),
    ):
        wanted = gradients(None, function, *given)
        for got, want in zip(gradients(shared_by_64, function, *given), wanted, strict=True):
            torch.testing.assert_close(got, want)


SAMPLED = (
    *("sum.dim_IntList", "mean.dim", "prod.dim_int", "amax", "amin", "any.dim", "any.dims", "all.dim", "argmax"),
    *("argmin", "max.dim", "min.dim", "var.correction", "std.correction", "_softmax", "_log_softmax", "logsumexp"),
    *("native_layer_norm", "native_group_norm", "linalg_vector_norm", "sum", "any", "all", "max", "min"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAMPLED)
def test_samples_of_the_operators(shared_by_64: str, name: str) -> None:
    signature = f"aten::{name}"
    # of float16, eager's own log_softmax is far off; the half types are in `test_floats_of_every_type`
    dtypes = (torch.float32, torch.int64, torch.bool)
    check_samples(shared_by_64, signature, dtypes, samples=4, contiguous=name == "native_group_norm")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_models(shared_by_64: str, name: str) -> None:
    ran = check_model(inference, architecture(name), Target(shared_by_64))
    assert ran.fallbacks == ()
