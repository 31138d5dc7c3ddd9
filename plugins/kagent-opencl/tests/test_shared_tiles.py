"""Products, convolutions and attention whose blocks' threads share them: on PoCL, taken for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.codegen.groups import WorkGroups
from kagent_core.config import load_config
from kagent_core.errors import LaunchConfigError
from kagent_core.session import session_for
from kagent_core.specs import LaunchConfig
from kagent_core.testing.operator_samples import operator_calls

from .gpu_like import gpu_like

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(params=[64, 256])
def threads(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Name of a device with so many threads in a block. It writes no loops out, which PoCL takes long to compile."""
    with gpu_like(WorkGroups(threads=request.param, unroll="")) as name:
        yield name


@pytest.fixture
def gpu(device: str) -> Iterator[str]:
    """Name of a device as it is by default."""
    with gpu_like(WorkGroups()) as name:
        yield name


def run(device: str, signature: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Return what one operator gives on the device, and nowhere else."""
    session = session_for(load_config({"device": device}))
    session.reports.clear()
    made = kagent_core.run_op(signature, *args, device=device, **kwargs)
    assert [fall.signature for report in session.reports for fall in report.fallbacks] == []
    return list(made) if isinstance(made, (tuple, list)) else [made]


def widened(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def eager(signature: str) -> Callable[..., Any]:
    name, _, overload = signature.removeprefix("aten::").partition(".")
    operator: Callable[..., Any] = getattr(getattr(aten, name), overload or "default")
    return operator


def check(device: str, signature: str, *args: Any, **kwargs: Any) -> None:
    """Compare with float64: the error is at most twice eager's, and three times where elements are halves."""
    function = eager(signature)
    wanted = function(*args, **kwargs)
    exact = function(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})
    many = isinstance(wanted, (tuple, list))
    wanted, exact = (list(wanted), list(exact)) if many else ([wanted], [exact])
    for got, want, true in zip(run(device, signature, *args, **kwargs), wanted, exact, strict=True):
        if want is None:
            assert got is None
            continue
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if not want.is_floating_point():
            assert torch.equal(got, want)
            continue
        assert torch.equal(got.isnan(), want.isnan())
        ours, eagers = (largest(made.double() - true) for made in (got, want))
        least = {torch.float64: 1e-12, torch.float32: 1e-6}.get(want.dtype, 1e-3)
        assert ours <= (3 if want.dtype in HALVES else 2) * eagers + least * (1 + largest(true)), (ours, eagers)


