"""torch's own CUDA: whose tensors lie in a device's memory, and on which stream torch works there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kagent_core.specs import TensorSpec

LEGACY_STREAM = 1
"""The driver's handle of the default stream that waits for others. torch says 0, which means what a library was built
for."""


@dataclass(frozen=True)
class TorchCuda:
    """One device, as torch knows it.

    Attributes
    ----------
    device
        Its name.
    alone
        Whether torch has no other one.
    """

    device: str
    alone: bool = True

    def tensor_at(self, address: int, spec: TensorSpec) -> Any:
        """Return a tensor on memory of the device, which the caller keeps alive."""
        from kagent_cuda.library import tensor_at

        return tensor_at(address, spec, self.device)

    def run_on(self, handle: Any, work: Callable[[], object]) -> None:
        """Do something of torch's while a stream, by the driver's handle, is torch's current one."""
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(int(handle), device=self.device)):
            work()

    def current_stream(self) -> int:
        """Return the handle of the stream that torch gives its work to, in the calling thread."""
        import torch

        return int(torch.cuda.current_stream(self.device).cuda_stream) or LEGACY_STREAM


def torch_cuda(index: int) -> TorchCuda | None:
    """Return a device as torch knows it; None where torch has no CUDA, or not that device.

    Both number devices as CUDA does in this process.
    """
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    return TorchCuda(f"cuda:{index}", torch.cuda.device_count() == 1)


@dataclass(frozen=True)
class TensorMemory:
    """Memory of a tensor, as a buffer: ``handle`` and ``close`` are those of ``cuda.core.Buffer``.

    Attributes
    ----------
    handle
        Its address on the device.
    """

    handle: int

    def close(self, stream: Any) -> None:
        """Do nothing: the memory is torch's."""
