"""What the CPU's packer packs, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kagent_core.errors import PackingError
from kagent_core.specs import Access, Parameter
from kagent_cpu.aten import aten_registry
from kagent_cpu.packing import CpuPacker

from .builders import aten, call_of

X, Y = torch.randn(3, 4), torch.randn(3, 4)


def pack(call):
    return CpuPacker().pack(call, aten_registry().find(call))


def test_arguments_in_the_schemas_order_then_the_result() -> None:
    call = call_of(aten.add.Tensor, X, Y, alpha=2)
    packed = pack(call)
    assert [(arg.name, arg.access, arg.keyword) for arg in packed] == [
        ("self", Access.IN, False),
        ("other", Access.IN, False),
        ("alpha", None, True),
        ("out", Access.OUT, True),
    ]
    assert packed[0].value == call.inputs[0]
    assert packed[2].value == 2
    assert packed[3].value == call.results[0]


def test_what_follows_an_argument_that_was_left_out_goes_by_name() -> None:
    call = call_of(aten.sum.dim_IntList, X, [1], dtype=torch.float64)  # keepdim is left out
    assert [(arg.name, arg.keyword) for arg in pack(call)] == [
        ("self", False),
        ("dim", False),
        ("dtype", True),
        ("out", True),
    ]


def test_an_argument_that_is_written_is_in_and_out() -> None:
    packed = pack(call_of(aten.add_.Tensor, X.clone(), Y))
    assert [arg.access for arg in packed] == [Access.INOUT, Access.IN]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_integer_that_does_not_fit_is_refused(value: int) -> None:
    call = call_of(aten.add.Tensor, X, Y, alpha=2)
    too_large = dataclasses.replace(call, arguments={**call.arguments, "alpha": value})
    with pytest.raises(PackingError, match=rf"'alpha' of aten::add.Tensor is {value}, which does not fit 64 bits"):
        pack(too_large)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), True])
def test_an_integer_that_just_fits_is_packed(value: int) -> None:
    call = call_of(aten.add.Tensor, X, Y, alpha=2)
    packed = pack(dataclasses.replace(call, arguments={**call.arguments, "alpha": value}))
    assert packed[2].value is value


def test_another_device_is_refused() -> None:
    call = call_of(aten.full.default, [2], 1.0)
    elsewhere = dataclasses.replace(call, arguments={**call.arguments, "device": torch.device("cuda:1")})
    with pytest.raises(PackingError, match=r"'device' of aten::full asks for device 'cuda:1'.*\n  hint: "):
        pack(elsewhere)
    here = dataclasses.replace(call, arguments={**call.arguments, "device": torch.device("cpu")})
    assert "device" in [arg.name for arg in pack(here)]


def test_a_kernel_with_another_number_of_results_is_refused() -> None:
    call = call_of(aten.max.dim, X, 1)
    kernel = aten_registry().find(call)
    one = dataclasses.replace(kernel, parameters=(Parameter("out", "Tensor", Access.OUT),))
    with pytest.raises(PackingError, match=r"declares 1 results \(out\), but aten::max.dim has 2"):
        CpuPacker().pack(call, one)
