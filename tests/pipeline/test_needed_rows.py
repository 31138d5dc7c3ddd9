"""Rows of a product that nobody asks for are not computed, and what is computed stays right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kagent_core
from kagent_core import hookimpl, kernel
from kagent_core.testing.compare import assert_as_exact

PRODUCTS = ("kagent::panel_product", "mkldnn::_linear_pointwise", "aten::addmm", "aten::mm")


class Rows:
    """Notes how many rows each product has that is run."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    @hookimpl
    def kagent_task_finished(self, event: Any) -> None:
        for call in event.task.calls:
            if call.signature in PRODUCTS:
                *sizes, _ = call.outputs[0].shape
                self.counts.append(sizes[0] if len(sizes) == 1 else -1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def rows() -> Iterator[Rows]:
    noted = Rows()
    with kagent_core.use_plugin(noted):
        yield noted


class Head(nn.Module):
    """A hidden layer and a head: [batch, 6, 16] to what is picked of [batch, 6, 40]."""

    def __init__(self, pick: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=bias)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(self.head(torch.tanh(self.hidden(x))))


def check(model: nn.Module, x: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        came = torch.compile(model, backend="kagent", options={"device": "cpu", **options})(x)
        expected = model(x)
        assert_as_exact(came, expected, copy.deepcopy(model).double()(x.double()), 2, "rows")
    return came


PICKS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "last": (lambda y: y[:, -1].softmax(-1), 3),
    "last, kept": (lambda y: y[:, -1:] * 2, 3),
    "a few": (lambda y: y[:, 1:5:2].exp(), 6),
    "one of one": (lambda y: y[1, 2].sigmoid(), 1),
    "one text": (lambda y: y[1].sigmoid(), 6),
    "all": (lambda y: y[:, :].sigmoid(), 18),
    "columns": (lambda y: y[..., :7].sigmoid(), 18),
    "used twice": (lambda y: y[:, -1] + y.sum(1), 18),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", PICKS)
def test_only_needed_rows_are_computed(name: str, bias: bool, rows: Rows) -> None:
    pick, needed = PICKS[name]
    check(Head(pick, bias), torch.randn(3, 6, 16))
    assert rows.counts == [18, needed]


@pytest.mark.parametrize(("batch", "needed"), [(1, 1), (3, 18)])
def test_a_result_that_is_a_view_keeps_its_strides(batch: int, needed: int, rows: Rows) -> None:
    """The strides of eager's result, [3, 40] in rows of 6 × 40, are no copy's."""
    check(Head(lambda y: y[:, -1]), torch.randn(batch, 6, 16))
    assert rows.counts == [6 * batch, needed]


def test_rows_are_left_out_where_nothing_is_constant(rows: Rows) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 40, bias=False)

    class Tied(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, head.weight.to(x.dtype))[0, -1:].tanh()

    check(Tied(), torch.randn(1, 6, 16), generated_kernels="off")
    assert rows.counts == [1]


def test_a_bias_of_each_row_is_left_alone(rows: Rows) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 40))
            self.bias = nn.Parameter(torch.randn(6, 40))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)[2:3].tanh()

    check(Summed(), torch.randn(6, 16))
    assert rows.counts == [6]


def test_symbolic_sizes_are_right() -> None:
    model = Head(lambda y: y[:, -1].softmax(-1))
    run = torch.compile(model, backend="kagent", options={"device": "cpu"}, dynamic=True)
    with torch.no_grad():
        for length in (6, 9, 2):
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(run(x), model(x))


def test_a_kernel_of_the_users_gets_all_rows() -> None:
    seen: list[tuple[int, ...]] = []

    @kernel("aten::addmm", device="cpu")
    def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x @ weight + bias

    try:
        check(Head(lambda y: y[:, -1].softmax(-1)), torch.randn(3, 6, 16))
    finally:
        addmm.unregister()
    assert set(seen) == {(18, 16)}
