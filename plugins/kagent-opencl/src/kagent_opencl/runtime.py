"""Memory and launches of one OpenCL device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyopencl as cl

from kagent_core.config import Config
from kagent_core.device import PointerArg, Runtime, ScalarArg
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig
from kagent_opencl.platforms import device_of
from kagent_opencl.programs import Programs

Argument = PointerArg | ScalarArg


@dataclass(frozen=True)
class LoadedKernel:
    """A compiled kernel. OpenCL keeps arguments in its kernel objects, so every prepared launch has one of its own.

    Attributes
    ----------
    program
        What it was compiled from.
    name
        Of its function.
    own
        The kernel object of launches that are not prepared.
    """

    program: cl.Program
    name: str
    own: cl.Kernel


class OpenClRuntime(Runtime):
    """One context with one in-order queue. Buffers are ``pyopencl.Buffer``.

    A kernel gets two arguments for each tensor: the buffer, and the number of the tensor's first element in it, since
    OpenCL passes no pointer into a buffer.
    """

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.device = device_of(info)
        self.context = cl.Context([self.device])
        self.queue = cl.CommandQueue(self.context, self.device)
        # only of CPUs is it certain that a buffer on host memory is that memory, and no copy that is refreshed at times
        self.imports_host = bool(self.device.type & cl.device_type.CPU) and bool(self.device.host_unified_memory)
        self._programs = Programs(self.context, self.device, config.cache_dir)

    # -- memory

    def allocate(self, nbytes: int) -> cl.Buffer:
        """Return a buffer; OpenCL has none of 0 bytes."""
        most = int(self.device.max_mem_alloc_size)
        if nbytes > most:
            raise MemoryError(f"{nbytes} bytes wanted, '{self.device.name.strip()}' gives {most} at once")
        try:
            return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(nbytes, 1))
        except cl.Error as error:
            raise MemoryError(f"'{self.device.name.strip()}' gave no {nbytes} bytes: {error}") from error

    def import_host(self, address: int, nbytes: int) -> cl.Buffer:
        """Return a buffer on host memory."""
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        return cl.Buffer(self.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=memory)

    def free(self, buffer: cl.Buffer) -> None:
        """Release a buffer."""
        buffer.release()

    def copy_in(self, buffer: cl.Buffer, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes to the device."""
        host = np.frombuffer(data, np.uint8)
        if host.size:
            cl.enqueue_copy(self.queue, buffer, host, dst_offset=byte_offset, is_blocking=True)

    def copy_out(self, buffer: cl.Buffer, byte_offset: int, data: memoryview) -> None:
        """Copy bytes of the device to the host."""
        host = np.frombuffer(data, np.uint8)
        if host.size:
            cl.enqueue_copy(self.queue, host, buffer, src_offset=byte_offset, is_blocking=True)
        else:
            self.queue.finish()

    # -- kernels

    def load(self, kernel: KernelDescriptor) -> LoadedKernel:
        """Compile a kernel, unless the cache has it."""
        if kernel.source is None:
            raise TypeError(f"kernel '{kernel.name}' has no OpenCL C source")
        program = self._programs.build(kernel.source)
        return LoadedKernel(program, kernel.name, cl.Kernel(program, kernel.name))

    def launch(self, kernel: LoadedKernel, config: LaunchConfig, args: Sequence[Argument]) -> None:
        """Enqueue a kernel."""
        _set_arguments(kernel.own, args)
        cl.enqueue_nd_range_kernel(self.queue, kernel.own, _items(config), config.block)

    def prepare(self, kernel: LoadedKernel, config: LaunchConfig, args: Sequence[Argument]) -> Callable[[], object]:
        """Set a kernel's arguments once and for all."""
        prepared = cl.Kernel(kernel.program, kernel.name)
        _set_arguments(prepared, args)
        return functools.partial(cl.enqueue_nd_range_kernel, self.queue, prepared, _items(config), config.block)

    def synchronize(self) -> None:
        """Wait for the queue."""
        self.queue.finish()


def _items(config: LaunchConfig) -> tuple[int, int, int]:
    (gx, gy, gz), (bx, by, bz) = config.grid, config.block
    return gx * bx, gy * by, gz * bz


def _set_arguments(kernel: cl.Kernel, args: Iterable[Argument]) -> None:
    """Give a kernel its arguments: a scalar as the bytes that its declared type has."""
    position = 0
    for arg in args:
        if isinstance(arg, PointerArg):
            kernel.set_arg(position, arg.buffer)
            kernel.set_arg(position + 1, np.int64(arg.byte_offset // arg.spec.dtype.itemsize))
            position += 2
        else:
            kernel.set_arg(position, arg.data)
            position += 1
