"""Blocks that share rows take them in vectors where the device has any, and compute what eager PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kagent_core.codegen.groups import WorkGroups

from .comparing import check
from .gpu_like import SHUFFLES, gpu_like

GROUPS = {
    "64 threads, vectors of 4": (WorkGroups(threads=64), 4),
    "64 threads that shuffle, vectors of 8": (WorkGroups(threads=64, sub_groups=SHUFFLES), 8),
}


@pytest.fixture(params=GROUPS)
def shared(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Name of a device whose blocks share rows in vectors, of every kind."""
    groups, width = GROUPS[request.param]
    with gpu_like(groups, vector_width=width) as name:
        yield name


def waves(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.linspace(-3, 4, count).sin() * 7).to(dtype).view(shape)


def reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(-1), x.amax(-1), x.amin(-1), (x > 0).any(-1), (x > -9).all(-1)


def norms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = torch.ones(x.shape[-1], dtype=x.dtype) * 1.5
    normed = torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, weight)
    return x.softmax(-1), normed, x.log_softmax(-1)


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.float32, 4104), (torch.float32, 513), (torch.bfloat16, 520), (torch.int8, 520)],
    ids=["float32", "float32, no whole number of vectors", "bfloat16", "int8"],
)
def test_rows_of_any_length(dtype: torch.dtype, length: int, shared: str) -> None:
    x = waves(dtype, 5, length)
    check(shared, reductions, x)
    if dtype.is_floating_point:
        check(shared, norms, x)


def test_rows_that_begin_anywhere(shared: str) -> None:
    x = waves(torch.float32, 6, 1031)
    check(shared, lambda x: x[:, 3:1027].softmax(-1), x)
    check(shared, lambda x: x.flatten()[5 : 5 + 4096].view(4, 1024).amax(-1), x)


def test_no_number_and_infinities(shared: str) -> None:
    x = waves(torch.float32, 5, 1024)
    x[1, 1021], x[2, 5], x[3, 7] = float("nan"), float("inf"), -float("inf")
    check(shared, reductions, x)
    check(shared, lambda x: x.softmax(-1), x)


def test_several_dimensions(shared: str) -> None:
    x = waves(torch.float32, 30, 8, 128)
    check(shared, lambda x: (x.amax((0, 2)), x.sum(), x.mean((1, 2))), x)
