"""ATen's kernels are found by exact signature, and write into planned memory where they can."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kagent_cpu.aten import _HAND_WRITTEN, AtenKernel, aten_kernel, aten_registry, out_variant

from .builders import aten, call_of

X, Y = torch.randn(3, 4), torch.randn(3, 4)


def functional_overloads() -> list[Any]:
    """Every functional overload in ATen that returns tensors."""
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return [op for op in found if op._schema.returns and not any(arg.is_out for arg in op._schema.arguments)]


def test_every_out_variant_has_a_cpu_kernel_and_the_operators_own_arguments() -> None:
    chosen = {op: out for op in functional_overloads() if (out := out_variant(op)) is not None}
    assert len(chosen) > 300
    for op, out in chosen.items():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(out.name(), "CPU"), out
        arguments = [(a.name, str(a.type)) for a in out._schema.arguments if not a.is_out]
        assert arguments == [(a.name, str(a.type)) for a in op._schema.arguments], out
        assert len(out._schema.returns) == len(op._schema.returns), out
        assert out.overloadpacket is op.overloadpacket


@pytest.mark.parametrize(
    ("overload", "expected"),
    [
        (aten.add.Tensor, "add.out"),
        (aten.mm.default, "mm.out"),
        (aten.max.dim, "max.dim_max"),
        (aten.native_layer_norm.default, None),  # its out variant is generated: it calls the operator and copies
        (aten.native_dropout.default, None),
        (aten.split.Tensor, None),
    ],
)
def test_which_out_variant(overload: Any, expected: str | None) -> None:
    found = out_variant(overload)
    assert (None if found is None else found.__name__) == expected


def test_the_kernel_of_an_operator_with_an_out_variant_writes_into_given_memory() -> None:
    kernel = aten_registry().find(call_of(aten.add.Tensor, X, Y))
    assert kernel.name == "aten::add.out"
    assert not kernel.allocates
    assert [parameter.name for parameter in kernel.parameters] == ["out"]
    assert isinstance(kernel.function, AtenKernel)
    out = torch.empty(3, 4)
    assert kernel.function(X, Y, alpha=2, out=out) is out
    assert out.equal(X + 2 * Y)
    assert kernel.function(X, Y, alpha=2).equal(X + 2 * Y)


def test_the_kernel_of_an_operator_without_one_allocates() -> None:
    kernel = aten_registry().find(call_of(aten.native_layer_norm.default, X, [4], None, None, 1e-5))
    assert kernel.allocates
    assert kernel.parameters == ()
    assert kernel.function is not None
    assert kernel.function(X, [4], None, None, 1e-5)[0].equal(torch.nn.functional.layer_norm(X, [4]))


def test_the_kernel_of_an_in_place_operator_allocates_nothing() -> None:
    kernel = aten_registry().find(call_of(aten.add_.Tensor, X.clone(), Y))
    assert not kernel.allocates
    assert kernel.parameters == ()


def test_a_signature_that_torch_has_no_cpu_kernel_for_is_not_found() -> None:
    with torch.library._scoped_library("kagent_test_aten", "DEF") as library:
        library.define("nowhere(Tensor x) -> Tensor")
        call = call_of(aten.relu.default, X)
        overload = torch.ops.kagent_test_aten.nowhere.default
        assert aten_kernel(_with_overload(call, overload)) is None
        library.impl("nowhere", lambda x: x + 1, "CPU")
        found = aten_kernel(_with_overload(call, overload))
    assert found is not None
    assert found.allocates


def _with_overload(call: Any, overload: Any) -> Any:
    return dataclasses.replace(call, signature="kagent_test_aten::nowhere", overload=overload)


# -- kernels that are written here


HAND_WRITTEN = {
    "clone": (aten.clone.default, (X,), {}),
    "clone of a transpose": (aten.clone.default, (X.t(),), {"memory_format": torch.contiguous_format}),
    "clone, channels last": (
        aten.clone.default,
        (torch.randn(2, 3, 4, 5),),
        {"memory_format": torch.channels_last},
    ),
    "clone of nothing": (aten.clone.default, (torch.empty(0, 3),), {}),
    "to half": (aten._to_copy.default, (X,), {"dtype": torch.float16}),
    "to integers": (aten._to_copy.default, (X * 10,), {"dtype": torch.int32}),
    "to bool": (aten._to_copy.default, (X.round(),), {"dtype": torch.bool}),
    "to complex": (aten._to_copy.default, (X,), {"dtype": torch.complex64}),
    "full": (aten.full.default, ([2, 3], 7), {"dtype": torch.int64}),
    "full of a float": (aten.full.default, ([2, 3], -0.0), {}),
    "full without dimensions": (aten.full.default, ([], float("nan")), {}),
    "full of True": (aten.full.default, ([2], True), {"dtype": torch.bool}),
    "full_like": (aten.full_like.default, (X.t(), 3), {}),
    "full_like with another dtype": (aten.full_like.default, (X, 3.7), {"dtype": torch.int32}),
}


def test_every_hand_written_kernel_is_tested() -> None:
    tested = {call_of(overload, *args, **kwargs).signature for overload, args, kwargs in HAND_WRITTEN.values()}
    assert tested == _HAND_WRITTEN.keys()


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_a_hand_written_kernel_fills_what_it_is_given(case: str) -> None:
    overload, args, kwargs = HAND_WRITTEN[case]
    expected = overload(*args, **kwargs)
    kernel = aten_registry().find(call_of(overload, *args, **kwargs))
    assert kernel.name.endswith("in place")
    assert isinstance(kernel.function, AtenKernel)
    assert kernel.function.into is not None
    out = torch.empty_strided(expected.shape, expected.stride(), dtype=expected.dtype)
    out.fill_(1)
    kernel.function.into(*args, out=out, **kwargs)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)
    assert out.numpy().tobytes() == expected.numpy().tobytes()  # the sign of zero, too
