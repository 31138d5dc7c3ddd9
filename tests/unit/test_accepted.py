"""Which arguments a plan runs with, whether they are like those of the call before or not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kagent_core.capture.graph import input_spec
from kagent_core.execute import accepted as accepted_module
from kagent_core.execute.accepted import Accepted


def made_for(*args: Any) -> Accepted:
    inputs = [
        input_spec(arg, n, whole_storage=False) if isinstance(arg, torch.Tensor) else arg for n, arg in enumerate(args)
    ]
    program: Any = SimpleNamespace(inputs=inputs, fixed=frozenset(), anchored=frozenset(), buffers={})
    return Accepted(program, False, range(len(inputs)))


def two() -> list[torch.Tensor]:
    return [torch.randn(4, 6), torch.randn(6)]


LIKE: dict[str, Callable[[list[Any]], list[Any]]] = {
    "others": lambda args: two(),
    "a parameter": lambda args: [nn.Parameter(args[0]), args[1]],
    "one of a larger tensor": lambda args: [args[0], torch.randn(3, 6)[1]],
    "made in inference mode": lambda args: [args[0], _made_in_inference_mode()],
}

UNLIKE: dict[str, Callable[[list[Any]], list[Any]]] = {
    "shape": lambda args: [args[0][:3], args[1]],
    "strides": lambda args: [args[0].t().contiguous().t(), args[1]],
    "dtype": lambda args: [args[0], args[1].double()],
    "dimensions": lambda args: [args[0], args[1][None]],
}


def _made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(6)


@pytest.mark.parametrize("change", LIKE.values(), ids=LIKE.keys())
def test_what_a_plan_does_not_depend_on_is_accepted(change: Callable[[list[Any]], list[Any]]) -> None:
    accepted, args = made_for(*two()), two()
    for _ in range(6):
        assert accepted.are(args)
        assert accepted.are(change(args))
        with torch.inference_mode():
            assert accepted.are(args)


@pytest.mark.parametrize("change", UNLIKE.values(), ids=UNLIKE.keys())
def test_what_it_depends_on_is_looked_at_each_time(change: Callable[[list[Any]], list[Any]]) -> None:
    accepted, args = made_for(*two()), two()
    for _ in range(6):
        assert not accepted.are(change(args))
        assert accepted.are(args)


def test_the_same_tensor_twice() -> None:
    x = torch.randn(4)
    accepted = made_for(x, torch.randn(4))
    assert [accepted.are([x, x]) for _ in range(6)] == [True] * 6


def test_numbers_are_compared() -> None:
    accepted = made_for(torch.randn(4), 3)
    assert accepted.are([torch.randn(4), 3])
    assert not accepted.are([torch.randn(4), 4])
    assert made_for(3).are([3])
    assert made_for().are([])


def test_tensors_like_those_before_are_compared_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = made_for(*two())
    assert accepted.are(two())
    monkeypatch.setattr(accepted, "_tensors", None)  # what is looked at else
    assert accepted.are(two())
    with pytest.raises(TypeError):
        accepted.are(UNLIKE["dtype"](two()))


def test_arguments_are_not_kept_alive() -> None:
    accepted, args = made_for(*two()), two()
    memory = args[0].untyped_storage()
    before = torch._C._storage_Use_Count(memory._cdata)
    assert accepted.are(args)
    del args
    assert torch._C._storage_Use_Count(memory._cdata) == before - 1


def test_comparing_is_given_up_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(accepted_module, "_TensorGuards", lambda *args, **sizes: made.append(1) or _NeverAlike())
    accepted = made_for(*two())
    for _ in range(20):
        assert accepted.are(two())
    assert 1 < len(made) < 10


class _NeverAlike:
    def check(self, *args: torch.Tensor) -> bool:
        return False
