"""Programs that generated kernels once got wrong, and their kin."""

from __future__ import annotations

import threading

import pytest
import torch

import kagent_core
from kagent_core.testing.compare import check_against_eager

ALL = {"generated_kernels": "all"}


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("made", [(6, 35), (35, 6)])
@pytest.mark.parametrize("read", [(7, 30), (30, 7), (10, 21)])
def test_a_reversed_view_that_is_cut_up_otherwise(made, read):
    """The place that is read counts backwards, and is divided to find where it was made."""
    check_against_eager(lambda x: ((x + 1).view(-1).flip(0) * 2).view(read).sum(0), values(*made), **ALL)


def test_a_reversed_view_of_a_stepped_slice():
    check_against_eager(lambda x: x.exp().view(-1).flip(0)[3::2].view(3, -1).amax(1), values(5, 27), **ALL)


@pytest.mark.parametrize("dims", [(0,), (0, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("repeats", [(2, 1, 1), (1, 3, 1), (1, 1, 2)])
def test_costly_values_that_rows_repeat_are_kept(dims, repeats):
    """A value that does not depend on each of the loops of a row is computed outside some of them."""

    def standardized(x):
        x = torch.nn.functional.gelu(x).repeat(repeats)
        return (x - x.mean(dims, keepdim=True)) * (x.var(dims, keepdim=True, correction=0) + 1).rsqrt()

    check_against_eager(standardized, values(40, 3, 5), **ALL)
    check_against_eager(standardized, values(300, 1, 1), **ALL)


def weighted(x):
    parts = [torch.exp(x * (0.1 + number / 50)) for number in range(10)]
    return sum(part / part.sum(1, keepdim=True) for part in parts)


def columns_of(x):
    return sum((x * number).amax(0) + (x + number).sum(0) for number in range(1, 11))


@pytest.mark.parametrize(("function", "shape"), [(weighted, (2, 8192)), (columns_of, (2000, 128))])
def test_a_thread_with_a_small_stack(function, shape):
    """What is kept from one pass to the next, and what threads have found in their parts, lies on the stack."""
    before = threading.stack_size(256 * 1024)
    try:
        compiled = torch.compile(function, backend="kagent", options={"device": "cpu", **ALL})
        x = values(*shape).double()
        want, got = compiled(x), []
        thread = threading.Thread(target=lambda: got.append(compiled(x)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    torch.testing.assert_close(got[0], want)
    torch.testing.assert_close(want, function(x))


@pytest.mark.parametrize(
    "empty",
    [
        lambda x: torch.cat([x[:0], x[:0]]),
        lambda x: x[:0].repeat(2, 1),
        lambda x: x[:0].flip(0),
        lambda x: torch.nn.functional.pad(x[:0], (0, 1)),
        lambda x: x[:0].roll(1, 0),
        lambda x: torch.stack([x[:0], x[:0]]),
        lambda x: x[:0].softmax(1),
        lambda x: x[:0].tril(),
        lambda x: x[torch.zeros(0, dtype=torch.long)],
    ],
)
def test_what_has_no_elements_beside_what_has(empty):
    """One group, in which an operator makes nothing."""

    def both(x):
        x = x * 2
        return empty(x) + 1, x + 1, empty(x).sum() + x

    check_against_eager(both, values(4, 3), **ALL)
    check_against_eager(both, values(4, 3))


def test_infinite_scores_have_no_weight():
    """A maximum that ignores NaN makes the same softmax: NaN comes in by the sum."""
    x = values(6, 40)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), float("-inf")
    x[4, ::2] = float("-inf")
    for function in (
        lambda x: torch.softmax(x * 2, -1),
        lambda x: torch.softmax(x, 0),
        lambda x: (x + 1).log_softmax(1),
    ):
        check_against_eager(function, x, **ALL)


@pytest.mark.parametrize("shape", [(100, 70), (33, 65), (3, 40, 37), (32, 32), (8, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_transposed_blocks(dtype, shape):
    x = (values(*shape) * 9).to(dtype)
    check_against_eager(
        lambda x: x.transpose(-1, -2) | x.new_ones(()) if dtype is torch.bool else x.mT.contiguous() * 2, x
    )


def test_what_reads_an_empty_result_of_a_group_comes_behind_the_group() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        places = (y * 3).nan_to_num(0).long() % 3
        return y, y.sort(dim=0, stable=True).indices, y.scatter_add(1, places, y.flip(0))

    check_against_eager(function, torch.zeros(0, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.fill_(300),
        lambda x: torch.full_like(x, -129),
        lambda x: x.masked_fill(x == 0, 300),
        lambda x: torch.where(x == 0, x, 300),
        lambda x: torch.full((2,), float("nan"), dtype=torch.int8),
        lambda x: x.scatter(0, torch.tensor([0]), 128),
        lambda x: x.half().clamp(max=1e9),
        lambda x: torch.nn.functional.pad(x, (1, 1), value=300),
        lambda x: torch.threshold(x, 0, 300),
        lambda x: torch.full((2,), 1e39),
    ],
)
@pytest.mark.parametrize("generated", ["auto", "all"])
def test_a_number_that_a_type_cannot_hold_is_refused_as_in_eager(function, generated: str) -> None:
    with pytest.raises(RuntimeError, match="without overflow"):
        function(torch.zeros(3, dtype=torch.int8))
    compiled = kagent_core.compile(function, device="cpu", generated_kernels=generated)
    with pytest.raises(RuntimeError, match="without overflow"):
        compiled(torch.zeros(3, dtype=torch.int8))


def test_numbers_that_fit_barely() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        unsigned = torch.full((2,), 255, dtype=torch.uint8)
        return torch.full_like(x, -128), unsigned, torch.full((2,), float("inf"), dtype=torch.float16), x + 300

    check_against_eager(function, torch.zeros(3, dtype=torch.int8), generated_kernels="all")
