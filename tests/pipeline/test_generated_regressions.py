"""Programs that generated kernels once got wrong, and their kin."""

from __future__ import annotations

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
