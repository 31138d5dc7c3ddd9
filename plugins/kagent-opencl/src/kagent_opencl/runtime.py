"""Memory and launches of one OpenCL device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyopencl as cl

from kagent_core.config import Config
from kagent_core.device import PointerArg, Runtime, ScalarArg, call_kernel
from kagent_core.extract.pack_prototype import has_prototype
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, LocalMemory
from kagent_opencl.clblast import QueueFunction
from kagent_opencl.packer import arguments_in, check_arguments
from kagent_opencl.platforms import device_of
from kagent_opencl.programs import Programs
from kagent_opencl.work_groups import WorkGroupLimits, fitting, items, work_group_limits

Argument = PointerArg | ScalarArg | LocalMemory


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
    limits
        Of its work-groups, found before it had arguments: their local memory would count among its own.
    generated
        Whether any launch config gives the same result.
    fits
        The launch configs that it was found to take, each with what is launched.
    """

    program: cl.Program
    name: str
    own: cl.Kernel
    limits: WorkGroupLimits
    generated: bool
    fits: dict[LaunchConfig, LaunchConfig] = field(default_factory=dict, compare=False)


Loaded = LoadedKernel | Callable[..., None]
"""A compiled kernel, or a function that enqueues its work itself."""


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

    def load(self, kernel: KernelDescriptor) -> Loaded:
        """Compile a kernel, unless the cache has it, or it is one that enqueues its work itself."""
        if isinstance(kernel.function, QueueFunction):
            return kernel.function.on(self.queue)
        if kernel.source is None:
            raise TypeError(f"kernel '{kernel.name}' has no OpenCL C source")
        if not has_prototype(kernel):
            program = self._programs.build(kernel.source)
        else:
            program, found = self._programs.build_with_arguments(kernel.source, kernel.name)
            check_arguments(kernel, arguments_in(kernel.source, kernel.name) if found is None else found)
        own = cl.Kernel(program, kernel.name)
        generated = kernel.packed is not None and kernel.threads is None
        return LoadedKernel(program, kernel.name, own, work_group_limits(own, self.device), generated)

    def launch(self, kernel: Loaded, config: LaunchConfig, args: Sequence[Argument]) -> None:
        """Enqueue a kernel."""
        if not isinstance(kernel, LoadedKernel):
            call_kernel(kernel, args, convert=lambda arg: arg)
            return
        config = self._fitting(kernel, config)
        _set_arguments(kernel.own, args)
        cl.enqueue_nd_range_kernel(self.queue, kernel.own, items(config), config.block)

    def prepare(self, kernel: Loaded, config: LaunchConfig, args: Sequence[Argument]) -> Callable[[], object] | None:
        """Set a kernel's arguments once and for all."""
        if not isinstance(kernel, LoadedKernel):
            return None
        config = self._fitting(kernel, config)
        prepared = cl.Kernel(kernel.program, kernel.name)
        _set_arguments(prepared, args)
        return functools.partial(cl.enqueue_nd_range_kernel, self.queue, prepared, items(config), config.block)

    def _fitting(self, kernel: LoadedKernel, config: LaunchConfig) -> LaunchConfig:
        """Return what is launched: a launch config that the kernel takes, which its compiler has the last word on."""
        found = kernel.fits.get(config)
        if found is None:
            found = kernel.fits[config] = fitting(kernel.limits, kernel.name, kernel.generated, config)
        return found

    def synchronize(self) -> None:
        """Wait for the queue."""
        self.queue.finish()


def _set_arguments(kernel: cl.Kernel, args: Iterable[Argument]) -> None:
    """Give a kernel its arguments: a scalar as the bytes that its declared type has."""
    position = 0
    for arg in args:
        if isinstance(arg, PointerArg):
            kernel.set_arg(position, arg.buffer)
            kernel.set_arg(position + 1, np.int64(arg.byte_offset // arg.spec.dtype.itemsize))
            position += 2
        elif isinstance(arg, LocalMemory):
            kernel.set_arg(position, cl.LocalMemory(arg.nbytes))  # type: ignore[arg-type]  # its stubs leave it out
            position += 1
        elif arg.type.endswith("*"):  # a tensor that was not given
            kernel.set_arg(position, None)
            kernel.set_arg(position + 1, np.int64(0))
            position += 2
        else:
            kernel.set_arg(position, arg.data)
            position += 1