def largest(values: torch.Tensor) -> float:
    """Return the largest magnitude of what is finite."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


# -- where matrices lie


def plain(m: int, n: int) -> torch.Tensor:
    return torch.randn(m, n)


def transposed(m: int, n: int) -> torch.Tensor:
    return torch.randn(n, m).t()


def spread(m: int, n: int) -> torch.Tensor:
    return torch.randn(m + 3, 2 * n + 5)[2 : m + 2, 3 : 2 * n + 3 : 2]


def repeated(m: int, n: int) -> torch.Tensor:
    return torch.randn(m, 1).expand(m, n)


LAYOUTS = (plain, transposed, spread, repeated)


@pytest.mark.parametrize("number", range(4))
def test_matrices_of_every_layout(threads: str, number: int) -> None:
    check(threads, "aten::mm", LAYOUTS[number](33, 17), LAYOUTS[(number + 1) % 4](17, 65))


@pytest.mark.parametrize(
    ("m", "n", "depth"),
    [
        (1, 1, 1),
        (2, 3, 1),
        (15, 16, 31),
        (63, 64, 33),
        (129, 127, 200),
        (1, 200, 65),
        (200, 1, 129),
        (128, 3, 2),
        (0, 4, 3),
    ],
)
def test_sizes_around_those_of_tiles(threads: str, m: int, n: int, depth: int) -> None:
    check(threads, "aten::mm", torch.randn(m, depth), torch.randn(n, depth).t())


def test_a_depth_of_nothing_is_a_sum_of_nothing(threads: str) -> None:
    check(threads, "aten::mm", torch.randn(3, 0), torch.randn(0, 5))
    check(threads, "aten::addmm", torch.randn(5), torch.randn(3, 0), torch.randn(0, 5))


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
def test_other_floats(threads: str, dtype: torch.dtype) -> None:
    check(threads, "aten::mm", torch.randn(70, 45).to(dtype), torch.randn(45, 66).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_integers_wrap_around(threads: str, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    a, b = (torch.randint(limits.min, limits.max, shape).to(dtype) for shape in ((20, 33), (33, 35)))
    check(threads, "aten::mm", a, b)


def test_long_sums_are_added_up_in_stretches(threads: str) -> None:
    check(threads, "aten::mm", torch.rand(40, 5000), torch.rand(5000, 70))
    check(threads, "aten::mm", torch.rand(2, 5000), torch.rand(5000, 3))


def test_large_products_have_the_largest_tiles(gpu: str) -> None:
    check(gpu, "aten::mm", torch.randn(1030, 70), torch.randn(70, 1290))


# -- what belongs to a product


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (0.5, -2), (0, 0)])
def test_what_is_added_to_a_product(threads: str, beta: float, alpha: float) -> None:
    added = torch.randn(40)
    if beta == 0:
        added[3] = float("nan")
    given = (torch.randn(33, 20), torch.randn(20, 40))
    check(threads, "aten::addmm", added, *given, beta=beta, alpha=alpha)


def test_many_products(threads: str) -> None:
    a, b = torch.randn(5, 18, 7), torch.randn(5, 7, 34)
    check(threads, "aten::bmm", a, b)
    check(threads, "aten::bmm", a[:1].expand(5, 18, 7), b.transpose(0, 1).contiguous().transpose(0, 1))
    check(threads, "aten::baddbmm", torch.randn(18, 1), a, b, beta=2, alpha=3)
    check(threads, "aten::addbmm", torch.randn(18, 34), a, b)


def test_products_with_vectors(threads: str) -> None:
    a, x = torch.randn(45, 300), torch.randn(300)
    check(threads, "aten::mv", a, x)
    check(threads, "aten::mv", a.t(), x[:45])
    check(threads, "aten::addmv", torch.randn(45), a, x, beta=0.5)
    check(threads, "aten::dot", torch.randn(1000), torch.randn(2000)[::2])
    check(threads, "aten::dot", torch.randn(0), torch.randn(0))


def test_what_follows_a_product_is_computed_where_it_is_stored(threads: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, bias)) * 2 + rest

    given = (torch.randn(9, 7, 40), torch.randn(66, 40), torch.randn(66), torch.randn(9, 7, 66))
    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(function, backend="kagent", options={"device": threads}, dynamic=False)(*given)
    torch.testing.assert_close(made, function(*given))


# -- convolutions

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Sequence[Any]]] = {
    "one dimension": ((2, 6, 30), (8, 3, 4), ([2], [1], [1], False, [0], 2)),
    "dilated": ((2, 5, 9, 13), (20, 5, 3, 3), ([1, 2], [2, 1], [2, 1], False, [0, 0], 1)),
    "three dimensions": ((1, 4, 5, 6, 7), (6, 4, 2, 3, 1), ([1, 2, 1], [0, 1, 0], [1, 1, 1], False, [0, 0, 0], 1)),
    "transposed": ((2, 6, 7, 9), (6, 5, 3, 2), ([2, 1], [1, 0], [1, 1], True, [1, 0], 2)),
    "transposed and dilated": ((1, 4, 8), (4, 6, 3), ([2], [1], [2], True, [0], 1)),
    "depthwise": ((2, 6, 9, 9), (6, 1, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 6)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "last"),
    [*((name, False) for name in CONVOLUTIONS), ("dilated", True), ("transposed", True), ("depthwise", True)],
)
def test_convolutions_and_their_gradients(device: str, name: str, last: bool) -> None:
    shape, window, rest = CONVOLUTIONS[name]
    x, weight = torch.randn(shape), torch.randn(window)
    if last:
        x = x.to(memory_format=torch.channels_last)
    bias = torch.randn(window[1] * rest[-1] if rest[3] else window[0])
    with gpu_like(WorkGroups(threads=256, unroll="")) as gpu:
        check(gpu, "aten::convolution", x, weight, bias, *rest)
    grad = torch.randn_like(aten.convolution(x, weight, bias, *rest))
    with gpu_like(WorkGroups(threads=64, unroll="")) as gpu:
        check(gpu, "aten::convolution_backward", grad, x, weight, list(bias.shape), *rest, [True, True, True])


# -- attention


def heads(queries: int, keys: int, size: int, values: int | None = None) -> list[torch.Tensor]:
    """Return queries, keys and values as linear layers give them: heads beside each other."""
    sizes = ((queries, size), (keys, size), (keys, size if values is None else values))
    return [torch.randn(2, length, 3, width).transpose(1, 2) for length, width in sizes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "size"), [(1, 70, 64), (65, 65, 20), (33, 130, 1), (5, 3, 130)])
def test_attention(threads: str, queries: int, keys: int, size: int, causal: bool) -> None:
    check(threads, ATTENTION, *heads(queries, keys, size), 0.0, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_attention(threads: str, causal: bool) -> None:
    check_gradients(threads, 40, 7, 1, causal)


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "size"), [(3, 70, 64), (33, 65, 20), (5, 3, 130)])
def test_gradients_of_attention_of_any_size(device: str, queries: int, keys: int, size: int, causal: bool) -> None:
    with gpu_like(WorkGroups(threads=64)) as name:  # PoCL takes up to an hour to compile those of 256 threads
        check_gradients(name, queries, keys, size, causal)


def check_gradients(device: str, queries: int, keys: int, size: int, causal: bool) -> None:
    """Compare the gradients of attention with eager PyTorch's."""
    query, key, value = torch.randn(2, 1, queries, size), torch.randn(2, 1, keys, size), torch.randn(2, 1, keys, size)
    made, logs = eager(ATTENTION)(query, key, value, 0.0, causal)
    check(device, f"{ATTENTION}_backward", torch.randn_like(made), query, key, value, made, logs, 0.0, causal)


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
def test_attention_of_other_floats(threads: str, dtype: torch.dtype) -> None:
    given = [tensor.to(dtype) for tensor in heads(40, 50, 64)]
    check(threads, ATTENTION, *given, 0.0, False, scale=0.3)


