"""Models that are compared with themselves in float64, and the names of the kernels that ran."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import kagent_core
from kagent_core import hookimpl
from kagent_core.specs import TaskFinished


class KernelNames:
    """Names of the kernels that ran, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @hookimpl
    def kagent_task_finished(self, event: TaskFinished) -> None:
        self.names.append(event.task.kernel.name)


@torch.no_grad()
def ran(model: nn.Module, *inputs: Tensor, dynamic: bool = False, **options: Any) -> tuple[list[str], Tensor]:
    """Compare a model with eager PyTorch in float64; return the names of the kernels that ran, and what it gives.

    Of float32, some of PyTorch's algorithms (Winograd's) let NaN reach other places.
    """
    model, kernels = model.eval(), KernelNames()
    with kagent_core.use_plugin(kernels):
        run = torch.compile(
            model, backend="kagent", dynamic=dynamic, options={"device": "cpu", "profile": True, **options}
        )
        got = run(*inputs)
    exact = copy.deepcopy(model).double()(*(x.double() for x in inputs)).float()
    torch.testing.assert_close(got, exact, equal_nan=True, rtol=1e-4, atol=1e-5)
    return kernels.names, got


def check(model: nn.Module, *inputs: Tensor, **options: Any) -> list[str]:
    """Compare a model with eager PyTorch as `ran` does; return the names of the kernels that ran."""
    return ran(model, *inputs, **options)[0]


def spoiled(x: Tensor) -> Tensor:
    """Put NaN and infinity into the first and the last element."""
    x[(0,) * x.dim()], x[(-1,) * x.dim()] = float("nan"), float("inf")
    return x
