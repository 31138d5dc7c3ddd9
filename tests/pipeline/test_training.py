"""Training through kagent takes the steps that training in eager PyTorch takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kagent_core.inspect.report import PlanReport
from kagent_core.testing.compare import assert_same

from .models import (
    BATCH,
    CASES,
    LABELS,
    VOCABULARY,
    Case,
    bert_classifier,
    compiled,
    gpt2,
    images,
    padded_text,
    recorded_plans,
)

pytestmark = pytest.mark.usefixtures("generated_twice")

STEPS = 5


@dataclass(frozen=True)
class Training:
    """A model in training mode, its batches and its optimizer."""

    case: Case
    optimizer: Callable[[Any], torch.optim.Optimizer]


def _labelled_images() -> dict[str, Any]:
    return {**images(), "labels": torch.randint(0, LABELS, (BATCH,))}


def _labelled_text() -> dict[str, Any]:
    return {**padded_text(), "labels": torch.randint(0, LABELS, (BATCH,))}


def _language() -> dict[str, Any]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, 12))
    return {"input_ids": tokens, "labels": tokens}


def _translation() -> dict[str, Any]:
    return {**padded_text(), "labels": torch.randint(0, VOCABULARY, (BATCH, 7))}


TRAININGS = {
    "bert, dropout, AdamW": Training(
        Case(bert_classifier, _labelled_text),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
    ),
    "gpt2, dropout, SGD with momentum": Training(
        Case(gpt2, _language), lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    ),
    "resnet, batch norm, SGD": Training(
        Case(CASES["resnet"].build, _labelled_images), lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    ),
    "t5, dropout, AdamW": Training(
        Case(CASES["t5"].build, _translation), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    ),
    "vit, SGD": Training(
        Case(CASES["vit"].build, _labelled_images), lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_five_steps_equal_eagers(name: str) -> None:
    torch._dynamo.reset()
    training = TRAININGS[name]
    eagers = train(training, lambda model: model)
    with recorded_plans() as plans:
        ours = train(training, compiled)
    assert_both_directions(plans)
    for step, (got, want) in enumerate(zip(ours.steps, eagers.steps, strict=True)):
        for what, value in want.items():
            assert_same(got[what], value, f"step {step}: {what}")
    assert ours.random_state.equal(eagers.random_state)  # dropout drew the same numbers
    losses = [step["loss"].item() for step in eagers.steps]
    assert len(set(losses)) == STEPS  # something was learned, or at least changed


def assert_both_directions(plans: list[PlanReport]) -> None:
    """One plan for the forward and one for the backward graph, all of it on the device."""
    assert [plan.program.rpartition("_")[2] for plan in plans] == ["forward", "backward"]
    assert all(plan.tasks > 10 for plan in plans)
    assert all(plan.fallbacks == () for plan in plans)


@dataclass
class Run:
    """What a training left: per step the loss, gradients, parameters and buffers, by name."""

    steps: list[dict[str, torch.Tensor]]
    random_state: torch.Tensor


def train(training: Training, compiler: Callable[[Any], Any]) -> Run:
    model = training.case.model().train()
    runs = compiler(model)
    optimizer = training.optimizer(model.parameters())
    steps: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS):
        batch = training.case.example(seed=10 + step)
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        loss = runs(**batch).loss
        loss.backward()
        optimizer.step()
        steps.append({"loss": loss.detach().clone(), **snapshot(model)})
    return Run(steps, torch.get_rng_state())


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def test_running_statistics_and_dropout_are_really_compared() -> None:
    resnet = train(TRAININGS["resnet, batch norm, SGD"], lambda model: model).steps
    moving = [name for name in resnet[0] if name.endswith(("running_mean", "running_var"))]
    assert len(moving) > 10
    assert all(not resnet[0][name].equal(resnet[1][name]) for name in moving)
    model = TRAININGS["gpt2, dropout, SGD with momentum"].case.model().train()
    assert any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
