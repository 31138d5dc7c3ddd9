"""Level 4: whole models, in inference and in training, give what eager PyTorch gives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kagent_core.errors import KagentError
from kagent_core.testing.conformance.architectures import ARCHITECTURES, Architecture
from kagent_core.testing.conformance.case import CannotRunError, Case, Ran, Target
from kagent_core.testing.conformance.placements import noted
from kagent_core.testing.conformance.reproduction import script_head
from kagent_core.testing.conformance.running import OnDevice, assert_right, widened

LEVEL = 4
STEPS = 3
"""Of a training."""
TIMES = 3
"""An error against float64 may be this many times eager's own: whole models add in many other orders."""

REAL_WEIGHTS = "all-MiniLM-L6-v2"
_SENTENCES = (
    "A kernel runs on a device.",
    "The scheduler gives every operator a device, and says why.",
    "How is the weather today?",
)

Compiler = Callable[[nn.Module], Callable[..., Any]]
Record = dict[str, Any]
"""Tensors by what they are."""


def cases(target: Target) -> list[Case]:
    """Return cases of inference and of training for each architecture, and with `full` of a model with real weights."""
    found = [make(name) for name in ARCHITECTURES for make in (inference_case, training_case)]
    if target.full:
        script = functools.partial(_script, "inference", REAL_WEIGHTS)
        found.append(Case(LEVEL, f"{REAL_WEIGHTS} inference", "inference", _check_real_weights, script))
    return found


def inference_case(name: str) -> Case:
    """Return the case of one architecture's inference."""
    run, script = functools.partial(_check, inference, name), functools.partial(_script, "inference", name)
    return Case(LEVEL, f"{name} inference", "inference", run, script)


def training_case(name: str) -> Case:
    """Return the case of one architecture's training."""
    run, script = functools.partial(_check, training, name), functools.partial(_script, "training", name)
    return Case(LEVEL, f"{name} training", "training", run, script)


# -- what runs


def inference(architecture: Architecture, compiler: Compiler, wide: bool = False) -> list[Record]:
    """Call a model with new inputs each time, and with other parameters; return what it gave.

    Parameters
    ----------
    architecture
        The model.
    compiler
        Makes of a model what is called; eager PyTorch's leaves it as it is.
    wide
        Whether weights and inputs are float64.
    """
    model = _model(architecture, wide)
    run, found = compiler(model), []
    with torch.no_grad():
        for seed in range(1, 4):
            if seed == 3:  # a plan may have folded or prepacked the old ones
                for position, parameter in enumerate(model.parameters()):
                    parameter.mul_(1.1) if position % 2 else parameter.copy_(parameter.flip(0))
            found.append({"result": run(*_example(architecture, seed, wide))})
    return found


def training(architecture: Architecture, compiler: Compiler, wide: bool = False) -> list[Record]:
    """Train a model for some steps; return per step the loss, the gradients, the parameters and the buffers."""
    model = _model(architecture, wide).train()
    run, optimizer, found = compiler(model), architecture.optimizer(model.parameters()), []
    for step in range(STEPS):
        inputs = _example(architecture, 10 + step, wide)
        optimizer.zero_grad()
        loss = _loss(run(*inputs), step)
        loss.backward()
        optimizer.step()
        found.append({"loss": loss.detach().clone(), **_snapshot(model)})
    return found


def _model(architecture: Architecture, wide: bool) -> nn.Module:
    model = architecture.model()
    return model.double() if wide else model


def _example(architecture: Architecture, seed: int, wide: bool) -> tuple[Tensor, ...]:
    inputs = architecture.example(seed)
    return tuple(widened(inputs)) if wide else inputs


def _loss(scores: Tensor, step: int) -> Tensor:
    """The cross entropy of scores, whose last dimension are classes, for random labels."""
    flat = scores.flatten(0, -2)
    labels = torch.randint(0, flat.shape[1], flat.shape[:1], generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(flat, labels)


def _snapshot(model: nn.Module) -> Record:
    found: Record = {}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"parameter {name}"] = parameter.detach().clone()
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


# -- comparing


def check_model(run: Callable[..., list[Record]], architecture: Architecture, target: Target) -> Ran:
    """Compare an inference or a training on a device with the same in eager PyTorch.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    want = run(architecture, lambda model: model)
    with noted("kagent-conformance-model") as placements:
        device = OnDevice(target)
        with device.watched():
            got = run(architecture, functools.partial(device.compiled, fullgraph=True))
        fallbacks = device.fallbacks()
    exact = functools.cache(lambda: run(architecture, lambda model: model, wide=True))
    for position, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for what, value in theirs.items():
            best = functools.partial(lambda position, what: exact()[position][what], position, what)
            assert_right(mine[what], value, f"call {position}: {what}", best, device.host_memory, TIMES)
    native = placements.native.total()
    return Ran(fallbacks, f"{native} of {native + placements.elsewhere.total()} operators native")


def _check(run: Callable[..., list[Record]], name: str, target: Target) -> Ran:
    return check_model(run, ARCHITECTURES[name], target)


def _script(kind: str, name: str, target: Target) -> str:
    """Return a script for an architecture; for the model with real weights where `name` is none of theirs."""
    known, every_stride = name in ARCHITECTURES, OnDevice(target).host_memory
    imports = {
        "kagent_core.testing.compare": ["assert_same"],
        "kagent_core.testing.conformance.models": [kind] if known else [kind, "real_weights"],
    }
    if known:
        imports["kagent_core.testing.conformance.architectures"] = ["ARCHITECTURES"]
    lines = [
        "",
        "",
        "def through_kagent(model):",
        '    return torch.compile(model, backend="kagent", options={"device": DEVICE}, fullgraph=True)',
        "",
        "",
        f'architecture = ARCHITECTURES["{name}"]' if known else "architecture = real_weights()",
        f"want = {kind}(architecture, lambda model: model)",
        f"got = {kind}(architecture, through_kagent)",
        "for call, (mine, theirs) in enumerate(zip(got, want, strict=True)):",
        "    for what, value in theirs.items():",
        f'        assert_same(mine[what], value, f"call {{call}}: {{what}}", every_stride={every_stride})',
        "",
    ]
    return "\n".join([script_head(f"{name}, {kind}", target, imports), *lines])


# -- a model with real weights


def real_weights() -> Architecture:
    """Return all-MiniLM-L6-v2 and sentences for it.

    Raises
    ------
    CannotRunError
        When transformers, or the package with the weights, is not installed.
    """
    from kagent_core.demo.encoder import load_encoder

    try:
        model, tokenizer = load_encoder()
    except KagentError as error:
        told = "transformers or the package with the weights is not installed"
        raise CannotRunError(f"{told}\n  hint: {error.hint}") from None
    batch = tokenizer(list(_SENTENCES), padding=True, return_tensors="pt")

    def inputs() -> tuple[Tensor, ...]:
        order = torch.randperm(len(_SENTENCES))
        return batch["input_ids"][order], batch["attention_mask"][order]

    return Architecture(lambda: copy.deepcopy(model), inputs, has_weights=True)


def _check_real_weights(target: Target) -> Ran:
    return check_model(inference, real_weights(), target)
