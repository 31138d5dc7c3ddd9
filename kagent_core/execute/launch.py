"""The core's way to run a segment: launch task by task through the device's runtime."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.config import TRACE
from kagent_core.device import (
    Environment,
    LaunchError,
    NamedArg,
    Observer,
    PointerArg,
    Region,
    ScalarArg,
    SealedSegment,
    Segment,
)
from kagent_core.errors import ExecutionError, KagentError, KernelExecutionError
from kagent_core.execute.failure import as_eager_fails, kernel_failure, reported_error
from kagent_core.execute.host import empty_like_spec, host_bytes, view_of
from kagent_core.execute.in_place import begin_after_torch
from kagent_core.execute.pool import Block, DeviceMemory
from kagent_core.execute.replay import Replay
from kagent_core.execute.reports import Reports
from kagent_core.execute.streams import StreamPlan, plan_streams
from kagent_core.extract.parameter_buffer import collect_parameters
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import (
    Access,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    PackedArg,
    TaskFinished,
    TensorSpec,
    flatten_tensors,
)

log = get_logger("execute")

_NOTHING_YET: dict[int, Region] = {}
"""What is bound before the first run."""


@dataclass
class _Launch:
    """One task, loaded. `args` holds what is known before a run; `late` the positions that a run fills in.

    `start` is what the runtime has prepared of it, with the arguments as they are.
    """

    task: KernelTask
    kernel: Any
    config: LaunchConfig
    args: list[Any]
    late: tuple[tuple[int, Any, Access], ...]
    late_buffers: frozenset[int] = frozenset()
    start: Callable[[], object] | None = None


class LaunchEach(SealedSegment):
    """Launches each task of a segment in order, on memory of its own; on several streams where the device has them.

    Parameters
    ----------
    memory
        The device's. Its lock is held while its runtime is used.
    segment
        What to run.
    load
        Returns a kernel as the runtime loads it; by default the runtime's own method.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        segment: Segment,
        load: Callable[[KernelDescriptor], Any] | None = None,
    ) -> None:
        self._memory = memory
        self._runtime = runtime = memory.runtime
        self._segment = segment
        self._lock = memory.lock
        self._load = load or runtime.load
        self._in_place = bool(segment.in_place)
        self._block: Block | None = None
        self._arena: Any = None
        self._reports: Reports | None = None
        self._launches: list[_Launch | None] = []
        self._bound: dict[int, Region] = _NOTHING_YET
        self._replay = Replay(runtime, segment)
        self._started: list[KernelTask] = []
        self._parameters, slots = collect_parameters(segment.tasks)
        self._slots = {task.id: places for task, places in zip(segment.tasks, slots, strict=True)}
        try:
            self._allocate()
            with self._lock:
                self._launches = [self._prepare(task) for task in segment.tasks]
        except BaseException:
            self.close()
            raise
        self._exports = {buffer: Region(self._arena, segment.offsets[buffer]) for buffer in segment.exports}
        self._outside = {
            spec.buffer
            for launch in self._launches
            if launch
            for _, value, _ in launch.late
            for spec in flatten_tensors(value)
        }.difference(segment.offsets)
        self._plan = plan_streams(segment.tasks, segment.offsets, runtime.streams) if runtime.streams > 1 else None

    def run(self, environment: Environment) -> None:
        """Launch every task, then wait for the device, or let torch wait for it where the tensors are torch's."""
        with self._lock:
            if self._in_place:
                begin_after_torch(self._runtime)
            self._bind(environment)
            try:
                if self._replay.start(self._launches):
                    self._started += [launch.task for launch in self._launches if launch is not None]
                elif self._plan is None:
                    for launch in self._launches:
                        if launch is not None:
                            self._start(launch, None)
                else:
                    self._launch_on_streams(self._plan)
            except BaseException:
                self._drain()
                raise
            if not (self._in_place and self._before_torch()):
                self._synchronize()
            self._check_reports(environment)

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """Launch the tasks one at a time, waiting for each, so that each has a time of its own."""
        with self._lock:
            if self._in_place:
                begin_after_torch(self._runtime)
            self._bind(environment)
            for launch in self._launches:
                if launch is not None:
                    started = time.perf_counter()
                    try:
                        self._start(launch, None)
                        self._synchronize(launch.task)
                        self._check_reports(environment)
                    except ExecutionError as error:
                        observer(TaskFinished(launch.task, (time.perf_counter() - started) * 1e3, error))
                        raise
                    observer(TaskFinished(launch.task, (time.perf_counter() - started) * 1e3))
            if self._in_place and not self._before_torch():
                self._synchronize()

    def close(self) -> None:
        """Give the arena back."""
        with self._lock:
            self._replay.close()
            for launch in self._launches:
                if launch is not None:
                    launch.start = None
            if self._reports is not None:
                self._reports.close()
            if self._block is not None:
                self._memory.give(self._block)
                self._block = self._arena = None

    # -- before a run

    def _allocate(self) -> None:
        # without the lock: other plans may have to give memory up
        nbytes = self._segment.arena_nbytes
        try:
            if nbytes:
                self._block = self._memory.take(nbytes, "intermediates", self._what())
                self._arena = self._block.buffer
            self._reports = Reports(self._memory, self._segment.tasks)
        except KagentError:
            raise
        except Exception as error:
            raise ExecutionError(
                f"{self._segment.device} gave no {nbytes} bytes for the intermediates of {self._what()}: "
                f"{type(error).__name__}: {error}",
                hint="run a smaller batch, or free what else holds the device's memory",
            ) from error

    def _prepare(self, task: KernelTask) -> _Launch | None:
        if task.kernel.allocates:
            raise ExecutionError(
                f"kernel '{task.kernel.name}' for {task.kernel.signature} allocates its results, which only a device "
                f"in host memory can do; {task.device} is not one",
                hint="give the function a parameter `out` (out0, out1, ... for several results) and write into it",
            )
        if task.config is None:
            return None
        late = tuple(
            (position, arg.value, arg.access or Access.IN)
            for position, arg in enumerate(task.args)
            if any(spec.buffer not in self._segment.offsets for spec in flatten_tensors(arg.value))
        )
        waiting = {position for position, _, _ in late}
        args = [None if position in waiting else self._early(task, position) for position in range(len(task.args))]
        args += [] if self._reports is None else self._reports.args(task)
        try:
            kernel = self._load(task.kernel)
        except Exception as error:
            told = f"kernel '{task.kernel.name}' for {task.kernel.signature} ({task.kernel.origin}) could not be "
            told += f"loaded on {task.device}: {type(error).__name__}: {str(error).strip()}"
            raise KernelExecutionError.wrapping(error, told) from error
        buffers = frozenset(spec.buffer for _, value, _ in late for spec in flatten_tensors(value))
        return _Launch(task, kernel, task.config, args, late, buffers)

    def _early(self, task: KernelTask, position: int) -> Any:
        """An argument that no run changes: a value in the parameter buffer, or a tensor in the arena."""
        arg, slot = task.args[position], self._slots[task.id][position]
        if slot is None:
            return _as_passed(arg, self._resolve(arg.value, arg.access or Access.IN, {}))
        parameters = self._parameters
        return ScalarArg(arg.type or "", parameters.view(slot), parameters.address(slot), slot.type.unpack)

    def _resolve(self, value: Any, access: Access, environment: Environment) -> Any:
        if isinstance(value, TensorSpec):
            begin = value.storage_offset * value.dtype.itemsize
            offset = self._segment.offsets.get(value.buffer)
            if offset is not None:
                return PointerArg(self._arena, offset + begin, value, access)
            region: Region = environment[value.buffer]
            return PointerArg(region.buffer, region.byte_offset + begin, value, access)
        if isinstance(value, tuple):
            return tuple(self._resolve(item, access, environment) for item in value)
        return value

    # -- a run

    def _bind(self, environment: Environment) -> None:
        """Enter this segment's results, and resolve the arguments on memory that others own, if it has moved."""
        environment.update(self._exports)
        self._started.clear()
        moved = {buffer for buffer in self._outside if environment[buffer] is not self._bound.get(buffer)}
        first = self._bound is _NOTHING_YET
        if not moved and not first:
            return  # the usual replay: everything lies where it lay
        for number, launch in enumerate(self._launches):
            if launch is not None and (first or not moved.isdisjoint(launch.late_buffers)):
                for position, value, access in launch.late:
                    resolved = self._resolve(value, access, environment)
                    launch.args[position] = _as_passed(launch.task.args[position], resolved)
                launch.start = self._prepared(launch, None if self._plan is None else self._plan.streams[number])
                self._replay.update(number, launch.args)
        self._bound = {buffer: environment[buffer] for buffer in self._outside}

    def _prepared(self, launch: _Launch, stream: int | None) -> Callable[[], object] | None:
        try:
            if stream is None:
                return self._runtime.prepare(launch.kernel, launch.config, launch.args)
            return self._runtime.prepare_on(stream, launch.kernel, launch.config, launch.args)
        except Exception as error:
            raise kernel_failure(launch.task, error) from error

    def _launch_on_streams(self, plan: StreamPlan) -> None:
        events: dict[int, Any] = {}
        for position, launch in enumerate(self._launches):
            stream, task = plan.streams[position], self._segment.tasks[position]
            try:
                for other in plan.waits[position]:
                    self._runtime.wait_event(stream, events[other])
                if launch is not None:
                    self._start(launch, stream)
                if position in plan.recorded:
                    events[position] = self._runtime.record_event(stream)
            except KagentError:
                raise
            except Exception as error:
                raise kernel_failure(task, error) from error

    def _start(self, launch: _Launch, stream: int | None) -> None:
        if log.isEnabledFor(TRACE):
            log.trace("%s: %s", launch.task.name, ", ".join(map(str, launch.args)))
        self._started.append(launch.task)
        try:
            if launch.start is not None:
                launch.start()
            elif stream is None:
                self._runtime.launch(launch.kernel, launch.config, launch.args)
            else:
                self._runtime.launch_on(stream, launch.kernel, launch.config, launch.args)
        except Exception as error:
            raise kernel_failure(launch.task, error) from error

    def _before_torch(self) -> bool:
        """Let torch's current stream wait for what was launched; return False where the host has to."""
        try:
            return self._runtime.before_torch()
        except BaseException:
            self._drain()
            raise

    def _drain(self) -> None:
        """After a failure, let what was launched before finish: it still uses this segment's memory."""
        with contextlib.suppress(Exception):  # the failure that led here is the one to tell
            self._runtime.synchronize()

    def _synchronize(self, task: KernelTask | None = None) -> None:
        try:
            self._runtime.synchronize()
        except LaunchError as error:
            raise kernel_failure(self._started[error.launch], error.cause) from error.cause
        except KagentError:
            raise
        except Exception as error:
            if task is not None:
                raise kernel_failure(task, error) from error
            raise ExecutionError(
                f"{self._segment.device} failed while it ran {self._what()}: {type(error).__name__}: {error}",
                hint="profile = true runs task by task and names the one that fails",
            ) from error

    def _check_reports(self, environment: Environment) -> None:
        """Raise eager PyTorch's error where a generated kernel has reported one."""
        found = self._reports.first() if self._reports is not None else None
        if found is None:
            return
        position, task = next((n, task) for n, task in enumerate(self._segment.tasks) if task.id == found[0])
        otherwise = reported_error(found[1])
        if not self._is_intact(position):
            raise kernel_failure(task, otherwise)
        raise as_eager_fails(task, lambda spec: self._fetched(spec, environment), otherwise)

    def _is_intact(self, position: int) -> bool:
        """Whether what a task was given still lies in memory: nothing that ran since has written there."""
        tasks, offsets = self._segment.tasks, self._segment.offsets

        def placed(buffer: int, begin: int, end: int) -> tuple[int, int, int]:
            offset = offsets.get(buffer)
            return (buffer, begin, end) if offset is None else (-1, offset + begin, offset + end)

        given = [placed(read.buffer, read.offset, read.end) for read in tasks[position].reads]
        written = [placed(w.buffer, w.offset, w.end) for task in tasks[position:] for w in task.writes]
        return not any(one[0] == two[0] and one[1] < two[2] and two[1] < one[2] for one in given for two in written)

    def _fetched(self, spec: TensorSpec, environment: Environment) -> torch.Tensor:
        """Return a tensor of the device's in host memory."""
        pointer = self._resolve(spec, Access.IN, environment)
        copied = empty_like_spec(spec, 0)
        begin = spec.storage_offset * spec.dtype.itemsize
        if pointer.nbytes:
            whole = host_bytes(copied, spec, begin + pointer.nbytes)
            self._runtime.copy_out(pointer.buffer, pointer.byte_offset, whole[begin:])
        return view_of(copied, spec, spec)

    def _what(self) -> str:
        """The segment in words: its program, its first and its last operator."""
        first, last = self._segment.tasks[0].calls[0], self._segment.tasks[-1].calls[-1]
        return f"{self._segment.name}, {first.name} ({first.signature}) to {last.name} ({last.signature})"


def _as_passed(arg: PackedArg, value: Any) -> Any:
    """Return an argument with its name, where a callable kernel takes it by that; results go by their place."""
    return NamedArg(arg.name, value) if arg.keyword and arg.access is not Access.OUT else value