def test_masks(threads: str) -> None:
    query, key, value = heads(17, 70, 16)
    mask = torch.randn(2, 1, 17, 70)
    mask[..., ::3] = float("-inf")
    mask[1, :, 5] = float("-inf")  # a query that sees nothing
    for own in (mask.expand(2, 3, 17, 70), torch.randn(17, 70)):
        check(threads, ATTENTION, query, key, value, 0.0, False, attn_mask=own)


def test_nan_and_infinity_in_attention(threads: str) -> None:
    query, key, value = heads(20, 40, 8)
    query[0, 0, 3, 2] = float("nan")
    key[1, 1, 7, 1] = float("nan")
    check(threads, ATTENTION, query, key, value, 0.0, False)


def test_the_largest_heads_fit(gpu: str) -> None:
    check(gpu, ATTENTION, *heads(9, 40, 512), 0.0, False)
    check(gpu, ATTENTION, *(tensor.double() for tensor in heads(3, 20, 1024)), 0.0, False)


# -- what torch has samples of


@pytest.mark.nightly
@pytest.mark.parametrize(
    "signature",
    [
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv"),
        *("aten::dot", "aten::convolution", "aten::convolution_backward", ATTENTION),
    ],
)
def test_samples_of_the_operator_database(gpu: str, signature: str) -> None:
    calls = operator_calls(signature, [torch.float32], samples=2)
    for call in calls[:4]:
        args, kwargs = call.copied()
        check(gpu, signature, *args, **kwargs)


# -- tile sizes of a launch config


@pytest.mark.parametrize(
    "tiles",
    [
        {"block_rows": 64, "block_columns": 16, "block_depth": 4},
        {"block_rows": 8, "block_columns": 8, "block_depth": 64, "thread_rows": 1, "thread_columns": 2},
        {"block_rows": 1, "block_columns": 64},
        {"thread_rows": 2, "thread_columns": 8, "depth": 16},
    ],
)
def test_any_tile_sizes_give_the_same_result(threads: str, tiles: dict[str, int]) -> None:
    with kagent_core.force_launch_config("aten::mm", LaunchConfig(tiles=tiles)):
        check(threads, "aten::mm", torch.randn(37, 50), torch.randn(50, 45))


@pytest.mark.parametrize(
    "tiles",
    [
        {"block_rows": 8, "block_columns": 16},
        {"block_rows": 64, "thread_rows": 8, "block_depth": 4},
        {"block_columns": 1},
        {"block_columns": 2},
    ],
)
def test_any_tile_sizes_give_the_same_attention(threads: str, tiles: dict[str, int]) -> None:
    with kagent_core.force_launch_config(ATTENTION, LaunchConfig(tiles=tiles)):
        check(threads, ATTENTION, *heads(37, 50, 24), 0.0, True)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"block_rows": 256, "block_columns": 256, "thread_rows": 1}, "the tiles of aten::mm take 8192 threads"),
        (
            {"block_rows": 64, "block_columns": 64, "block_depth": 1024},
            "bytes of a block's shared memory, expected at most 32768",
        ),
        ({"block_rows": 64, "block_columns": 64, "thread_rows": 16, "thread_columns": 16}, "of a thread's registers"),
    ],
)
def test_tile_sizes_that_a_block_has_no_room_for_are_refused(gpu: str, tiles: dict[str, int], message: str) -> None:
    with (
        kagent_core.force_launch_config("aten::mm", LaunchConfig(tiles=tiles)),
        pytest.raises(LaunchConfigError) as caught,
    ):
        run(gpu, "aten::mm", torch.randn(300, 2000), torch.randn(2000, 300))
    assert message in caught.value.message
    assert "docs/launch-configs.md" in (caught.value.hint or "")
