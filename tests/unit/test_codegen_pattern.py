"""Patterns: which groups of operators share a kernel, and whose buffers it then gets."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.pattern import Pattern, pattern_of
from kagent_core.specs import OpCall, Program, TensorSpec, flatten_tensors

from ..codegen_programs import generator, program
from .builders import call, tensor

aten = torch.ops.aten


def pattern(*calls: OpCall, stored: Collection[int] | None = None) -> Pattern:
    """Return the pattern of some calls, of which the last one's results are written unless told otherwise."""
    kept = {spec.buffer for spec in calls[-1].outputs} if stored is None else stored
    return pattern_of(calls, kept)[0]


def add(left: TensorSpec, right: TensorSpec | Any, result: TensorSpec, alpha: Any = 1) -> OpCall:
    name = "aten::add.Tensor" if isinstance(right, TensorSpec) else "aten::add.Scalar"
    return call(0, name, {"self": left, "other": right, "alpha": alpha}, [result])


def pointers(source: KernelSource) -> list[TensorSpec]:
    return [arg.value for arg in source.args if isinstance(arg.value, TensorSpec)]


def made(function: Callable[..., Any], *args: Any) -> tuple[Program, set[int]]:
    found = program(function, *args)
    return found, {spec.buffer for spec in flatten_tensors(found.outputs)}


def test_buffers_go_by_their_order_of_appearance() -> None:
    assert pattern(add(tensor(0, 4), tensor(1, 4), tensor(2, 4))) == pattern(
        add(tensor(9, 4), tensor(3, 4), tensor(5, 4))
    )


def test_what_shares_a_buffer_is_part_of_the_pattern() -> None:
    apart = add(tensor(0, 4), tensor(1, 4), tensor(2, 4))
    assert pattern(apart) != pattern(add(tensor(0, 4), tensor(0, 4), tensor(2, 4)))
    assert pattern(apart) != pattern(add(tensor(0, 4), tensor(1, 4), tensor(0, 4)))


NUMBERS = [0, 1, True, 1.0, 0.0, -0.0, float("nan"), float("inf"), -1, 2**31]


@pytest.mark.parametrize("other", NUMBERS, ids=repr)
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_are_told_apart_by_type_and_sign(number: Any, other: Any) -> None:
    one, two = (pattern(add(tensor(0, 4), value, tensor(1, 4))) for value in (number, other))
    same = (type(number), repr(number)) == (type(other), repr(other))
    assert (one == two) is same
    assert not same or hash(one) == hash(two)


def test_lists_of_numbers_are_told_apart_as_numbers_are() -> None:
    def padded(value: Any) -> Pattern:
        given = {"self": tensor(0, 4), "pad": (value, 0), "value": 0.0}
        return pattern(call(0, "aten::constant_pad_nd", given, [tensor(1, 5)]))

    assert padded(1) != padded(True)
    assert padded(1) == padded(1)


@pytest.mark.parametrize(
    "other",
    [
        tensor(1, 4, 6),
        tensor(1, 6, 4, strides=(1, 6)),
        tensor(1, 6, 4, strides=(8, 2)),
        tensor(1, 6, 4, offset=3),
        tensor(1, 6, 4, dtype=replace(tensor(1).dtype, name="int32")),
        replace(tensor(1, 6, 4), neg=True),
        replace(tensor(1, 6, 4), conj=True),
    ],
    ids=["shape", "transposed", "strides", "offset", "dtype", "neg", "conj"],
)
def test_how_a_tensor_lies_is_part_of_the_pattern(other: TensorSpec) -> None:
    def reads(spec: TensorSpec) -> Pattern:
        return pattern(add(tensor(0, 6, 4), spec, tensor(2, 6, 4)))

    def writes(spec: TensorSpec) -> Pattern:
        return pattern(add(tensor(0, 6, 4), tensor(3, 6, 4), spec))

    assert reads(tensor(1, 6, 4)) != reads(other)
    assert writes(tensor(1, 6, 4)) != writes(other)


def test_what_is_stored_is_part_of_the_pattern() -> None:
    first = add(tensor(0, 4), tensor(1, 4), tensor(2, 4))
    second = add(tensor(2, 4), tensor(1, 4), tensor(3, 4))
    assert pattern(first, second, stored={3}) != pattern(first, second, stored={2, 3})
    # a buffer that no call touches changes nothing
    assert pattern(first, second, stored={3}) == pattern(first, second, stored={3, 77})


def test_the_operator_and_the_order_are_part_of_the_pattern() -> None:
    def one(signature: str) -> OpCall:
        return call(0, signature, {"self": tensor(0, 4)}, [tensor(1, 4)])

    def then(signature: str) -> OpCall:
        return call(1, signature, {"self": tensor(1, 4)}, [tensor(2, 4)])

    assert pattern(one("aten::exp")) != pattern(one("aten::log"))
    assert pattern(one("aten::exp"), then("aten::log")) != pattern(one("aten::log"), then("aten::exp"))


def test_a_known_kernel_gets_the_buffers_of_the_program_that_wants_it() -> None:
    x, y = torch.empty(5, 7), torch.empty(7)
    making = generator()
    one, stored = made(lambda x, y: torch.relu(x * y) - y, x, y)
    # the same from the third operator on: other numbers of the same buffers
    two, kept = made(lambda x, y: torch.relu(torch.relu(x.sin()).cos() * y) - y, x, y)
    first = making.source(one.calls, stored)
    second = making.source(two.calls[3:], kept)
    assert second.text == first.text
    assert [arg.name for arg in second.args] == [arg.name for arg in first.args]
    assert pointers(first) != pointers(second)
    # as a generator says that has seen nothing else
    assert second == generator().source(two.calls[3:], kept)
    assert set(pointers(second)) == {*two.calls[3].inputs, two.calls[-1].outputs[0]}


def test_views_of_one_buffer_keep_their_places_in_another_program() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] * x[:, 4:]

    making = generator()
    one, stored = made(halves, torch.empty(3, 8))
    two, kept = made(lambda x: halves(x.exp()), torch.empty(3, 8))
    making.source(one.calls, stored)
    found = making.source(two.calls[1:], kept)
    assert [(spec.buffer, spec.storage_offset) for spec in pointers(found)] == [
        (two.calls[0].outputs[0].buffer, 0),
        (two.calls[0].outputs[0].buffer, 4),
        (two.calls[1].outputs[0].buffer, 0),
    ]
