"""FakeDevice: a device without hardware, in the form that any plugin author would write.

Its memory is its own, not torch's; its kernels are Python callables over that memory. It is there only for who
registers it::

    with kagent_core.use_plugin(FakeDevice()):
        kagent_core.run_op("aten::relu", x, device="fake:0")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_core.config import Config
from kagent_core.device import CONTRACT_VERSION, ArgumentPacker, LaunchConfigDeriver, Runtime
from kagent_core.extract.launch_config import standard_launch_config
from kagent_core.extract.pack_prototype import PrototypePacker
from kagent_core.hooks import hookimpl
from kagent_core.registry import KernelRegistry
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig, OpCall
from kagent_core.testing.fake_runtime import (
    POISON,
    AccessError,
    FakeBuffer,
    FakeFaultError,
    FakeKernel,
    FakeRuntime,
    HazardError,
)

__all__ = [
    "POISON",
    "AccessError",
    "FakeBuffer",
    "FakeDeriver",
    "FakeDevice",
    "FakeFaultError",
    "FakeKernel",
    "FakeRuntime",
    "HazardError",
]

DEVICE_TYPE = "fake"


class FakeDeriver(LaunchConfigDeriver):
    """What operators suggest: tiles for products, a block per row for reductions, else a thread per element."""

    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig | None:
        """Return None for an empty problem."""
        return standard_launch_config(calls, info)


class FakeDevice:
    """The plugin. Give it to `kagent_core.use_plugin`.

    Parameters
    ----------
    count
        How many devices it has.
    kernels
        Kernels beside its own few, which they outrank.
    runtime
        The runtime of every one of its devices; a `FakeRuntime` by default.
    """

    def __init__(
        self, count: int = 1, kernels: Sequence[KernelDescriptor] = (), runtime: FakeRuntime | None = None
    ) -> None:
        self.runtime = runtime if runtime is not None else FakeRuntime()
        self._count = count
        self._kernels = tuple(kernels)

    @hookimpl
    def kagent_contract_version(self) -> int:
        """Written for this core."""
        return CONTRACT_VERSION

    @hookimpl
    def kagent_devices(self, config: Config) -> list[DeviceInfo]:
        """List the devices."""
        return [
            DeviceInfo(
                Device(DEVICE_TYPE, i), "Fake device", max_threads_per_block=1024, shared_nbytes=49152, emulated=True
            )
            for i in range(self._count)
        ]

    @hookimpl
    def kagent_kernel_registry(self, info: DeviceInfo, config: Config) -> KernelRegistry | None:
        """Give the fake kernels."""
        if info.device.type != DEVICE_TYPE:
            return None
        registry = KernelRegistry(DEVICE_TYPE)
        for signature, function in _KERNELS.items():
            registry.add(KernelDescriptor(signature, f"fake_{function.__name__}", function))
        for kernel in self._kernels:
            registry.add(kernel)
        return registry

    @hookimpl
    def kagent_argument_packer(self, info: DeviceInfo, config: Config) -> ArgumentPacker | None:
        """Give the packer for callable kernels and for kernels with a prototype."""
        return PrototypePacker() if info.device.type == DEVICE_TYPE else None

    @hookimpl
    def kagent_launch_config_deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver | None:
        """Give the deriver."""
        return FakeDeriver() if info.device.type == DEVICE_TYPE else None

    @hookimpl
    def kagent_runtime(self, info: DeviceInfo, config: Config) -> Runtime | None:
        """Give the runtime."""
        return self.runtime if info.device.type == DEVICE_TYPE else None


def _relu(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.clamp(x, min=0, out=out)


def _add(x: torch.Tensor, y: Any, out: torch.Tensor, *, alpha: Any = 1) -> None:
    torch.add(x, y, alpha=alpha, out=out)


def _mul(x: torch.Tensor, y: Any, out: torch.Tensor) -> None:
    torch.mul(x, y, out=out)


def _mm(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, y, out=out)


def _addmm(
    bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> None:
    torch.addmm(bias, x, y, beta=beta, alpha=alpha, out=out)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


_KERNELS: dict[str, Callable[..., None]] = {
    "aten::relu": _relu,
    "aten::add.Tensor": _add,
    "aten::mul.Tensor": _mul,
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::copy_": _copy,
}
