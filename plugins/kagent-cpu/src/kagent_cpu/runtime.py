"""The CPU's runtime: host memory as it is, kernels as plain calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_core.device import PointerArg, Runtime, SealedSegment, Segment, call_kernel
from kagent_core.execute.host import view_of
from kagent_core.specs import DType, KernelDescriptor, LaunchConfig, TensorSpec
from kagent_cpu.replay import CompiledSegment, CpuSegment, LoadSource, LoadUnit
from kagent_cpu.source import SourceKernel, is_source

_BYTE = DType("uint8", 1)


class CpuRuntime(Runtime):
    """Runs kernels in the calling thread, at once. Buffers are torch tensors of bytes.

    Parameters
    ----------
    threads
        Threads that a kernel may use; None for what torch is set to.
    load
        Compiles and loads the text of generated kernels; None where there is no compiler.
    load_source
        Compiles and loads a kernel of C text that somebody wrote.
    """

    host_memory = True

    def __init__(
        self, threads: int | None = None, load: LoadUnit | None = None, load_source: LoadSource | None = None
    ) -> None:
        self._threads = threads
        self._load = load
        self._load_source = load_source

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return bytes of host memory, aligned to 64."""
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu")

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do: memory goes when the last tensor on it does."""

    def copy_in(self, buffer: torch.Tensor, byte_offset: int, data: memoryview) -> None:
        """Copy bytes into a buffer."""
        self._bytes(buffer, byte_offset, data.nbytes)[:] = data.cast("B")

    def copy_out(self, buffer: torch.Tensor, byte_offset: int, data: memoryview) -> None:
        """Copy bytes out of a buffer."""
        data.cast("B")[:] = self._bytes(buffer, byte_offset, data.nbytes)

    def load(self, kernel: KernelDescriptor) -> Callable[..., Any] | SourceKernel:
        """Return the kernel's function; compiled and loaded, where it is C text.

        Raises
        ------
        CompilationError, PackingError
            As `SourceLoader`.
        """
        if is_source(kernel) and self._load_source is not None:
            return self._load_source(kernel)
        if kernel.function is None:
            raise TypeError(f"kernel '{kernel.name}' has no function to call")
        return kernel.function

    def launch(self, kernel: Callable[..., Any] | SourceKernel, config: LaunchConfig, args: Sequence[Any]) -> None:
        """Call the kernel once, with tensors on its buffers, or with their addresses where it is C text."""
        if isinstance(kernel, SourceKernel):
            kernel.call(args)
            return
        call_kernel(kernel, args, _tensor)

    def synchronize(self) -> None:
        """Nothing to do: a launch has finished when it returns."""

    def seal(self, segment: Segment) -> Callable[[], SealedSegment]:
        """Write the segment as one Python function."""
        compiled = CompiledSegment(segment, self._load, self._load_source)
        return lambda: CpuSegment(compiled, self._threads)

    @staticmethod
    def _bytes(buffer: torch.Tensor, byte_offset: int, nbytes: int) -> memoryview:
        if nbytes == 0:
            return memoryview(bytearray())
        return memoryview((ctypes.c_ubyte * nbytes).from_address(buffer.data_ptr() + byte_offset)).cast("B")


def _tensor(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return [_tensor(item) for item in arg]
    if not isinstance(arg, PointerArg):
        return arg
    shift = arg.byte_offset // arg.spec.dtype.itemsize
    spec = TensorSpec(arg.spec.dtype, arg.spec.shape, arg.spec.strides, shift, 0, arg.spec.conj, arg.spec.neg)
    whole = TensorSpec(_BYTE, tuple(arg.buffer.shape), (1,), 0, 0)
    return view_of(arg.buffer, whole, spec)
