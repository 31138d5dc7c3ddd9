"""FakeDevice: a device without hardware, in the form that any plugin author would write.

Its memory is its own, not torch's; its kernels are Python callables over that memory. It is there only for who
registers it::

    with kagent_core.use_plugin(FakeDevice()):
        kagent_core.run_op("aten::relu", x, device="fake:0")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kagent_core.capture.schemas import torch_dtype
from kagent_core.config import Config
from kagent_core.device import CONTRACT_VERSION, ArgumentPacker, LaunchConfigDeriver, PointerArg, Runtime
from kagent_core.extract.packing import CallPacker
from kagent_core.hooks import hookimpl
from kagent_core.registry import KernelRegistry
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig, OpCall

DEVICE_TYPE = "fake"
POISON = 0xA5
"""Every byte of memory that was never written, or was freed, reads as this."""


@dataclass
class FakeBuffer:
    """Memory of the fake device."""

    data: bytearray
    freed: bool = False


@dataclass
class FakeRuntime(Runtime):
    """Runs Python kernels on memory of its own, and counts what it does.

    Attributes
    ----------
    live
        Buffers that are allocated and not freed.
    launches
        Names of the kernels launched so far.
    copied_in, copied_out
        Bytes moved so far.
    """

    live: int = 0
    launches: list[str] = field(default_factory=list)
    copied_in: int = 0
    copied_out: int = 0

    def allocate(self, nbytes: int) -> FakeBuffer:
        """Return poisoned memory."""
        self.live += 1
        return FakeBuffer(bytearray([POISON]) * max(nbytes, 1))

    def free(self, buffer: FakeBuffer) -> None:
        """Poison the memory and refuse it from here on."""
        if buffer.freed:
            raise RuntimeError("a buffer of the fake device was freed twice")
        buffer.freed = True
        buffer.data[:] = bytes([POISON]) * len(buffer.data)
        self.live -= 1

    def copy_in(self, buffer: FakeBuffer, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes into a buffer."""
        self._check(buffer, byte_offset, data.nbytes)
        buffer.data[byte_offset : byte_offset + data.nbytes] = data.cast("B")
        self.copied_in += data.nbytes

    def copy_out(self, buffer: FakeBuffer, byte_offset: int, data: memoryview) -> None:
        """Copy a buffer's bytes to the host."""
        self._check(buffer, byte_offset, data.nbytes)
        data.cast("B")[:] = buffer.data[byte_offset : byte_offset + data.nbytes]
        self.copied_out += data.nbytes

    def load(self, kernel: KernelDescriptor) -> KernelDescriptor:
        """Return the kernel as it is."""
        return kernel

    def launch(self, kernel: KernelDescriptor, config: LaunchConfig, args: Sequence[Any]) -> None:
        """Call the kernel with tensors on the fake memory."""
        assert kernel.function is not None
        self.launches.append(kernel.name)
        kernel.function(*(self._argument(arg) for arg in args))

    def synchronize(self) -> None:
        """Nothing to do: a launch has finished when it returns."""

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, tuple):
            return [self._argument(item) for item in arg]
        if not isinstance(arg, PointerArg):
            return arg
        spec = arg.spec
        nbytes = spec.span * spec.dtype.itemsize
        self._check(arg.buffer, arg.byte_offset, nbytes)
        if nbytes == 0:
            return torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype))
        flat = torch.frombuffer(arg.buffer.data, dtype=torch_dtype(spec.dtype), count=spec.span, offset=arg.byte_offset)
        return flat.as_strided(spec.shape, spec.strides)

    @staticmethod
    def _check(buffer: FakeBuffer, byte_offset: int, nbytes: int) -> None:
        if buffer.freed:
            raise RuntimeError("memory of the fake device was used after it was freed")
        if byte_offset < 0 or byte_offset + nbytes > len(buffer.data):
            raise RuntimeError(
                f"bytes {byte_offset} to {byte_offset + nbytes} of a fake buffer of {len(buffer.data)} bytes were touched"
            )


class FakeDeriver(LaunchConfigDeriver):
    """One thread per element of the first result, in blocks of up to 256."""

    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig | None:
        """Return None for an empty problem."""
        elements = max((spec.numel for spec in calls[-1].outputs), default=1)
        if elements == 0:
            return None
        block = min(256, elements)
        return LaunchConfig(grid=(-(-elements // block), 1, 1), block=(block, 1, 1))


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
            DeviceInfo(Device(DEVICE_TYPE, i), "Fake device", max_threads_per_block=1024, shared_nbytes=49152, emulated=True)
            for i in range(self._count)
        ]

    @hookimpl
    def kagent_kernel_registry(self, info: DeviceInfo, config: Config) -> KernelRegistry | None:
        """Give the fake kernels."""
        if info.device.type != DEVICE_TYPE:
            return None
        registry = KernelRegistry(DEVICE_TYPE)
        for signature, function in _KERNELS.items():
            registry.add(KernelDescriptor(signature, f"fake_{function.__name__}", function, origin=__name__))
        for kernel in self._kernels:
            registry.add(kernel)
        return registry

    @hookimpl
    def kagent_argument_packer(self, info: DeviceInfo, config: Config) -> ArgumentPacker | None:
        """Give the packer for callable kernels."""
        return CallPacker() if info.device.type == DEVICE_TYPE else None

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


def _add(x: torch.Tensor, y: Any, out: torch.Tensor) -> None:
    torch.add(x, y, out=out)


def _mul(x: torch.Tensor, y: Any, out: torch.Tensor) -> None:
    torch.mul(x, y, out=out)


def _mm(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, y, out=out)


def _addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    torch.addmm(bias, x, y, out=out)


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
