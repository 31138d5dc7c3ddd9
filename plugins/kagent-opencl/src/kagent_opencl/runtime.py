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
from kagent_opencl.queues import OrderedQueue
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


Loaded = LoadedKernel | QueueFunction
"""A compiled kernel, or a function that enqueues its work itself."""


class OpenClRuntime(Runtime):
    """One context with in-order queues. Buffers are ``pyopencl.Buffer``.

    A kernel gets two arguments for each tensor: the buffer, and the number of the tensor's first element in it, since
    OpenCL passes no pointer into a buffer.

    Attributes
    ----------
    queues_of_cpu, queues_of_others
        How many queues a device has, by its type. A CPU has one: a kernel fills its cores, and threads of two kernels
        would take them from each other.
    """

    queues_of_cpu: int = 1
    queues_of_others: int = 2

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.device = device_of(info)
        self.context = cl.Context([self.device])
        on_cpu = is_cpu(self.device)
        self.streams = self.queues_of_cpu if on_cpu else self.queues_of_others
        self.queues = [OrderedQueue(self.context, self.device) for _ in range(self.streams)]
        self.queue = self.queues[0].queue
        # only of CPUs is it certain that a buffer on host memory is that memory, and no copy that is refreshed at times
        self.imports_host = on_cpu and bool(self.device.host_unified_memory)
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
        self._finish_others()
        if host.size:
            cl.enqueue_copy(self.queue, buffer, host, dst_offset=byte_offset, is_blocking=True)

    def copy_out(self, buffer: cl.Buffer, byte_offset: int, data: memoryview) -> None:
        """Copy bytes of the device to the host."""
        host = np.frombuffer(data, np.uint8)
        self._finish_others()
        if host.size:
            cl.enqueue_copy(self.queue, host, buffer, src_offset=byte_offset, is_blocking=True)
        else:
            self.queue.finish()

    # -- kernels

    def load(self, kernel: KernelDescriptor) -> Loaded:
        """Compile a kernel, unless the cache has it, or it is one that enqueues its work itself."""
        if isinstance(kernel.function, QueueFunction):
            return kernel.function
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
        """Enqueue a kernel in the first queue."""
        self.launch_on(0, kernel, config, args)

    def launch_on(self, stream: int, kernel: Loaded, config: LaunchConfig, args: Sequence[Argument]) -> None:
        """Enqueue a kernel."""
        queue = self.queues[stream]
        if not isinstance(kernel, LoadedKernel):
            queue.call(functools.partial(call_kernel, kernel.on(queue.queue), args, convert=lambda arg: arg))
            return
        config = self._fitting(kernel, config)
        _set_arguments(kernel.own, args)
        queue.launch(kernel.own, items(config), config.block)

    def prepare(self, kernel: Loaded, config: LaunchConfig, args: Sequence[Argument]) -> Callable[[], object] | None:
        """Set a kernel's arguments once and for all, where there is one queue."""
        prepared = self._prepared(kernel, config, args)
        return None if prepared is None else functools.partial(cl.enqueue_nd_range_kernel, self.queue, *prepared)

    def prepare_on(
        self, stream: int, kernel: Loaded, config: LaunchConfig, args: Sequence[Argument]
    ) -> Callable[[], object] | None:
        """Set a kernel's arguments once and for all, for one of several queues."""
        prepared = self._prepared(kernel, config, args)
        return None if prepared is None else functools.partial(self.queues[stream].launch, *prepared)

    def _prepared(
        self, kernel: Loaded, config: LaunchConfig, args: Sequence[Argument]
    ) -> tuple[cl.Kernel, tuple[int, ...], tuple[int, ...]] | None:
        """Return a kernel with its arguments, its work-items, and those of a group."""
        if not isinstance(kernel, LoadedKernel):
            return None
        config = self._fitting(kernel, config)
        prepared = cl.Kernel(kernel.program, kernel.name)
        _set_arguments(prepared, args)
        return prepared, items(config), config.block

    def _fitting(self, kernel: LoadedKernel, config: LaunchConfig) -> LaunchConfig:
        """Return what is launched: a launch config that the kernel takes, which its compiler has the last word on."""
        found = kernel.fits.get(config)
        if found is None:
            found = kernel.fits[config] = fitting(kernel.limits, kernel.name, kernel.generated, config)
        return found

    def record_event(self, stream: int) -> cl.Event:
        """Return an event that happens when a queue has done what was enqueued in it so far."""
        return self.queues[stream].record()

    def wait_event(self, stream: int, event: cl.Event) -> None:
        """Let what is enqueued in a queue from here on wait for an event."""
        self.queues[stream].wait(event)

    def synchronize(self) -> None:
        """Wait for the queues."""
        for queue in self.queues:
            queue.finish()

    def _finish_others(self) -> None:
        """Wait for all queues but the first, which copies are enqueued in."""
        for queue in self.queues[1:]:
            queue.finish()


def is_cpu(device: cl.Device) -> bool:
    """Whether a device is a processor, which runs work-items as loops."""
    return bool(device.type & cl.device_type.CPU)


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
