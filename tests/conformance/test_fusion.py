"""Level 3 of the conformance kit: chains and random programs, fused, unfused and in eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kagent_core.kernels import override
from kagent_core.testing import FakeDevice
from kagent_core.testing.compare import MismatchError, copy_arguments
from kagent_core.testing.conformance import fusion
from kagent_core.testing.conformance.case import Case, Target
from kagent_core.testing.conformance.chains import CHAINS, INPUTS, SPECIAL
from kagent_core.testing.conformance.fusion import FULL_DTYPES, FULL_PROGRAMS, PROGRAMS, program_case, trials
from kagent_core.testing.conformance.programs import STEPS, random_program, run_program

from .scripts import run_here

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CPU, FAKE = Target("cpu"), Target("fake:0")


def case_of(name: str) -> Case:
    return next(case for case in fusion.cases(CPU) if case.name == name)


# -- cases and inputs


def test_cases_are_chains_and_random_programs() -> None:
    quick, full = fusion.cases(CPU), fusion.cases(Target("cpu", full=True))
    names = [case.name for case in quick]
    assert len(names) == len(set(names)) == len(CHAINS) + PROGRAMS
    assert len(full) == len(CHAINS) + FULL_PROGRAMS
    assert {case.level for case in full} == {3}
    families = {case.family for case in quick}
    assert families == {
        *("pointwise", "reduction", "softmax", "normalization", "products", "views", "mutation", "random programs")
    }


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_a_chain_runs_in_eager_pytorch_in_every_dtype(chain: Any) -> None:
    for trial in trials(chain, full=True):
        chain.function(*chain.inputs(trial.kind, trial.dtype))
    assert {trial.dtype for trial in trials(chain, full=True)} == set(FULL_DTYPES)
    assert {trial.dtype for trial in trials(chain, full=False)} == {torch.float32}


def test_inputs_lie_and_are_as_said() -> None:
    chain = next(chain for chain in CHAINS if chain.name == "pointwise chain")
    plain, strided, special = (chain.inputs(kind) for kind in INPUTS)
    assert all(x.is_contiguous() and x.isfinite().all() for x in plain)
    assert all(not x.is_contiguous() and x.storage_offset() == 1 for x in strided)
    assert special[0].isnan().sum() == 1
    assert special[0].isinf().sum() == 2
    assert len(SPECIAL) == 4
    assert special[1].isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip(plain, chain.inputs("plain"), strict=True))
    assert not torch.equal(plain[0], chain.inputs("plain", seed=1)[0])


@pytest.mark.filterwarnings("ignore:var")
def test_a_seed_makes_one_program() -> None:
    arguments, program = random_program(7)
    again, same = random_program(7)
    assert program == same
    assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(arguments, again, strict=True))
    programs = [random_program(seed)[1] for seed in range(40)]
    assert len({str(program) for program in programs}) == 40
    used = {name for program in programs for name, *_ in program}
    assert len(used) > len(STEPS) * 2 / 3


def test_a_programs_steps_are_what_eager_takes() -> None:
    for seed in range(10):
        arguments, program = random_program(seed)
        assert len(run_program(program, copy_arguments(arguments))) == len(arguments) + len(program)


# -- on the CPU and on a device of its own memory


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pointwise chain", "6 kernels unfused, 1 fused"),
        ("extremes", None),
        ("reduction between", None),
        ("masked softmax", None),
        ("rms norm", None),
        ("product and residual", None),
        ("slices and cat", None),
        ("running mean", None),
        ("random program 3", None),
        ("random program 9", None),
    ],
)
def test_on_the_cpu(name: str, told: str | None) -> None:
    ran = case_of(name).run(CPU)
    assert ran.fallbacks == ()
    unfused, fused = (
        int(word) for word in ran.note.split() if word.isdigit() and not ran.note.startswith(word + " st")
    )
    assert fused < unfused, ran.note
    assert told in (None, ran.note)


def test_a_device_that_fuses_nothing(fake: FakeDevice) -> None:
    ran = case_of("product and residual").run(FAKE)
    unfused, _, _, fused, _ = ran.note.replace(",", "").split()
    assert unfused == fused
    assert ran.fallbacks == ()
    assert set(fake.runtime.launches) >= {"fake__mm", "fake__relu", "fake__add", "fake__mul"}


@pytest.mark.parametrize("name", ["masked softmax", "copied into", "random program 3"])
def test_through_the_fallback_device(name: str, fake: FakeDevice) -> None:
    assert case_of(name).run(FAKE).fallbacks


# -- planted faults


def test_a_kernel_that_loses_nan() -> None:
    told = r"special inputs of float32: unfused, result of call 0 \[0\]: .* elements differ, .*, expected nan"
    with override("aten::maximum", torch.fmax, device="cpu"), pytest.raises(MismatchError, match=told):
        case_of("extremes").run(CPU)


def test_a_kernel_that_ignores_strides() -> None:
    def wrong(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.exp(x.as_strided(x.shape, out.stride()), out=out)

    told = r"strided inputs of float32: unfused, result of call 0"
    with override("aten::exp", wrong, device="cpu"), pytest.raises(MismatchError, match=told):
        case_of("many readers").run(CPU)


def test_a_kernel_that_writes_its_input() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        result = x.relu()
        x.fill_(5)
        return result

    told = r"unfused, .*(arguments after|result of) call 0"
    with override("aten::relu", wrong, device="cpu"), pytest.raises(MismatchError, match=told):
        case_of("place of the largest").run(CPU)


def wrong_pair(x: torch.Tensor, y: torch.Tensor, one: Any) -> torch.Tensor:
    return x * y + one + 1


def test_only_a_fused_kernel_is_wrong() -> None:
    told = (
        r"plain inputs of float32: fused, result of call 0 \[0\]: 4 of 4 elements differ.*"
        r"; it is right with fusion_fuel=0, and wrong with fusion_fuel=1$"
    )
    wrong = override(["aten::mul.Tensor", "aten::add.Tensor"], wrong_pair, device="cpu")
    with wrong, pytest.raises(MismatchError, match=told):
        case_of("reduction with prologue").run(CPU)


def test_a_kernel_that_raises_is_told_with_the_kind() -> None:
    def wrong(*args: Any) -> torch.Tensor:
        raise IndexError("a kernel of the tests")

    pair = override(["aten::mul.Tensor", "aten::add.Tensor"], wrong, device="cpu")
    with pair, pytest.raises(IndexError, match="a kernel of the tests") as raised:
        case_of("reduction with prologue").run(CPU)
    assert raised.value.__notes__ == ["with fusion on"]


# -- scripts


def test_a_chains_script_passes_and_fails_as_the_chain_does() -> None:
    case = case_of("reduction with prologue")
    script = case.script(CPU)
    assert "def reduction_with_prologue(x, y):\n    return (x * y + 1).sum(-1)\n" in script
    run_here(script)
    with override(["aten::mul.Tensor", "aten::add.Tensor"], wrong_pair, device="cpu"):
        failing = case.script(CPU)
        with pytest.raises(MismatchError, match="result with fusion=True"):
            run_here(failing)


def test_a_chains_script_has_the_inputs_that_fail() -> None:
    with override("aten::maximum", torch.fmax, device="cpu"):
        script = case_of("extremes").script(CPU)
        assert 'float("nan")' in script
        with pytest.raises(MismatchError, match="expected nan"):
            run_here(script)
    run_here(script)


def test_a_programs_script_is_short() -> None:
    seed = next(seed for seed in range(100) if sum(step[0] == "sin" for step in random_program(seed)[1]) == 1)
    case, (_, program) = program_case(seed), random_program(seed)
    run_here(case.script(CPU))
    with override("aten::sin", lambda x: x.sin() + 1, device="cpu"):
        with pytest.raises(MismatchError):
            case.run(CPU)
        script = case.script(CPU)
        steps = script[script.index("program = [") : script.index("]")].count("(")
        assert steps < len(program)
        with pytest.raises(MismatchError, match="result with fusion=False"):
            run_here(script)
