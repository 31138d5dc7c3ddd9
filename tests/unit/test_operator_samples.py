"""Calls of an operator out of torch's operator database, and what is made of them."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kagent_core.errors import KagentError, SignatureError
from kagent_core.testing import operator_samples
from kagent_core.testing.kernel_check import ALWAYS
from kagent_core.testing.larger_samples import larger
from kagent_core.testing.operator_samples import PADDING, OperatorCall, operator_calls, variants

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
F32 = [torch.float32]


def call_of(overload, *args, **kwargs) -> OperatorCall:
    return OperatorCall(overload, args, kwargs, "made by hand")


def by_variant(call: OperatorCall) -> dict[str, OperatorCall]:
    return {each.variant: each for each in variants(call)}


@pytest.mark.parametrize(
    "signature",
    [
        *("aten::relu", "aten::relu_", "aten::add.Tensor", "aten::mm", "aten::sum.dim_IntList", "aten::max.dim"),
        *("aten::native_layer_norm", "aten::gelu_backward", "aten::_softmax"),
    ],
)
def test_the_calls_are_of_just_this_overload(signature: str) -> None:
    calls = operator_calls(signature, F32, samples=3)
    assert calls
    for call in calls:
        assert call.overload.name().removesuffix(".default") == signature.removesuffix(".default")
        args, kwargs = call.copied()
        with torch.no_grad():
            call.overload(*args, **kwargs)


def test_dtypes_and_number_of_samples() -> None:
    calls = operator_calls("aten::relu", ALWAYS, samples=2)
    assert {call.tensors[0].dtype for call in calls} == set(ALWAYS)
    assert max(call.sample.count("sample 0") for call in calls) == 1
    assert {call.sample[:8] for call in calls} == {"sample 0", "sample 1"}


def test_samples_are_the_same_every_time() -> None:
    one, other = (operator_calls("aten::relu", F32, samples=2) for _ in range(2))
    assert [call.sample for call in one] == [call.sample for call in other]
    assert all(a.equal(b) for x, y in zip(one, other, strict=True) for a, b in zip(x.tensors, y.tensors, strict=True))


def test_samples_are_those_of_the_database() -> None:
    for name in ("nn.functional.relu", "addmm"):
        entry = next(entry for entry in operator_samples._operator_database() if entry.name == name)
        random.seed(0)
        torch.manual_seed(0)
        theirs = list(itertools.islice(entry.sample_inputs("cpu", torch.float32), 5))
        ours = operator_samples.first_samples(entry, torch.float32, 5)
        assert len(ours) == len(theirs) > 1
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close((one.input, *one.args), (other.input, *other.args), rtol=0, atol=0)
            assert one.kwargs == other.kwargs


def test_an_operator_that_does_not_exist() -> None:
    with pytest.raises(SignatureError, match="aten::reluu"):
        operator_calls("aten::reluu", F32)


def test_an_operator_that_is_taken_apart() -> None:
    with pytest.raises(KagentError, match="no sample of torch's operator database calls aten::linear") as caught:
        operator_calls("aten::linear", F32)
    assert "takes aten::linear apart" in (caught.value.hint or "")


def test_samples_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    database = operator_samples._operator_database()
    relu = copy.copy(next(entry for entry in database if entry.name == "nn.functional.relu"))
    relu.op = lambda *args, **kwargs: torch.ones(3).view(2)
    monkeypatch.setattr(operator_samples, "_operator_database", lambda: [relu])
    with pytest.raises(
        KagentError, match=r"(\d+) samples .* \1 of which failed, the first of 'nn.functional.relu'.*size 3"
    ):
        operator_calls("aten::relu", F32)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch._C._AutoDispatchBelowAutograd])
@pytest.mark.parametrize("signature", [ATTENTION, "aten::gelu_backward", "aten::native_layer_norm"])
def test_the_mode_of_the_caller_does_not_matter(signature: str, mode: Callable[[], Any]) -> None:
    usual = operator_calls(signature, F32, samples=2)
    with mode():
        calls = operator_calls(signature, F32, samples=2)
    assert [call.sample for call in calls] == [call.sample for call in usual]


def test_the_layouts_of_the_variants() -> None:
    x = torch.arange(12.0).view(3, 4)
    found = by_variant(call_of(torch.ops.aten.relu.default, x))
    strides = {name: call.tensors[0].stride() for name, call in found.items()}
    assert strides["as it came"] == strides["surrounded"] == (4, 1)
    assert strides["every second element"] == (8, 2)
    assert strides["transposed in memory"] == (1, 3)
    assert strides["expanded"] == (0, 1)
    assert found["surrounded"].tensors[0].storage_offset() == PADDING
    assert tuple(found["empty"].tensors[0].shape) == (0, 4)
    for name in ("surrounded", "every second element", "transposed in memory"):
        assert found[name].tensors[0].equal(x), name


def test_the_values_of_the_variants() -> None:
    found = by_variant(call_of(torch.ops.aten.relu.default, torch.ones(16)))
    special = found["NaN and infinities"].tensors[0]
    assert special.isnan().any()
    assert special.isposinf().any()
    assert special.isneginf().any()
    assert "extreme integers" not in found
    integers = by_variant(call_of(torch.ops.aten.relu.default, torch.ones(9, dtype=torch.int32)))
    limits = torch.iinfo(torch.int32)
    assert {limits.min, limits.max} <= set(integers["extreme integers"].tensors[0].tolist())


def test_sizes_that_are_equal_by_chance_become_different() -> None:
    call = call_of(torch.ops.aten.mm.default, torch.randn(5, 5), torch.randn(5, 5))
    shapes = {tuple(tuple(t.shape) for t in each.tensors) for each in variants(call)}
    assert ((4, 5), (5, 5)) in shapes
    assert ((5, 5), (5, 4)) in shapes
    assert ((0, 5), (5, 5)) in shapes


def test_copies_are_the_callers_own_with_room_behind_them() -> None:
    whole = torch.randn(6, 8)
    view = whole[1:5, ::2]
    (copy,), _ = call_of(torch.ops.aten.relu.default, view).copied()
    assert copy.equal(view)
    assert (copy.stride(), copy.storage_offset()) == (view.stride(), view.storage_offset())
    assert copy.untyped_storage().nbytes() == whole.untyped_storage().nbytes() + PADDING * 4
    copy.zero_()
    assert view.ne(0).all()
    behind = torch.empty(0).set_(copy.untyped_storage(), 48, (PADDING,), (1,))
    assert behind.isnan().all()
    (lazy,), _ = call_of(torch.ops.aten.relu.default, torch.randn(3, dtype=torch.complex64).conj()).copied()
    assert lazy.is_conj()


def test_every_variant_is_run_on_copies_alone() -> None:
    calls = operator_calls("aten::relu_", F32, samples=2)
    before = [[tensor.clone() for tensor in call.tensors] for call in calls]
    for call in itertools.chain.from_iterable(map(variants, calls)):
        args, kwargs = call.copied()
        if "expanded" not in call.variant:
            call.overload(*args, **kwargs)
    for call, tensors in zip(calls, before, strict=True):
        assert all(a.equal(b) for a, b in zip(call.tensors, tensors, strict=True))


def test_larger_calls_keep_what_fits_together() -> None:
    aten = torch.ops.aten
    product = larger(call_of(aten.mm.default, torch.randn(4, 6), torch.randn(6, 5)), 3000)
    assert product is not None
    assert [tuple(t.shape) for t in product.tensors] == [(40, 60), (60, 50)]
    norm = call_of(aten.native_layer_norm.default, torch.randn(2, 8), [8], torch.randn(8), torch.randn(8), 1e-5)
    grown = larger(norm, 1600)
    assert grown is not None
    assert grown.args[1] == [80]
    assert [tuple(t.shape) for t in grown.tensors] == [(20, 80), (80,), (80,)]


def test_larger_calls_have_values_like_those_of_the_sample() -> None:
    table, index = torch.randn(10, 3), torch.tensor([0, 9, 4])
    call = larger(call_of(torch.ops.aten.index_select.default, table, 0, index), 3000)
    assert call is not None
    assert 0 <= call.args[2].min() <= call.args[2].max() <= 9
    assert call.args[0].abs().max() <= table.abs().max()


def test_what_cannot_grow() -> None:
    relu = torch.ops.aten.relu.default
    assert larger(call_of(relu, torch.tensor(1.0)), 100) is None
    assert larger(call_of(relu, torch.ones(0, 3)), 100) is None


def test_making_a_larger_call_draws_no_random_numbers_of_the_programs() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    larger(call_of(torch.ops.aten.relu.default, torch.ones(4)), 100)
    assert torch.get_rng_state().equal(state)


def test_an_operator_of_one_device_has_the_samples_of_the_function_that_calls_it() -> None:
    calls = operator_calls(ATTENTION, F32, samples=2)
    assert {call.sample.partition("'")[2].partition("'")[0] for call in calls} == {
        "nn.functional.scaled_dot_product_attention"
    }
