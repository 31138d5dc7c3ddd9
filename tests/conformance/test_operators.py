"""Level 2 of the conformance kit: torch's operator database on a device."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.errors import DeviceError
from kagent_core.kernels import override
from kagent_core.testing import FakeDevice
from kagent_core.testing.compare import MismatchError
from kagent_core.testing.conformance import operators, running
from kagent_core.testing.conformance.case import CannotRunError, Case, Ran, Target
from kagent_core.testing.conformance.database import (
    DTYPES,
    EXCEPTIONS,
    NOT_CAPTURED,
    database_entries,
    everything_captured,
    full_name,
)
from kagent_core.testing.conformance.families import FAMILIES, OTHER, family_of, listed_names
from kagent_core.testing.conformance.literals import UnspellableError, literal, wrapped
from kagent_core.testing.conformance.opened import registered
from kagent_core.testing.conformance.operators import CALLS, Trial, check_trial, operator_case, trials
from kagent_core.testing.conformance.overloads import FAMILY as CALLED_BY_ITSELF
from kagent_core.testing.conformance.overloads import overload_cases
from kagent_core.testing.conformance.running import SHARED, UNPLANNED, OnDevice, assert_right, widened
from kagent_core.testing.core_calls import core_calls

from .scripts import run_alone, run_here

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CPU, FAKE = Target("cpu"), Target("fake:0")
WRONG_RELU = 'import kagent_core\nkagent_core.kernel("aten::relu", lambda x: x.abs(), device="cpu", name="wrong")\n'


def entry_of(name: str) -> Any:
    return next(entry for entry in database_entries() if full_name(entry) == name)


def case_of(name: str) -> Case:
    return operator_case(entry_of(name))


def check(name: str, trial: Trial, target: Target = CPU) -> OnDevice:
    device = OnDevice(target)
    with device.watched():
        check_trial(entry_of(name), trial, device)
    return device


# -- families and cases


def test_every_operator_has_a_family() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    without = [full_name(entry) for entry in op_db if family_of(full_name(entry)) == OTHER]
    assert without == []
    assert family_of("an.operator.of.tomorrow") == OTHER


def test_families_name_each_operator_once_and_no_others() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    assert [name for name, count in Counter(listed_names()).items() if count > 1] == []
    assert set(listed_names()) - {entry.name for entry in op_db} == set()
    assert {family_of(name) for name in listed_names()} | {OTHER} == set(FAMILIES)


def test_there_is_a_case_for_each_entry_and_each_core_overload() -> None:
    cases = operators.cases(CPU)
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) == len(database_entries()) + len(core_calls())
    assert len(database_entries()) > len(database_entries(torch.float32))
    assert set(names) >= {"add", "div.floor_rounding", "bitwise_and", *EXCEPTIONS, *NOT_CAPTURED, "aten::mm"}
    assert {case.level for case in cases} == {2}
    assert {case.family for case in cases} <= {*FAMILIES, CALLED_BY_ITSELF} - {OTHER}
    assert [case.key for case in operators.cases(Target("cpu", full=True))] == [case.key for case in cases]


def test_a_missing_package_of_the_database_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_methods_invocations", None)
    monkeypatch.delattr("torch.testing._internal.common_methods_invocations", raising=False)
    case, *others = operators.cases(CPU)
    assert {other.family for other in others} == {CALLED_BY_ITSELF}
    with pytest.raises(CannotRunError, match=r"pip install 'kagent-torch\[conformance\]'"):
        case.run(CPU)


# -- on the CPU


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "bitwise_and",
        "T",
        "to",
        "nn.functional.relu",
        "softmax",
        "sum",
        "cumsum",
        "addmm",
        "linalg.inv",
        "nn.functional.conv2d",
        "nn.functional.max_pool2d",
        "nn.functional.layer_norm",
        "index_put",
        "cat",
        "arange",
        "nn.functional.dropout",
        "sort",
        "fft.rfft",
        "special.i1",
        "nn.functional.cross_entropy",
        "empty",  # whose values are anyone's
        "nonzero",  # whose size depends on data
        "allclose",  # not captured
        "resize_",
        "to_sparse",
        "broadcast_shapes",  # no tensors
    ],
)
def test_on_the_cpu_an_operator_is_native(name: str) -> None:
    assert case_of(name).run(CPU) == Ran()


def test_an_operator_that_eager_refuses_cannot_run() -> None:
    with pytest.raises(CannotRunError, match="jiterator"):
        case_of("jiterator_unary").run(CPU)


def test_the_full_size_tries_dtypes_samples_and_gradients() -> None:
    entry = entry_of("cumsum")
    tried = list(trials(entry, full=True))
    assert {trial.dtype for trial in tried} == set(DTYPES) - {torch.bool}
    assert {trial.position for trial in tried} >= {0, 1, 2}
    assert [trial for trial in tried if trial.gradients] == [Trial(torch.float32, gradients=True)]
    assert list(trials(entry, full=False)) == [Trial(torch.float32)]
    assert list(trials(entry_of("bitwise_and"), full=False)) == [Trial(torch.int64)]
    frac = entry_of("frac")
    told = f"{len(list(trials(frac, full=True)))} samples"
    assert operator_case(frac).run(Target("cpu", full=True)) == Ran((), told)


def test_operators_that_are_not_captured_have_no_gradients() -> None:
    assert not any(trial.gradients for trial in trials(entry_of("nn.functional.ctc_loss"), full=True))


# -- on a device of its own memory


def test_what_the_device_has_is_native(fake: FakeDevice) -> None:
    assert case_of("nn.functional.relu").run(FAKE) == Ran()
    assert fake.runtime.launches == ["fake__relu"] * CALLS


def test_what_it_has_not_falls_back_with_the_reason(fake: FakeDevice) -> None:
    assert case_of("sigmoid").run(FAKE).fallbacks == (("aten::sigmoid", "no kernel for aten::sigmoid on 'fake:0'"),)


@pytest.mark.parametrize("name", ["T", "nn.functional.layer_norm", "transpose_copy", "index_put", "empty", "sort"])
def test_right_through_the_fallback_device(name: str, fake: FakeDevice) -> None:
    case_of(name).run(FAKE)


def test_what_is_not_captured_falls_back_operator_by_operator(fake: FakeDevice) -> None:
    found = dict(case_of("cov").run(FAKE).fallbacks)
    assert found["aten::sum.dim_IntList" if "aten::sum.dim_IntList" in found else "aten::mean.dim"].startswith(
        "no kernel"
    )


def test_what_cannot_be_planned_falls_back_and_is_told_each_time(fake: FakeDevice) -> None:
    for _ in range(2):
        assert ("aten::_to_sparse", UNPLANNED) in case_of("to_sparse").run(FAKE).fallbacks
    assert case_of("to_sparse").run(CPU).fallbacks == ()


def test_a_second_run_tells_the_same_fallbacks(fake: FakeDevice) -> None:
    first = case_of("allclose").run(FAKE)
    assert first.fallbacks
    assert case_of("allclose").run(FAKE) == first


def test_arguments_that_share_memory_are_told(fake: FakeDevice) -> None:
    device = OnDevice(FAKE)
    with device.watched():
        x = torch.arange(8.0)
        device.one_by_one(lambda x: x[::2].add_(x[:4]))(x)
    assert device.fallbacks() == (("aten::add_.Tensor", SHARED),)
    assert device.operators > 0


def test_what_torch_fails_to_capture_goes_operator_by_operator(fake: FakeDevice) -> None:
    """Dynamo has an error of its own for a later sample, with any backend."""
    entry, device = entry_of("combinations"), OnDevice(FAKE)
    for trial in [trial for trial in trials(entry, full=True) if trial.dtype is torch.float32]:
        with device.watched(), everything_captured():
            check_trial(entry, trial, device)
    assert device.operators > 0
    assert device.graphs > 0


def test_an_error_of_kagents_own_is_none_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a backend of the tests")

    monkeypatch.setattr(running, "kagent", broken)
    with pytest.raises(Exception, match="a backend of the tests"):
        case_of("mm").run(CPU)


# -- planted faults


def test_a_wrong_value_is_told_with_its_place() -> None:
    def wrong(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = torch.mm(x, y)
        result[1, 2] += 1
        return result

    told = r"sample 0 of float32: result of call 0 \[0\]: 1 of 25 elements differ, the first at \[1, 2\]: "
    with override("aten::mm", wrong, device="cpu"), pytest.raises(MismatchError, match=told) as raised:
        case_of("mm").run(CPU)
    assert raised.value.element is not None
    assert raised.value.element.index == (1, 2)


def test_a_kernel_that_writes_its_input() -> None:
    def wrong(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = torch.mm(x, y)
        y[0, 3] = 7
        return result

    told = r"arguments after call 0 \[1\]: 1 of 50 elements differ, the first at \[0, 3\]: 7\.0, expected"
    with override("aten::mm", wrong, device="cpu"), pytest.raises(MismatchError, match=told):
        case_of("mm").run(CPU)


def test_a_kernel_that_is_wrong_on_replay() -> None:
    calls = []

    def wrong(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return torch.mm(x, y) * len(calls)

    with override("aten::mm", wrong, device="cpu"), pytest.raises(MismatchError, match=r"result of call 1 \[0\]"):
        case_of("mm").run(CPU)


def test_a_kernel_that_draws_other_random_numbers() -> None:
    def wrong(x: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
        result = torch.bernoulli(x)
        torch.rand(1)
        return result

    told = "after call 0 the random number generator is in another state than after eager's"
    with override("aten::bernoulli", wrong, device="cpu"), pytest.raises(MismatchError, match=told):
        case_of("bernoulli").run(CPU)


def test_a_kernel_that_raises_is_told_with_its_sample() -> None:
    def wrong(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise IndexError("a kernel of the tests")

    with override("aten::mm", wrong, device="cpu"), pytest.raises(IndexError, match="a kernel of the tests") as raised:
        case_of("mm").run(CPU)
    assert raised.value.__notes__ == ["with sample 0 of float32"]


def test_a_kernel_that_is_wrong_for_one_dtype() -> None:
    case, full = case_of("trunc"), Target("cpu", full=True)
    with override("aten::trunc", torch.abs, device="cpu", dtypes={"float64"}):
        assert case.run(CPU) == Ran()
        with pytest.raises(MismatchError, match=r"sample 0 of float64: result of call 0"):
            case.run(full)
        script = case.script(full)
    assert "sample 0 of float64" in script
    assert "dtype=torch.float64" in script


def test_a_wrong_gradient() -> None:
    def wrong(gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.ops.aten.avg_pool2d_backward(gradient, *args) * 2

    trial = Trial(torch.float32, gradients=True)
    check("nn.functional.avg_pool2d", trial)
    with override("aten::avg_pool2d_backward", wrong, device="cpu"):
        check("nn.functional.avg_pool2d", Trial(torch.float32))
        with pytest.raises(MismatchError, match=r"with gradients: result and gradients of call 0 \[1\]"):
            check("nn.functional.avg_pool2d", trial)


def test_a_kernel_that_leaves_its_result_as_it_was(fake: FakeDevice) -> None:
    def nothing(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        pass

    with override("aten::mul.Tensor", nothing, device="fake"), pytest.raises(MismatchError, match="elements differ"):
        case_of("mul").run(FAKE)


# -- right, though not the same


def test_a_result_as_exact_as_eagers_is_right() -> None:
    torch.manual_seed(0)
    x = torch.randn(50_000)
    want, exact = x.sum(), x.double().sum()
    got = x.view(-1, 10).sum(0).sum()  # in another order
    assert_right(got, want, "sum", lambda: exact)
    with pytest.raises(MismatchError, match=r"sum \[0\]: 1 of 1 elements differ.*an error of .* against float64"):
        assert_right(want + 0.1, want, "sum", lambda: exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_without_numbers_is_never_right(value: float) -> None:
    want = torch.randn(5)
    with pytest.raises(MismatchError, match="5 of 5 elements differ"):
        assert_right(torch.full((5,), value), want, "result", want.double)


def test_other_strides_are_never_right() -> None:
    want = torch.randn(3, 4)
    got = want.t().contiguous().t()
    with pytest.raises(MismatchError, match=r"strides \(1, 3\) are not eager's \(4, 1\)"):
        assert_right(got, want, "result", want.double, every_stride=False)


def test_what_cannot_be_widened_keeps_its_first_difference() -> None:
    def refused() -> torch.Tensor:
        raise RuntimeError("no such thing in float64")

    with pytest.raises(MismatchError, match=r"1 of 1 elements differ.*no such thing in float64"):
        assert_right(torch.tensor(1.0), torch.tensor(2.0), "result", refused)


def test_widened_keeps_integers_and_the_need_of_a_gradient() -> None:
    x, y, z = widened(
        [torch.ones(2).requires_grad_(), torch.ones(2, dtype=torch.int32), torch.ones(1).to(torch.cfloat)]
    )
    assert (x.dtype, x.requires_grad, y.dtype, z.dtype) == (torch.float64, True, torch.int32, torch.complex128)


# -- scripts


def test_a_script_fails_for_a_wrong_kernel_and_passes_for_a_right_one() -> None:
    script = case_of("nn.functional.relu").script(CPU)
    assert "torch.nn.functional.relu(first, *args, **kwargs)" in script
    assert "torch.testing" not in script  # nothing but torch and kagent: no operator database
    right, wrong = run_alone(script), run_alone(script, WRONG_RELU)
    assert right.returncode == 0, right.stderr
    assert wrong.returncode != 0
    assert "MismatchError: result [0]: 1 of 1 elements differ" in wrong.stderr


@pytest.mark.parametrize(
    "name",
    ["mm", "T", "nn.functional.dropout", "__getitem__", "empty", "allclose", "to_sparse", "bitwise_and", "addmm"],
)
def test_scripts_of_right_operators_pass(name: str) -> None:
    run_here(case_of(name).script(CPU))


def test_a_script_for_the_fake_device_registers_it() -> None:
    script = case_of("nn.functional.relu").script
    with kagent_core.use_plugin(FakeDevice()):
        written = script(FAKE)
    with pytest.raises(DeviceError):
        OnDevice(FAKE)
    run_here(written)["registration"].__exit__(None, None, None)


def test_a_script_with_gradients() -> None:
    from kagent_core.testing.conformance.reproduction import operator_script

    script = operator_script(entry_of("nn.functional.avg_pool2d"), torch.float32, 0, True, CPU, every_stride=True)
    run_here(script)
    with (
        override("aten::avg_pool2d_backward", lambda g, *args: torch.zeros_like(args[0]), device="cpu"),
        pytest.raises(MismatchError, match=r"result \[1\]"),
    ):
        run_here(script)


def test_large_arguments_are_made_by_the_database() -> None:
    script = case_of("nn.functional.linear_cross_entropy.chunked").script(CPU)
    assert "sample.input" in script
    run_here(script)


# -- literals


@pytest.mark.parametrize(
    "value",
    [
        (1, 2.5, "text", None, True, torch.float16, torch.channels_last, torch.strided, torch.device("cpu")),
        (1,),
        (),
        [],
        {"dim": [0, 1], "slice": slice(None, -1, 2)},
        (..., slice(1, None)),
        torch.Size([2, 3]),
        complex(1, -2),
    ],
)
def test_a_literal_makes_the_value_again(value: Any) -> None:
    made = eval(literal(value), {"torch": torch})
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.cfloat])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t[:, :1].expand(3, 4),
    ],
)
def test_a_tensors_literal_has_its_values_strides_and_offset(dtype: torch.dtype, view: Any) -> None:
    torch.manual_seed(0)
    tensor = view((torch.randn(3, 5) * 3).to(dtype))
    made = eval(wrapped(literal(tensor)), {"torch": torch})
    assert made.dtype is tensor.dtype
    assert made.stride() == tensor.stride()
    assert made.numel() == 0 or made.storage_offset() == tensor.storage_offset()
    assert torch.equal(made, tensor)


def test_a_literal_of_what_no_decimal_shows() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 1 / 3, 1e-45])
    made = eval(literal(tensor.requires_grad_()), {"torch": torch})
    assert made.requires_grad
    assert torch.equal(made.detach().view(torch.int32), tensor.detach().view(torch.int32))


@pytest.mark.parametrize(
    "value", [torch.zeros(10_000), torch.eye(3).to_sparse(), torch.randn(2, dtype=torch.cfloat).conj(), object(), len]
)
def test_what_has_no_literal(value: Any) -> None:
    with pytest.raises(UnspellableError):
        literal([value])


def test_wrapping_changes_no_text() -> None:
    source = f"given = ({', '.join(['1.5'] * 20)}, '{'many words ' * 20}')"
    assert wrapped(source) == source
    plain = f"given = ({', '.join(['1.5'] * 40)})"
    assert max(map(len, wrapped(plain).splitlines())) <= 118 < len(plain)
    assert eval(wrapped(plain).partition("= ")[2]) == (1.5,) * 40


# -- core ATen's overloads, called themselves


def overload_case(signature: str) -> Case:
    [case] = [case for case in overload_cases() if case.name == signature]
    return case


@pytest.mark.parametrize("signature", ["aten::mm", "aten::max_pool2d_with_indices", "aten::arange.start_step"])
def test_a_right_overload_passes_and_so_does_its_script(signature: str) -> None:
    case = overload_case(signature)
    assert case.run(CPU).fallbacks == ()
    run_here(case.script(CPU))


def test_an_overload_that_computes_something_else_fails_and_so_does_its_script() -> None:
    case = overload_case("aten::expm1")
    with override("aten::expm1", lambda x: x.exp(), device="cpu"):
        with pytest.raises(MismatchError, match="result of call 0"):
            case.run(CPU)
        with pytest.raises(MismatchError, match="aten::expm1"):
            run_here(case.script(CPU))


def test_an_overload_that_writes_its_argument_fails() -> None:
    case = overload_case("aten::expm1")
    kernel = override("aten::expm1", lambda x: x.add_(1).sub(1).expm1(), device="cpu")
    with kernel, pytest.raises(MismatchError, match="arguments after call 0"):
        case.run(CPU)


def test_an_overload_that_a_device_does_not_have_is_a_fallback() -> None:
    with registered("fake:0"):
        [(signature, reason)] = overload_case("aten::_cdist_forward").run(FAKE).fallbacks
    assert signature == "aten::_cdist_forward"
    assert "fake" in reason
