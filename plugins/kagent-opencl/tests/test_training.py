"""Forward, backward and the optimizer's step run on an OpenCL device alone, and train as eager PyTorch does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kagent_core.testing.conformance.case import Target
from kagent_core.testing.conformance.models import TIMES, training
from kagent_core.testing.conformance.running import OnDevice, assert_right

from .architectures import NAMES, Optimizer, adamw, architecture, sgd

OFTEN = ("bert",)  # the others train in `make nightly`
OPTIMIZERS = {"resnet": sgd, "mobilenet_v2": sgd, "vit": adamw, "bert": adamw, "gpt2": sgd, "llama": adamw, "t5": adamw}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(n, marks=pytest.mark.nightly) for n in NAMES if n not in OFTEN)]
)
def test_training_with_a_compiled_optimizer(device: str, name: str) -> None:
    made = OPTIMIZERS[name]
    wanted = training(architecture(name, made, trained=True), lambda model: model)
    on = OnDevice(Target(device))
    with on.watched():
        got = training(
            architecture(name, with_compiled_step(on, made), trained=True),
            functools.partial(on.compiled, fullgraph=True),
        )
    assert on.fallbacks() == ()
    graphs = {report.program.rpartition("_")[2] for report in on.session.reports}
    assert graphs == {"forward", "backward", "inference"}, "the last one is the optimizer's step"
    exact = functools.cache(lambda: training(architecture(name, made, trained=True), lambda model: model, wide=True))
    for step, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        for what, value in theirs.items():
            best = functools.partial(lambda step, what: exact()[step][what], step, what)
            assert_right(mine[what], value, f"step {step}: {what}", best, on.host_memory, TIMES)


def with_compiled_step(on: OnDevice, made: Optimizer) -> Optimizer:
    """Return what makes the same optimizers, whose step runs on the device."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = made(parameters)
        step: Callable[[], Any] = on.compiled(optimizer.step)
        optimizer.step = step  # type: ignore[method-assign,assignment]
        return optimizer

    return make
