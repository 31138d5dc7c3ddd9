"""Memory and launches of the emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kagent_core.config import Config
from kagent_core.device import LaunchError, PointerArg, Runtime, ScalarArg
from kagent_core.extract.pack_prototype import check_sizes, has_prototype
from kagent_core.prototype.abi import Abi
from kagent_core.runs import byte_runs
from kagent_core.specs import Access, DeviceInfo, KernelDescriptor, LaunchConfig, LocalMemory
from kagent_cuda.emulated.kernels import EmulatedKernel, Machine
from kagent_cuda.emulated.launches import Region, check_config, check_parameters, run_kernel
from kagent_cuda.emulated.memory import Allocation, EmulationError, Memory
from kagent_cuda.parameters import ParameterBlock, check_places, pack_parameters

_RUN_LIMIT = 1 << 16
"""A result of more pieces than this is not looked through for what was not written."""

Argument = PointerArg | ScalarArg | LocalMemory


@dataclass(frozen=True)
class _Queued:
    kernel: EmulatedKernel
    config: LaunchConfig
    block: ParameterBlock
    pointers: tuple[PointerArg, ...]


class EmulatedRuntime(Runtime):
    """Runs kernels on the host, when somebody waits for them, and watches what they touch.

    Kernels may touch the tensors that they are launched with, and nothing else, whatever lies beside them.
    """

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.info = info
        self.memory = Memory(info.memory_nbytes)
        self.machine = Machine(config.cache_dir)
        self._abi = Abi()
        self._queue: list[_Queued] = []
        self._done = 0

    # -- memory

    def allocate(self, nbytes: int) -> Allocation:
        """Return poisoned memory."""
        return self.memory.allocate(nbytes)

    def free(self, buffer: Allocation) -> None:
        """Give memory back.

        Raises
        ------
        EmulationError
            When a kernel that was launched has yet to use it.
        """
        for queued in self._queue:
            if any(pointer.buffer is buffer for pointer in queued.pointers):
                raise EmulationError(f"free of memory that kernel '{queued.kernel.name}' is yet to use")
        self.memory.free(buffer)

    def copy_in(self, buffer: Allocation, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes to the device, after all that was launched before."""
        self._run_queue()
        self.memory.write(buffer, byte_offset, data)

    def copy_out(self, buffer: Allocation, byte_offset: int, data: memoryview) -> None:
        """Copy bytes of the device to the host, after all that was launched before."""
        self._run_queue()
        self.memory.read(buffer, byte_offset, data)

    # -- kernels

    def load(self, kernel: KernelDescriptor) -> EmulatedKernel:
        """Compile a kernel, unless the cache has it."""
        if kernel.source is None:
            raise TypeError(f"kernel '{kernel.name}' has no CUDA C++ source")
        compiled = self.machine.compile(kernel.source, kernel.name)
        if has_prototype(kernel):
            declared = [parameter for parameter in kernel.parameters if not parameter.type.startswith("local ")]
            check_sizes(kernel, declared, [nbytes for _, nbytes in compiled.places], self._abi)
        return compiled

    def launch(self, kernel: EmulatedKernel, config: LaunchConfig, args: Sequence[Argument]) -> None:
        """Queue a kernel: its parameters are copied now, as a driver does, and it runs when somebody waits."""
        passed = [arg for arg in args if not isinstance(arg, LocalMemory)]
        block = pack_parameters(passed, lambda buffer: buffer.address, self._abi)
        check_places(kernel.name, block.places, kernel.places)
        check_config(kernel, config, self.info)
        check_parameters(kernel, block.data, self.memory)
        pointers = tuple(arg for arg in args if isinstance(arg, PointerArg))
        self._queue.append(_Queued(kernel, config, block, pointers))

    def synchronize(self) -> None:
        """Run all that was launched.

        Raises
        ------
        LaunchError
            With what the first launch that went wrong did.
        """
        try:
            self._run_queue()
        finally:
            self._done = 0

    def _run_queue(self) -> None:
        queue, self._queue = self._queue, []
        for queued in queue:
            regions = [region for number, arg in enumerate(queued.pointers) if (region := _region(number, arg))]
            try:
                run_kernel(
                    *(self.machine, self.memory, self.info, queued.kernel, queued.config, queued.block.data, regions)
                )
            except EmulationError as error:
                raise LaunchError(self._done, error) from error
            self._done += 1


def _region(number: int, arg: PointerArg) -> Region | None:
    """Return the memory that a kernel may use for a tensor; None for one without elements."""
    if not arg.nbytes:
        return None
    begin = arg.buffer.address + arg.byte_offset
    runs: list[tuple[int, int]] = []
    if arg.access is Access.OUT:
        runs = byte_runs(arg.spec.shape, arg.spec.strides, arg.spec.dtype.itemsize, _RUN_LIMIT)
    return Region(
        begin,
        begin + arg.nbytes,
        arg.access,
        tuple((begin + offset, nbytes) for offset, nbytes in runs),
        f"result {arg.spec}, pointer {number}",
    )
