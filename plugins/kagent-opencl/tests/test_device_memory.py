"""OpenCL with buffers of the device's own, as GPUs have them, also where the device is a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kagent_core
from kagent_core.config import load_config
from kagent_core.errors import ExecutionError
from kagent_core.session import Session, session_for
from kagent_opencl.runtime import OpenClRuntime


class Counts:
    """Counts the bytes that runtimes copy."""

    def __init__(self) -> None:
        self.into = 0
        self.out = 0

    def copy_in(self, copy: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Runtime.copy_in`."""

        def counted(runtime: Any, buffer: Any, byte_offset: int, data: memoryview) -> None:
            self.into += data.nbytes
            copy(runtime, buffer, byte_offset, data)

        return counted

    def copy_out(self, copy: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Runtime.copy_out`."""

        def counted(runtime: Any, buffer: Any, byte_offset: int, data: memoryview) -> None:
            self.out += data.nbytes
            copy(runtime, buffer, byte_offset, data)

        return counted


class Nothing:
    """A plugin that makes a session of its own."""

    @kagent_core.hookimpl
    def kagent_task_finished(self, event: Any) -> None:
        """Do nothing."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Runtimes that do not use host memory in place, and what they copy."""
    counts, initialize = Counts(), OpenClRuntime.__init__

    def without_import(runtime: Any, *args: Any, **keywords: Any) -> None:
        initialize(runtime, *args, **keywords)
        runtime.imports_host = False

    monkeypatch.setattr(OpenClRuntime, "__init__", without_import)
    monkeypatch.setattr(OpenClRuntime, "copy_in", counts.copy_in(OpenClRuntime.copy_in))
    monkeypatch.setattr(OpenClRuntime, "copy_out", counts.copy_out(OpenClRuntime.copy_out))
    torch._dynamo.reset()
    with kagent_core.use_plugin(Nothing()):
        yield counts
    torch._dynamo.reset()


def options_of(device: str, **options: Any) -> dict[str, Any]:
    """Return the options of a session."""
    return {"device": device, "fold_constants": False, **options}


def session_of(options: dict[str, Any]) -> Session:
    """Return the session of some options."""
    return session_for(load_config(options))


def model_of(width: int = 64) -> nn.Sequential:
    """Return a small model with a buffer beside its parameters."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 8)).eval()
    made[1].running_mean.normal_()
    return made


def nbytes_of(model: nn.Module) -> int:
    """Return the bytes of what a model computes with."""
    return sum(t.nbytes for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked"))


def check(counts: Counts, compiled: Any, model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Compare with eager PyTorch, and return the bytes copied in and out."""
    into, out = counts.into, counts.out
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    return counts.into - into, counts.out - out


@pytest.mark.parametrize("watch", ["checked", "version"])
def test_parameters_are_copied_once_and_when_they_change(device: str, counts: Counts, watch: str) -> None:
    options, model = options_of(device, parameters=watch), model_of()
    compiled = torch.compile(model, backend="kagent", options=options, dynamic=False)
    x = torch.randn(4, 16)
    into, out = check(counts, compiled, model, x)
    assert (into, out) == (x.nbytes + nbytes_of(model), 4 * 8 * 4)
    for _ in range(3):
        assert check(counts, compiled, model, torch.randn(4, 16)) == (x.nbytes, 4 * 8 * 4)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    assert check(counts, compiled, model, x)[0] == x.nbytes + model[0].weight.nbytes
    model[3].weight.data = torch.randn_like(model[3].weight)
    assert check(counts, compiled, model, x)[0] == x.nbytes + model[3].weight.nbytes
    model[1].running_var.mul_(2.0)
    assert check(counts, compiled, model, x)[0] == x.nbytes + model[1].running_var.nbytes
    assert session_of(options).reports[-1].fallbacks == ()


def test_what_moves_no_version_counter_is_seen(device: str, counts: Counts) -> None:
    model, x = model_of(), torch.randn(4, 16)
    compiled = torch.compile(model, backend="kagent", options=options_of(device), dynamic=False)
    check(counts, compiled, model, x)
    model[0].weight.data.add_(0.5)
    check(counts, compiled, model, x)
    model[3].bias.detach().numpy()[2] += 1.0
    assert check(counts, compiled, model, x)[0] == x.nbytes + model[3].bias.nbytes


@pytest.mark.parametrize("watch", ["checked", "version", "copied"])
def test_training(device: str, counts: Counts, watch: str) -> None:
    model, twin = model_of().train(), model_of().train()
    compiled = torch.compile(model, backend="kagent", options=options_of(device, parameters=watch), dynamic=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin)]
    for _ in range(4):
        x = torch.randn(8, 16)
        for module, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
            mine.grad.copy_(theirs.grad)  # Adam divides by its size: what rounding leaves would grow
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_limit_makes_plans_take_turns(device: str, counts: Counts) -> None:
    options = options_of(device, device_memory_limit="400 KiB")
    models = [model_of(width=1024) for _ in range(4)]  # about 112 KiB of parameters each
    compiled = [torch.compile(model, backend="kagent", options=options, dynamic=False) for model in models]
    x = torch.randn(4, 16)
    for _ in range(3):
        for one, model in zip(compiled, models, strict=True):
            check(counts, one, model, x)
    session = session_of(options)
    use = session.memory_use()[session.target.device]
    assert use.in_use_nbytes + use.cached_nbytes <= 400 * 1024
    assert use.limit_nbytes == 400 * 1024
    with pytest.raises(ExecutionError, match=r"gave no \d+ bytes for the .* the limit is 400.0 KiB"), torch.no_grad():
        compiled[0](torch.randn(4000, 16))
    check(counts, compiled[0], models[0], x)
