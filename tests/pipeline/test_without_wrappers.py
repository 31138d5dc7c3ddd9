"""Inference graphs are called without AOTAutograd's wrappers where those add nothing, and with them elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kagent_core.backend
from kagent_core import kernel
from kagent_core.testing.compare import assert_same


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each graph that is called without wrappers."""
    torch._dynamo.reset()
    made: list[int] = []
    without = kagent_core.backend._without_wrappers
    monkeypatch.setattr(
        kagent_core.backend, "_without_wrappers", lambda run, wrapped: (made.append(1), without(run, wrapped))[1]
    )
    return made


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, backend="kagent", options={"device": "cpu"})


def _write(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y, y


GRAPHS: dict[str, tuple[Callable[..., object], bool]] = {
    "plain": (lambda x: x + 1, True),
    "several": (lambda x: (x + 1, x.sum()), True),
    "one twice": (_twice, True),
    "the input": (lambda x: (x, x + 1), True),  # Dynamo returns it itself
    "a view of the input": (lambda x: (x.t(), x + 1), False),
    "a detached input": (lambda x: (x.detach(), x + 1), False),
    "a written input": (_write, False),
}


@pytest.mark.parametrize("name", GRAPHS)
@torch.no_grad()
def test_results_are_eagers_with_and_without(name: str, direct: list[int]) -> None:
    function, expected = GRAPHS[name]
    run = compiled(function)
    for _ in range(2):
        mine, theirs = torch.ones(2, 3), torch.ones(2, 3)
        came, wanted = run(mine), function(theirs)
        assert_same(came, wanted, name)
        assert_same(mine, theirs, name)
        assert (mine._version > 0) == (theirs._version > 0)  # the counter moved
        if isinstance(came, tuple):
            # what is one tensor is one tensor, and what lies in one memory lies there
            assert (came[0] is came[1]) == (wanted[0] is wanted[1])
            shares = [each[0].data_ptr() == memory.data_ptr() for each, memory in ((came, mine), (wanted, theirs))]
            assert shares[0] == shares[1]
    assert bool(direct) == expected


def test_where_gradients_are_on_they_are_off_inside(direct: list[int]) -> None:
    seen: list[bool] = []

    @kernel("aten::cosh", device="cpu")
    def cosh(self: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return self.exp().add(self.neg().exp()).div(2)

    try:
        x = torch.linspace(-1, 1, 8)
        run = compiled(lambda x: x.cosh())
        for enabled in (True, False, True):
            with torch.set_grad_enabled(enabled):
                came = run(x)
            assert not came.requires_grad
            torch.testing.assert_close(came, torch.linspace(-1, 1, 8).double().cosh().float())
    finally:
        cosh.unregister()
    assert seen
    assert not any(seen)
    assert direct


def test_inputs_that_want_gradients_get_them_after_inference(direct: list[int]) -> None:
    function = lambda x: (x * x).sin()
    run, x = compiled(function), torch.linspace(-1, 1, 8, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), function(x))
    run(x).sum().backward()
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(x.grad, wanted)


@torch.inference_mode()
def test_results_of_inference_mode_are_inference_tensors(direct: list[int]) -> None:
    came = compiled(lambda x: x + 1)(torch.ones(3))
    assert came.is_inference()
    assert direct
