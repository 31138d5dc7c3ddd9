"""What depends on no input is computed once: masks, positions, tensors filled like an input; how much of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kagent_core.inference
from kagent_core.optimize import splitting
from kagent_core.optimize.splitting import SplitGraph

Made = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Shapes of the constants that are kept while the test runs."""
    shapes: Made = []
    split = kagent_core.inference.split

    def note(graph: Any) -> SplitGraph | None:
        parts = split(graph)
        if parts is not None:
            inputs = [node for node in parts.main.graph.nodes if node.op == "placeholder"]
            shapes.extend(tuple(node.meta["val"].shape) for node in inputs[len(parts.kept) :])
        return parts

    monkeypatch.setattr(kagent_core.inference, "split", note)
    return shapes


class Model(nn.Module):
    """Calls a function of an input and a parameter of 8 elements."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def check(function: Callable[..., Any], x: torch.Tensor, dynamic: bool = False) -> None:
    model = Model(function)
    run = torch.compile(model, backend="kagent", dynamic=dynamic, options={"device": "cpu"})
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x), check_stride=True)


def windows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The mask of shifted windows, as vision transformers compute it from sizes."""
    place = torch.arange(8)
    part = (place >= 4).long() + (place >= 6).long()
    regions = (part[:, None] * 3 + part[None]).view(2, 4, 2, 4).permute(0, 2, 1, 3).reshape(4, 16)
    mask = (regions.unsqueeze(1) - regions.unsqueeze(2)).ne(0) * -100.0
    return x * weight.sum() + mask


def test_masks_of_sizes_are_computed_once(kept: Made) -> None:
    check(windows, torch.randn(4, 16, 16))
    assert kept == [(4, 16, 16), ()]


def test_of_a_constant_that_is_too_large_the_parts_are_kept(kept: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "SMALL", 4 * 16 * 16 - 1)  # less than booleans take
    check(windows, torch.randn(4, 16, 16))
    assert (4, 16, 16) not in kept
    assert (4, 16) in kept


def test_all_constants_together_take_no_more_than_the_parameters_or_a_little(
    kept: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for step in (2, 3, 5):
            x = x * torch.arange(64.0).div(step).sin()
        return x * weight[0]

    monkeypatch.setattr(splitting, "SMALL", 64 * 4 * 2)
    check(tables, torch.randn(3, 64))
    assert kept.count((64,)) == 2


def test_a_view_counts_as_what_it_is_a_view_of(kept: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "SMALL", 1024)
    check(lambda x, weight: x * weight + torch.arange(4096.0).cos()[:8], torch.randn(3, 8))
    assert kept == []


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_what_is_filled_like_an_input_depends_on_its_shape(kept: Made, layout: str) -> None:
    def lower(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.ones_like(x, dtype=torch.float64).cumsum(0) + weight

    x = torch.randn(3, 8) if layout == "contiguous" else torch.randn(8, 3).t()
    check(lower, x)
    assert ((3, 8) in kept) == (layout == "contiguous")


def test_a_single_number_is_no_constant_where_kernels_have_it_in_their_text(kept: Made) -> None:
    check(lambda x, weight: x * weight + torch.full_like(x, 2.5) - torch.ones(3, 1).expand(3, 8), torch.randn(3, 8))
    assert kept == []
    torch._dynamo.reset()
    check(lambda x, weight: torch.cat([x * weight, torch.ones(2, 8)]), torch.randn(3, 8))
    assert kept == [(2, 8)]


def test_symbolic_sizes_are_no_constants() -> None:
    model = Model(lambda x, weight: x * torch.ones_like(x).cumsum(0) + weight)
    run = torch.compile(model, backend="kagent", dynamic=True, options={"device": "cpu"})
    for rows in (2, 5, 3):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(run(x), model(x))


def test_what_the_caller_gets_is_the_callers_and_random_numbers_are_new() -> None:
    model = Model(
        lambda x, weight: (x * weight, torch.arange(8.0).sin(), torch.full_like(x, 3), torch.rand(8) + weight)
    )
    run, x = torch.compile(model, backend="kagent", options={"device": "cpu"}), torch.randn(3, 8)
    for seed in range(3):
        torch.manual_seed(seed)
        got = run(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, model(x))
        for tensor in got:
            tensor.fill_(-1)


def test_a_constant_that_the_program_writes_to_is_made_anew() -> None:
    def written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        table = torch.arange(8.0)
        before = x * table
        table.mul_(weight)
        return before + table

    check(written, torch.randn(3, 8))
