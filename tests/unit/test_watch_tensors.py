"""Whether tensors are the same ones, at the same place, is told for all of them at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kagent_core.config import load_config
from kagent_core.errors import CompilationError
from kagent_core.watch.scan import compiled_scan
from kagent_core.watch.tensors import TensorComparer, make_tensor_comparer

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def comparer() -> TensorComparer:
    made = make_tensor_comparer(compiled_scan(load_config().cache_dir))
    assert made is not None
    return made


def tensors() -> Tensors:
    with torch.inference_mode():
        unversioned = torch.randn(3)
    return (
        nn.Parameter(torch.randn(4, 4)),
        torch.randn(6, 2, dtype=torch.bfloat16).t()[1:],
        torch.tensor(3),
        torch.empty(0, 3),
        torch.randn(2, dtype=torch.complex64).conj(),
        unversioned,
    )


@pytest.mark.parametrize("count", [0, 1, 6])
def test_nothing_has_changed(comparer: TensorComparer, count: int) -> None:
    some = tensors()[:count]
    same = comparer.of(some)
    assert same is not None
    assert same.are(some)
    for tensor in some:
        tensor.data.zero_()  # what lies in their memory is not asked about
    with torch.autocast("cpu"), torch.inference_mode():
        assert same.are(some)


def _set_data(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    def change(some: Tensors) -> Tensors:
        some[0].data = value(some[0].data)
        return some

    return change


CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "other memory": _set_data(torch.clone),
    "strides": _set_data(torch.t),
    "a part": _set_data(lambda t: t[:, ::2]),
    "in place": lambda some: (some[0], some[1].t_(), *some[2:]),
    "an object on the same memory": lambda some: (some[0].detach(), *some[1:]),
    "another order": lambda some: (some[1], some[0], *some[2:]),
    "the last one": lambda some: (*some[:-1], torch.randn(3)),
    "fewer": lambda some: some[:-1],
    "more": lambda some: (*some, some[0]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_has_changed_is_told(comparer: TensorComparer, change: Callable[[Tensors], Tensors]) -> None:
    some = tensors()
    same = comparer.of(some)
    assert same is not None
    assert same.are(some)
    assert not same.are(change(some))


def test_tensors_are_not_kept_alive(comparer: TensorComparer) -> None:
    kept = torch.randn(3)
    memory = kept.untyped_storage()
    before = torch._C._storage_Use_Count(memory._cdata)
    same = comparer.of((kept,))
    assert same is not None
    assert same.are((kept,))
    assert torch._C._storage_Use_Count(memory._cdata) == before


def test_a_library_without_such_a_function_is_an_error() -> None:
    with pytest.raises(CompilationError, match="has no function 'missing'"):
        compiled_scan(load_config().cache_dir).python_function("missing")
