"""Generated kernels compile for every architecture, without a warning; and what they take is what was estimated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.bench.models.zoo import BY_NAME
from kagent_core.testing.core_calls import core_calls

from .collected import DEVICE_TYPE, Collected, collector, compile_all, plan

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

MODELS = ("resnet18", "vit", "bert", "gpt2", "llama")
"""Models of the benchmark; ``slow`` are all of them."""

MOST_OVER_ESTIMATE = 2.5
"""Registers of a kernel, as a multiple of what the FusionChecker estimates: the compiler keeps more in registers than
there must be, such as what later steps of a loop read."""


def inferred(name: str, dtype: torch.dtype = torch.float32) -> None:
    """Plan a model of the benchmark."""
    model, args = BY_NAME[name].build()
    with torch.no_grad():
        plan(model.to(dtype), *(arg.to(dtype) if arg.is_floating_point() else arg for arg in args))


def trained(name: str) -> None:
    """Plan a step of training a model of the benchmark."""
    model, args = BY_NAME[name].build()
    total(plan(model.train(), *args)).backward()


def total(result: Any) -> torch.Tensor:
    """Return the sum of all that a model returns."""
    if isinstance(result, torch.Tensor):
        return result.sum()
    parts = [total(part) for part in (result.to_tuple() if hasattr(result, "to_tuple") else result)]
    return torch.stack(parts).sum()


def single_operators() -> None:
    """Plan calls of core ATen's overloads, one by one."""
    with torch.no_grad():
        for signature, args in core_calls().items():
            kagent_core.run_op(signature, *args, device=DEVICE_TYPE)


def collected(*programs: Callable[[], None]) -> list[Collected]:
    """Return the kernels of some programs, which must all run on the device."""
    with collector() as found:
        for program in programs:
            program()
            torch._dynamo.reset()
    assert found.elsewhere == set()
    return list(found.found.values())


def check(kernels: Sequence[Collected], cache_dir: Path) -> None:
    """Compile kernels for all architectures, and hold what they take against the estimates."""
    made, refused = compile_all(kernels, ARCHITECTURES, cache_dir)
    assert refused == []
    assert len(made) == len(kernels) * len(ARCHITECTURES)
    over = []
    for each, compiled in made:
        usage, needed = compiled.usage[compiled.symbol], each.estimate
        if usage.shared_nbytes > needed.shared_nbytes or usage.registers > MOST_OVER_ESTIMATE * needed.registers:
            over.append((each.kernel.name, compiled.architecture, usage, needed))
    assert over == []
    worst = max(made, key=lambda pair: pair[1].usage[pair[1].symbol].registers / pair[0].estimate.registers)
    usage = worst[1].usage[worst[1].symbol]
    print(
        f"{len(kernels)} kernels; most over its estimate of {worst[0].estimate.registers} registers: "
        f"{worst[0].kernel.name} with {usage.registers} on {worst[1].architecture}"
    )


def test_single_operators(cache_dir: Path) -> None:
    kernels = collected(single_operators)
    assert len(kernels) >= 150
    check(kernels, cache_dir)


def test_models(cache_dir: Path) -> None:
    kernels = collected(*(lambda name=name: inferred(name) for name in MODELS))  # type: ignore[misc]
    assert len(kernels) >= 50
    check(kernels, cache_dir)


def test_models_in_bfloat16(cache_dir: Path) -> None:
    kernels = collected(lambda: inferred("bert", torch.bfloat16))
    assert any("store_bf16x4(" in (each.kernel.source or "") for each in kernels)
    check(kernels, cache_dir)


@pytest.mark.parametrize("name", ["bert", pytest.param("resnet18", marks=pytest.mark.nightly)])
def test_training(name: str, cache_dir: Path) -> None:
    kernels = collected(lambda: trained(name))
    assert len(kernels) >= 30
    check(kernels, cache_dir)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - {"lstm"}))  # of which Dynamo captures no graph
def test_all_models_of_the_benchmark(name: str, cache_dir: Path) -> None:
    check(collected(lambda: inferred(name), lambda: inferred(name, torch.bfloat16)), cache_dir)
