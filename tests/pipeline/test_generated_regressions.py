"""Programs that generated kernels once got wrong, and their kin."""

from __future__ import annotations

import threading

import pytest
import torch

from .compare import check_against_eager

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
