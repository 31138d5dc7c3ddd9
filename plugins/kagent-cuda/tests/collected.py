"""Every kernel that programs would have on a GPU, without one: programs are planned and launched, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import kagent_core
from kagent_core import hookimpl
from kagent_core.config import Config
from kagent_core.device import ArgumentPacker, LaunchConfigDeriver, Runtime
from kagent_core.device_plugin import DevicePlugin
from kagent_core.errors import CompilationError
from kagent_core.extract.fusion.resources import Estimate, estimate
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig
from kagent_cuda.compiler import CompiledSource, NvrtcCompiler
from kagent_cuda.deriver import CudaDeriver
from kagent_cuda.devices import emulated_device
from kagent_cuda.language import CudaLanguage
from kagent_cuda.packer import CudaPacker

DEVICE_TYPE = "planned"
UNITS = 132
"""Multiprocessors of the device that is planned for."""


@dataclass(frozen=True)
class Collected:
    """A kernel.

    Attributes
    ----------
    kernel
        With its source.
    estimate
        What the FusionChecker would say that it needs.
    """

    kernel: KernelDescriptor
    estimate: Estimate


class _Nothing(Runtime):
    """Memory that is zero, and kernels that do nothing."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(max(nbytes, 1), dtype=torch.uint8)

    def free(self, buffer: torch.Tensor) -> None:
        pass

    def copy_in(self, buffer: torch.Tensor, byte_offset: int, data: memoryview) -> None:
        pass

    def copy_out(self, buffer: torch.Tensor, byte_offset: int, data: memoryview) -> None:
        data.cast("B")[:] = bytes(data.nbytes)

    def load(self, kernel: KernelDescriptor) -> KernelDescriptor:
        return kernel

    def launch(self, kernel: KernelDescriptor, config: LaunchConfig, args: Sequence[Any]) -> None:
        pass

    def synchronize(self) -> None:
        pass


@dataclass
class Collector(DevicePlugin):
    """A device with the limits of a GPU, for which kernels are made.

    Attributes
    ----------
    found
        Kernels by their names, which are the same for the same text.
    elsewhere
        Operators that have no kernel there.
    """

    device_type = DEVICE_TYPE
    contract_version = 1
    language = "kagent_cuda.language:CudaLanguage"
    found: dict[str, Collected] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    @staticmethod
    def runtime(info: DeviceInfo, config: Config) -> Runtime:
        """Return what runs nothing."""
        return _Nothing()

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        """List the one device."""
        info = emulated_device(0)
        return [replace(info, device=Device(DEVICE_TYPE, 0), reason=None, emulated=False, compute_units=UNITS)]

    def packer(self, info: DeviceInfo, config: Config) -> ArgumentPacker:
        """Return the GPUs' packer."""
        return CudaPacker()

    def deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver:
        """Return the GPUs' deriver."""
        return CudaDeriver()

    @hookimpl(wrapper=True)
    def kagent_lookup_kernels(self, ctx: Any) -> Iterator[None]:
        """Note the kernels of a plan."""
        kernels = yield
        for group, calls, kernel in zip(ctx.fusion.groups, ctx.group_calls(), kernels, strict=True):
            if kernel.source is not None and kernel.name not in self.found:
                needed = estimate(calls, group.inner, ctx.opened.info)
                self.found[kernel.name] = Collected(kernel, needed)
        return kernels

    @hookimpl(wrapper=True)
    def kagent_place(self, request: Any) -> Iterator[None]:
        """Note what is placed elsewhere."""
        placements = yield
        for call, placement in zip(request.program.calls, placements, strict=True):
            if placement.device.type != DEVICE_TYPE:
                self.elsewhere.add(call.signature)
        return placements


@contextmanager
def collector() -> Iterator[Collector]:
    """Collect the kernels of what is compiled for the device inside the block."""
    plugin = Collector()
    with kagent_core.use_plugin(plugin, DEVICE_TYPE):
        yield plugin


def plan(function: Callable[..., Any], *args: Any) -> Any:
    """Compile a function or model for the device and call it once. What it returns means nothing."""
    compiled = torch.compile(function, backend="kagent", options={"device": DEVICE_TYPE}, fullgraph=True)
    return compiled(*args)


@dataclass(frozen=True)
class Refused:
    """A kernel that a compiler refuses, and why."""

    kernel: str
    architecture: str
    message: str


AT_ONCE = 24
"""Kernels that are compiled as one source, so that what all begin with is read once."""


def compile_all(
    kernels: Sequence[Collected], architectures: Sequence[str], cache_dir: Path, workers: int = 2
) -> tuple[list[tuple[Collected, CompiledSource]], list[Refused]]:
    """Compile kernels for some architectures, a few at a time: NVRTC holds no lock of Python's.

    Returns what was compiled, each kernel once for each architecture, and what was refused.
    """
    preamble = CudaLanguage().preamble()
    assert all((each.kernel.source or "").startswith(preamble) for each in kernels)
    batches = [kernels[first : first + AT_ONCE] for first in range(0, len(kernels), AT_ONCE)]

    def one(task: tuple[Sequence[Collected], str]) -> list[tuple[Collected, CompiledSource] | Refused]:
        batch, architecture = task
        compiler = NvrtcCompiler(architecture, cache_dir)
        bodies = [(each.kernel.source or "").removeprefix(preamble) for each in batch]
        try:
            compiled = compiler.compile(preamble + "\n".join(bodies), batch[0].kernel.name)
        except CompilationError as error:
            if len(batch) == 1:
                return [Refused(batch[0].kernel.name, architecture, error.message)]
            return [made for each in batch for made in one(([each], architecture))]
        return [(each, replace(compiled, symbol=each.kernel.name)) for each in batch]

    with ThreadPoolExecutor(workers) as pool:
        tasks = [(batch, name) for batch in batches for name in architectures]
        made = [each for some in pool.map(one, tasks) for each in some]
    refused = [each for each in made if isinstance(each, Refused)]
    return [each for each in made if not isinstance(each, Refused)], refused
