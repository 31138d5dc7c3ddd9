"""ExecutionPlan: the sealed, replayable form of one captured graph for one set of shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.capture.schemas import torch_dtype
from kagent_core.device import Environment, Observer, Region, SealedSegment, Segment
from kagent_core.errors import ExecutionError, KagentError
from kagent_core.execute.agent import ExecutorAgent
from kagent_core.execute.host import empty_like_spec, host_address, host_bytes, view_of
from kagent_core.schedule.placed import PlacedProgram, Transfer
from kagent_core.specs import BufferKind, InputRef, KernelTask, OutputRef, TensorSpec

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_BelowAutocast = torch._C._DisableAutocast


@dataclass(frozen=True)
class PlannedSegment:
    """A segment, and what makes instances of it that run."""

    segment: Segment
    make: Callable[[], SealedSegment]


Step = PlannedSegment | Transfer


class ExecutionPlan:
    """Replays one program. Any number of threads may call it at once: each call has memory of its own.

    Parameters
    ----------
    placed
        The program with its final buffers.
    steps
        Segments and transfers, in order.
    executors
        By device, for the transfers.
    constants
        The captured graph's constants.
    """

    def __init__(
        self,
        placed: PlacedProgram,
        steps: Sequence[Step],
        executors: Callable[[Any], ExecutorAgent],
        constants: Sequence[torch.Tensor],
    ) -> None:
        self.program = placed.program
        self.placements = placed.placements
        self.steps = tuple(steps)
        self._executors = executors
        self._bases = placed.bases
        anchored = self.program.anchored
        tensors = [(i, spec) for i, spec in enumerate(self.program.inputs) if isinstance(spec, TensorSpec)]
        self._tensors = [(i, spec.shape, spec.strides, torch_dtype(spec.dtype)) for i, spec in tensors]
        self._anchored = [(i, spec.storage_offset) for i, spec in tensors if i in anchored]
        self._numbers = [(i, v) for i, v in enumerate(self.program.inputs) if not isinstance(v, TensorSpec)]
        self._inputs = [(i, spec.buffer) for i, spec in tensors]
        self._constants = {
            spec.buffer: constants[self.program.buffers[spec.buffer].source or 0] for spec in self.program.constants
        }
        self._given: set[int] = set()
        self._outputs = [self._output(value) for value in self.program.outputs]
        self._repeats = [(i, v.index) for i, v in enumerate(self.program.outputs) if isinstance(v, OutputRef)]
        self._idle: list[_Instance] = []
        self._closed = False

    @property
    def tasks(self) -> tuple[KernelTask, ...]:
        """Every task, in the order in which they run."""
        return tuple(t for step in self.steps if isinstance(step, PlannedSegment) for t in step.segment.tasks)

    @property
    def in_host_memory(self) -> bool:
        """Whether no device has to be told when the plan is given up."""
        return not any(isinstance(step, Transfer) for step in self.steps)

    def accepts(self, args: Sequence[Any]) -> bool:
        """Whether the plan was made for arguments like these: dtypes, shapes, strides and integers."""
        for index, shape, strides, dtype in self._tensors:
            arg = args[index]
            if arg.shape != shape or arg.stride() != strides or arg.dtype is not dtype:
                return False
        for index, offset in self._anchored:
            if args[index].storage_offset() != offset:
                return False
        return all(args[index] == value for index, value in self._numbers)

    def run(self, args: Sequence[Any], observer: Observer | None = None) -> list[Any]:
        """Run the program and return its outputs.

        Raises
        ------
        KernelExecutionError
            When a kernel fails. The plan stays usable.
        """
        instance = self._free_instance() or self._instantiate()
        environment: Environment = dict(self._constants)
        for index, buffer in self._inputs:
            environment[buffer] = args[index]
        try:
            with _BelowAutograd(), _BelowAutocast():  # capture has written down what both would do
                instance.run(environment, observer)
                results = [output(args, environment) for output in self._outputs]
            for position, earlier in self._repeats:
                results[position] = results[earlier]
            return results
        finally:
            self._idle.append(instance)
            if self._closed:
                self.close()

    def close(self) -> None:
        """Give back the memory of instances that are not running, and of the others when they are done."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _free_instance(self) -> _Instance | None:
        try:
            return self._idle.pop()
        except IndexError:  # asking first would race with other threads
            return None

    def _instantiate(self) -> _Instance:
        with torch.inference_mode(False):  # memory made under inference_mode could not be written outside of it
            return _Instance(self.steps, self._executors, self._bases, self.program.buffers)

    def _output(self, value: Any) -> Callable[[Sequence[Any], Environment], Any]:
        if isinstance(value, InputRef):
            index = value.index
            return lambda args, environment: args[index]
        if not isinstance(value, TensorSpec):
            return lambda args, environment: value
        base, buffer = self._bases[value.buffer], value.buffer
        is_input = self.program.buffers[buffer].kind is BufferKind.INPUT
        if value == base and not is_input and buffer not in self._given:
            self._given.add(buffer)  # once: what else is returned of it is another tensor on the same memory
            return lambda args, environment: environment[buffer]
        return lambda args, environment: view_of(environment[buffer], base, value)


