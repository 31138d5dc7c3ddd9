"""Sorting, cumulative operators and scattering whose rows the threads of a block share: on PoCL, taken for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.codegen.generic.block_cumulative import MOST_THREADS
from kagent_core.codegen.generic.block_scans import PER_THREAD
from kagent_core.codegen.generic.block_sorting import MOST
from kagent_core.codegen.groups import WorkGroups
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.specs import KernelDescriptor
from kagent_opencl.runtime import LoadedKernel, OpenClRuntime

from .comparing import check_samples
from .gpu_like import gpu_like

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(params=[pytest.param(32, marks=pytest.mark.nightly), pytest.param(64, marks=pytest.mark.nightly), 256])
def threads(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Name of a device with so many threads in a block."""
    with gpu_like(WorkGroups(threads=request.param)) as name:
        yield name


@pytest.fixture
def gpu(device: str) -> Iterator[str]:
    """Name of a device whose blocks have 64 threads."""
    with gpu_like(WorkGroups(threads=64)) as name:
        yield name


def run(device: str, signature: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return what one operator gives on the device, and nowhere else."""
    session = session_for(load_config({"device": device}))
    session.reports.clear()
    made = kagent_core.run_op(signature, *args, device=device, **kwargs)
    assert [fall.signature for report in session.reports for fall in report.fallbacks] == []
    return list(made) if isinstance(made, (tuple, list)) else [made]


def eager(signature: str) -> Callable[..., Any]:
    name, _, overload = signature.removeprefix("aten::").partition(".")
    operator: Callable[..., Any] = getattr(getattr(aten, name), overload or "default")
    return operator


def check(device: str, signature: str, *args: Any, **kwargs: Any) -> None:
    """Compare with eager PyTorch."""
    wanted = eager(signature)(*args, **kwargs)
    wanted = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
    for got, want in zip(run(device, signature, *args, **kwargs), wanted, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def check_order(device: str, x: torch.Tensor, count: int, dim: int, descending: bool) -> None:
    """Compare the first elements of a stable order."""
    want, where = x.sort(stable=True, dim=dim, descending=descending)
    if count == x.shape[dim]:
        made, at = run(device, "aten::sort.stable", x, stable=True, dim=dim, descending=descending)
    else:
        made, at = run(device, "aten::topk", x, count, dim, descending)
    torch.testing.assert_close(made, want.narrow(dim, 0, count), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(at, where.narrow(dim, 0, count))


# -- sorting


def some(kind: str, *shape: int) -> torch.Tensor:
    """Return numbers with ties, NaN and infinities, or none of these."""
    if kind == "integers":
        return torch.randint(-(2**62), 2**62, shape)
    x = torch.randint(-5, 5, shape).float() if kind == "ties" else torch.randn(shape)
    if kind == "special":
        flat = x.view(-1)
        flat[::7], flat[1::11], flat[2::13], flat[3::5] = NAN, INFINITY, -INFINITY, -0.0
    return x


@pytest.mark.parametrize("kind", ["plain", "ties", "special", "integers"])
def test_rows_in_order(threads: str, kind: str) -> None:
    for length in (33, 100, 257):
        for descending in (False, True):
            check_order(threads, some(kind, 3, length), length, 1, descending)


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES, torch.int8, torch.uint8, torch.bool])
def test_rows_of_every_type_in_order(gpu: str, dtype: torch.dtype) -> None:
    x = some("ties", 2, 3, 90).to(dtype)
    check_order(gpu, x, 90, 2, False)
    check_order(gpu, x[:, :2].transpose(1, 2), 90, 1, False)
    check_order(gpu, x, 7, -1, True)


def test_rows_that_shared_memory_has_no_room_for(gpu: str) -> None:
    for kind, length in (("plain", MOST + 1), ("special", 2 * MOST), ("ties", 3 * MOST - 17)):
        check_order(gpu, some(kind, 2, length), length, 1, False)


@pytest.mark.nightly
def test_long_rows_of_other_types_across_memory(gpu: str) -> None:
    x = some("ties", 9001, 2)
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        check_order(gpu, x.to(dtype), 9001, 0, True)


@pytest.mark.parametrize("largest", [False, True])
def test_first_of_rows(threads: str, largest: bool) -> None:
    for kind in ("ties", "special"):
        for length, count in ((40, 1), (40, 39), (300, 50), (9001, 5), (9001, 300)):
            check_order(threads, some(kind, 2, length), count, 1, largest)


def test_first_of_rows_that_come_in_order(gpu: str) -> None:
    for x in (torch.arange(20_000), -torch.arange(20_000), torch.zeros(20_000), torch.full((20_000,), NAN)):
        check_order(gpu, x, 50, 0, True)


def test_most_of_a_long_row_is_sorted_all_the_same(gpu: str) -> None:
    check_order(gpu, torch.randn(2, 2 * MOST), 2 * MOST - 1, 1, True)


def test_rows_without_elements_or_dimensions(gpu: str) -> None:
    for x in (torch.randn(0), torch.randn(3, 0), torch.randn(0, 100), torch.tensor(3.0)):
        check(gpu, "aten::sort.stable", x, stable=True, dim=-1)
        check(gpu, "aten::cumsum", x, -1)
        check(gpu, "aten::cummax", x, -1)
    check(gpu, "aten::topk", torch.randn(3, 100), 0)
    check(gpu, "aten::topk", torch.tensor(3.0), 1)


# -- cumulative operators

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
STRETCH = MOST_THREADS * PER_THREAD


@pytest.mark.parametrize("name", CUMULATIVE)
def test_running_values_of_rows_of_every_length(threads: str, name: str) -> None:
    for length in (32, 33, 1000, STRETCH + 1, 3 * STRETCH - 5):
        check(threads, f"aten::{name}", some("plain", 3, length), 1)
    check(threads, f"aten::{name}", some("special", 4, 700), 1)
    check(threads, f"aten::{name}", some("ties", 700, 3), 0)


@pytest.mark.parametrize(
    ("carried", "at", "value", "then"),
    [
        (0.0, (1022, 1023), 1e200, 1e200),  # what is carried absorbs the rest, which is infinite by itself
        (INFINITY, (1022, 1023), 1e-200, 1e-200),
        (1e301, (1100, 1140), 1e10, 1e-20),  # leaves the range and comes back
        (1e-310, (1100, 1140), 1e-20, 1e20),
        (NAN, (1100, 1140), 1e10, 1e-20),
    ],
)
def test_products_of_extreme_numbers(gpu: str, carried: float, at: tuple[int, int], value: float, then: float) -> None:
    x = torch.ones(2048, dtype=torch.float64)
    x[3], x[at[0]], x[at[1]] = carried, value, then
    check(gpu, "aten::cumprod", x, 0)
    (made,) = run(gpu, "aten::cumprod", x, 0)
    assert torch.equal(made == 0, x.cumprod(0) == 0), "so small a number is close to 0, and is not 0"


@pytest.mark.nightly
@pytest.mark.parametrize("name", CUMULATIVE)
def test_running_values_of_every_type(gpu: str, name: str) -> None:
    for dtype in (torch.float64, *HALVES, *((torch.int64, torch.uint8, torch.bool) if name != "logcumsumexp" else ())):
        check(gpu, f"aten::{name}", (some("ties", 3, 200) if dtype in HALVES else some("plain", 3, 600)).to(dtype), 1)


def test_running_sums_of_integers_wrap_around(gpu: str) -> None:
    check(gpu, "aten::cumsum", some("integers", 2, 5000), 1)
    check(gpu, "aten::cumprod", some("integers", 2, 5000) | 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_products_leave_the_range_of_their_type_and_stay_there(gpu: str, dtype: torch.dtype) -> None:
    large, small = torch.full((900,), 1e3), torch.full((900,), 1e-3)
    zero, infinity = torch.zeros(1), torch.full((1,), INFINITY)
    for parts in (
        (large, small),
        (small, large),
        (zero, large),
        (infinity, small),
        (large, zero, large),
        (small, -large),
    ):
        check(gpu, "aten::cumprod", torch.cat(parts).to(dtype), 0)


def test_running_sums_with_an_infinity(gpu: str) -> None:
    x = torch.randn(3, 3000)
    x[0, 100], x[1, 5], x[1, 2900], x[2, 2048] = INFINITY, INFINITY, -INFINITY, NAN
    check(gpu, "aten::cumsum", x, 1)
    check(gpu, "aten::logcumsumexp", x, 1)


def test_running_sums_in_no_wider_type(device: str) -> None:
    with gpu_like(WorkGroups(threads=64), wide="float32") as name:
        x = torch.randn(3, 5000) + 100
        (made,) = run(name, "aten::cumsum", x, 1)
        exact = x.double().cumsum(1)
        eagers = (x.cumsum(1).double() - exact).square().mean().sqrt()
        assert (made.double() - exact).square().mean().sqrt() <= 2 * eagers
        x[0, 7], x[1, 4000:] = INFINITY, 3e38
        check(name, "aten::cumsum", x, 1)


# -- scattering

INDICES = torch.tensor([3, 0, 6, 3, 5, 3, 6])


def test_slices_that_are_added_in_order(threads: str) -> None:
    for rows, columns, count in ((7, 3, 40), (700, 40, 300), (3000, 1, 5000), (1, 300, 4), (40, 257, 2100)):
        x, index = torch.randn(rows, columns), torch.randint(-rows, rows, (count,))
        check(threads, "aten::index_put", x, [index], torch.randn(count, columns), True)
        # eager's threads race for equal places: the last one is what is meant
        wanted, values = x.clone(), torch.randn(count, columns)
        for at, value in zip(index.tolist(), values, strict=True):
            wanted[at] = value
        (made,) = run(threads, "aten::index_put", x, [index], values, False)
        assert torch.equal(made, wanted)


def test_gradient_of_an_embedding(threads: str) -> None:
    index = torch.randint(0, 500, (30, 70))
    index[3:5] = 77
    made = torch.compile(
        lambda y: aten.embedding_dense_backward(y, index, 500, 77, False),
        backend="kagent",
        options={"device": threads, "missing_kernel": "error"},
    )
    gradient = torch.randn(30, 70, 33)
    torch.testing.assert_close(made(gradient), aten.embedding_dense_backward(gradient, index, 500, 77, False))


@pytest.mark.parametrize("dim", [0, 1])
def test_places_of_each_element(threads: str, dim: int) -> None:
    for rows, columns in ((7, 40), (3, 5000)):
        x, y = torch.randn(rows, columns), torch.randn(rows, columns)
        index = torch.randint(0, x.shape[dim], (rows, columns))
        check(threads, "aten::scatter_add", x, dim, index, y)
        check(threads, "aten::scatter.src", x, dim, index.sort(dim).values[:2, :3], y)
        check(threads, "aten::scatter.value", x, dim, index, 2.5)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_joined_elements(gpu: str, reduce: str, include_self: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x, y = (torch.randint(-3, 4, (3, 90)).to(dtype) for _ in range(2))
        index = torch.randint(0, 70, (3, 90))
        check(gpu, "aten::scatter_reduce.two", x, 1, index, y, reduce, include_self=include_self)
        if reduce != "sum":
            check(gpu, "aten::index_reduce", x, 0, INDICES[:3] % 3, y, reduce, include_self=include_self)


def test_joined_elements_with_nan(gpu: str) -> None:
    x, y = some("special", 2, 100), some("special", 2, 100)
    for reduce in ("amax", "amin", "sum"):
        check(gpu, "aten::scatter_reduce.two", x, 1, torch.randint(0, 100, (2, 100)), y, reduce)


@pytest.mark.nightly
def test_halves_are_rounded_as_eagers_are(gpu: str) -> None:
    for dtype in HALVES:
        x, y, index = torch.randn(50, 3).to(dtype), torch.randn(400, 3).to(dtype), torch.randint(0, 50, (400,))
        for signature, args in (
            ("aten::index_put", (x, [index], y, True)),
            ("aten::index_add", (x, 0, index, y)),
            ("aten::scatter_add", (x, 0, index[:, None].expand(400, 3), y)),
        ):
            (made,), wanted = run(gpu, signature, *args), eager(signature)(*args)
            exact = torch.zeros(50, 3, dtype=torch.float64).add(x).index_add(0, index, y.double())
            error, eagers = ((each.double() - exact).square().mean().sqrt() for each in (made, wanted))
            assert error <= 3 * eagers


@pytest.mark.nightly
def test_several_indices_that_are_broadcast(gpu: str) -> None:
    x, first, last = torch.randn(30, 40, 5), torch.randint(-30, 30, (9, 1)), torch.randint(0, 5, (70,))
    for accumulate in (True, False):
        if not accumulate:
            first, last = torch.arange(9)[:, None], torch.arange(5)
        for where, shape in (([first, None, last], (9, -1, 40)), ([None, first, last], (30, 9, -1))):
            values = torch.randn([last.shape[0] if size < 0 else size for size in shape])
            check(gpu, "aten::index_put", x, where, values, accumulate)
    check(gpu, "aten::index_put", x, [None, None, last], torch.randn(()), False)


def test_integers_and_truth_values(gpu: str) -> None:
    index = torch.randint(0, 40, (900,))
    check(gpu, "aten::scatter_add", torch.zeros(40, dtype=torch.int64), 0, index, some("integers", 900))
    check(gpu, "aten::index_put", torch.rand(40) > 0.5, [index], torch.rand(900) > 0.9, True)
    check(gpu, "aten::index_add", torch.zeros(40, 3, dtype=torch.uint8), 0, index, torch.ones(900, 3).byte(), alpha=3)


def test_nothing_goes_anywhere(gpu: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    check(gpu, "aten::index_put", torch.randn(7, 3), [none], torch.randn(0, 3), True)
    check(gpu, "aten::scatter_add", torch.randn(7, 3), 0, none.view(0, 3), torch.randn(0, 3))
    check(gpu, "aten::index_add", torch.randn(7, 0), 0, INDICES, torch.randn(7, 0))
    check(gpu, "aten::scatter.value", torch.tensor(1.0), 0, torch.tensor(0), 3.0)


@pytest.mark.parametrize("place", [700, -701])
def test_place_outside_is_eagers_error(gpu: str, place: int) -> None:
    index = torch.arange(300)
    index[217] = place
    y = torch.randn(300)
    with pytest.raises(IndexError):
        run(gpu, "aten::index_put", torch.randn(700), [index], y, True)
    with pytest.raises((IndexError, RuntimeError), match=r"out of|range"):
        run(gpu, "aten::scatter_add", torch.randn(700), 0, index, y)


# -- all of them


@pytest.mark.parametrize(
    ("signature", "args"),
    [
        ("aten::sort", (torch.randn(3, 100),)),
        ("aten::topk", (torch.randn(3, 100), 5)),
        ("aten::cumsum", (torch.randn(3, 100), 1)),
        ("aten::cummin", (torch.randn(3, 100), 1)),
        ("aten::scatter_add", (torch.randn(100), 0, INDICES, torch.randn(7))),
        ("aten::index_put", (torch.randn(100, 3), [INDICES], torch.randn(7, 3))),
    ],
)
def test_blocks_share_the_work(gpu: str, signature: str, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[KernelDescriptor] = []
    real = OpenClRuntime.load

    def noted(self: OpenClRuntime, kernel: KernelDescriptor) -> LoadedKernel:
        loaded.append(kernel)
        return real(self, kernel)

    monkeypatch.setattr(OpenClRuntime, "load", noted)
    check(gpu, signature, *args)
    assert loaded
    assert all(kernel.threads in (32, 64) for kernel in loaded)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "signature",
    [
        *("aten::sort", "aten::sort.stable", "aten::topk", *(f"aten::{name}" for name in CUMULATIVE)),
        *("aten::scatter.src", "aten::scatter.value", "aten::scatter_add", "aten::scatter_reduce.two"),
        *("aten::index_add", "aten::index_copy", "aten::index_reduce", "aten::index_put"),
    ],
)
def test_samples_of_the_operator_database(gpu: str, signature: str) -> None:
    ties = signature in ("aten::sort", "aten::topk")  # of equal ones, any may come first
    check_samples(gpu, signature, (torch.float32, torch.int64), samples=3, first_only=ties)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_many_short_rows_are_held_in_as_little_memory_as_they_have(device: str, reduce: str) -> None:
    """A work-item of a CPU holds one of them; more would be more than its thread's stack."""
    x, index, source = torch.randn(20_000, 32).half(), torch.randint(0, 32, (20_000, 4)), torch.randn(20_000, 4).half()
    check(device, "aten::scatter_reduce.two", x, 1, index, source, reduce, include_self=True)


@pytest.mark.parametrize("columns", [3, 5, 8, 9])
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_one_block_whose_last_threads_have_no_column(gpu: str, rows: int, columns: int) -> None:
    x, at = torch.randn(rows, columns), torch.tensor([0, rows - 1, rows // 2])
    check(gpu, "aten::index_put", x, [at], torch.randn(3, columns))
    check(gpu, "aten::index_add", x, 0, at, torch.randn(3, columns))
