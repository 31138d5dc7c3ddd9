"""On what device the check runs, and with how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

Function = Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """What every section is given.

    Attributes
    ----------
    device
        Name of the device in kagent.
    cache_dir
        Directory of compiled kernels.
    emulated
        Whether the device is emulated: then there is nothing that its times could be held against.
    tiny
        Whether everything is as small as it can be.
    torch_cuda
        Whether PyTorch computes on the device, and so can be measured next to kagent.
    cuda_tensors
        Whether kagent is given tensors that lie on the device; else they are in host memory.
    """

    device: str
    cache_dir: Path
    emulated: bool = False
    tiny: bool = False
    torch_cuda: bool = False
    cuda_tensors: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What ``torch.compile`` gives kagent."""
        emulate = {"emulate": ("cuda",)} if self.emulated else {}
        return {"device": self.device, "cache_dir": str(self.cache_dir), **emulate}

    @property
    def has_peers(self) -> bool:
        """Whether eager PyTorch and its compilers run on the device, so that they can be measured next to it."""
        return self.torch_cuda and not self.emulated

    @property
    def peer_place(self) -> torch.device:
        """Where tensors of peers are made."""
        return torch.device(self.device)

    @property
    def place(self) -> torch.device:
        """Where tensors are made that kagent is given."""
        return torch.device(self.device if self.cuda_tensors else "cpu")

    def compile(self, function: Function, **options: Any) -> Function:
        """Compile with kagent; Dynamo forgets what it compiled before."""
        return _compiled(function, backend="kagent", options=self.options | options)

    def compile_peer(self, function: Function, mode: str) -> Function:
        """Compile with PyTorch's own compiler, in a mode of `torch.compile`."""
        return _compiled(function, backend="inductor", mode=mode)

    def synchronize(self) -> None:
        """Wait for the GPU. What runs on host tensors has finished when it returns."""
        if self.torch_cuda:
            torch.cuda.synchronize(self.peer_place)

    def with_cache(self, cache_dir: Path) -> Setting:
        """Return the same with another directory of compiled kernels."""
        return replace(self, cache_dir=cache_dir)


def _compiled(function: Function, **arguments: Any) -> Function:
    torch._dynamo.reset()

    # a function of its own: Dynamo keeps what it compiled with a function's code
    def called(*args: Any) -> Any:
        return function(*args)

    compiled: Function = torch.compile(called, dynamic=False, **arguments)
    return compiled