class _Instance:
    """Memory and sealed segments for one call at a time."""

    def __init__(
        self,
        steps: Sequence[Step],
        executors: Callable[[Any], ExecutorAgent],
        bases: Any,
        buffers: Sequence[Any],
    ) -> None:
        self._sealed: list[SealedSegment] = []
        try:
            for step in steps:
                if isinstance(step, Transfer):
                    target = buffers[step.target]
                    self._sealed.append(_Copy(step, executors(step.device), bases, target.kind is BufferKind.INPUT))
                else:
                    self._sealed.append(step.make())
        except BaseException:
            self.close()
            raise

    def run(self, environment: Environment, observer: Observer | None) -> None:
        if observer is None:
            for step in self._sealed:
                step.run(environment)
        else:
            for step in self._sealed:
                step.run_observed(environment, observer)

    def close(self) -> None:
        for step in self._sealed:
            step.close()


class _Copy(SealedSegment):
    """One transfer between host and device memory, with the device memory that it fills."""

    def __init__(self, transfer: Transfer, executor: ExecutorAgent, bases: Any, to_input: bool) -> None:
        self._transfer = transfer
        self._executor = executor
        self._runtime = executor.opened.runtime
        self._source_base: TensorSpec = bases[transfer.source]
        self._target_base: TensorSpec = bases[transfer.target]
        self._to_input = to_input
        self._region: Region | None = None
        self._imported: tuple[int, Region] | None = None
        if transfer.to_device and not self._runtime.imports_host:
            with self._explained(), executor.lock:
                self._region = Region(self._runtime.allocate(max(transfer.nbytes, 1)))

    def run(self, environment: Environment) -> None:
        """Copy the bytes and enter the copy into `environment`.

        Raises
        ------
        ExecutionError
            When the device refuses; says what was copied and for whom.
        """
        with self._explained():
            self._copy(environment)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        transfer = self._transfer
        try:
            yield
        except KagentError:
            raise
        except Exception as error:
            way = f"to {transfer.device}" if transfer.to_device else f"off {transfer.device}"
            raise ExecutionError(
                f"copying {self._source_base} ({transfer.nbytes} bytes) from {transfer.made_by} {way} for "
                f"{transfer.needed_by} failed with "
                f"{type(error).__name__}: {error}"
            ) from error

    def _copy(self, environment: Environment) -> None:
        transfer = self._transfer
        if transfer.to_device:
            with self._executor.lock:
                environment[transfer.target] = self._to_device(environment[transfer.source])
            return
        region: Region = environment[transfer.source]
        copied = empty_like_spec(self._target_base, transfer.nbytes)
        if transfer.nbytes:
            with self._executor.lock:
                whole = host_bytes(copied, self._target_base, transfer.nbytes)
                self._runtime.copy_out(region.buffer, region.byte_offset, whole)
        if self._to_input:  # element by element: what lies between a strided input's elements is not ours
            environment[transfer.target].copy_(copied)
        else:
            environment[transfer.target] = copied

    def _to_device(self, tensor: torch.Tensor) -> Region:
        """Return device memory that has a host tensor's bytes: the tensor's own where the device can use it."""
        nbytes = self._transfer.nbytes
        if nbytes and self._runtime.imports_host:
            address = host_address(tensor, self._source_base)
            if self._imported is not None and self._imported[0] == address:
                return self._imported[1]
            buffer = self._runtime.import_host(address, nbytes)
            if buffer is not None:
                self._give_up_imported()
                self._imported = (address, Region(buffer))
                return self._imported[1]
        if self._region is None:
            self._region = Region(self._runtime.allocate(max(nbytes, 1)))
        if nbytes:
            host = host_bytes(tensor, self._source_base, nbytes)
            self._runtime.copy_in(self._region.buffer, self._region.byte_offset, host)
        return self._region

    def _give_up_imported(self) -> None:
        if self._imported is not None:
            self._runtime.free(self._imported[1].buffer)
            self._imported = None

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """As `run`: a transfer is no task."""
        self.run(environment)

    def close(self) -> None:
        """Free the device memory."""
        with self._executor.lock:
            self._give_up_imported()
            if self._region is not None:
                self._runtime.free(self._region.buffer)
                self._region = None
