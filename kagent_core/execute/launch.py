"""The core's way to run a segment: launch task by task through the device's runtime."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.config import TRACE
from kagent_core.device import Environment, Observer, PointerArg, Region, Runtime, SealedSegment, Segment
from kagent_core.errors import ExecutionError, KagentError
from kagent_core.execute.failure import kernel_failure
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import KernelTask, LaunchConfig, TaskFinished, TensorSpec, flatten_tensors

log = get_logger("execute")


@dataclass(frozen=True)
class _Launch:
    """One task, loaded. `args` holds what is known before a run; `late` the positions that a run fills in."""

    task: KernelTask
    kernel: Any
    config: LaunchConfig
    args: tuple[Any, ...]
    late: tuple[tuple[int, Any], ...]


class LaunchEach(SealedSegment):
    """Launches each task of a segment in order, on memory of its own.

    Parameters
    ----------
    runtime
        The device's.
    segment
        What to run.
    lock
        Held while the runtime is used.
    """

    def __init__(self, runtime: Runtime, segment: Segment, lock: threading.RLock) -> None:
        self._runtime = runtime
        self._segment = segment
        self._lock = lock
        with lock:
            self._arena = runtime.allocate(segment.arena_nbytes) if segment.arena_nbytes else None
            try:
                self._launches = [launch for task in segment.tasks if (launch := self._prepare(task)) is not None]
            except BaseException:
                self.close()
                raise

    def run(self, environment: Environment) -> None:
        """Launch every task, then wait for the device."""
        with self._lock:
            self._export(environment)
            try:
                for launch in self._launches:
                    self._launch(launch, environment)
            except BaseException:
                self._drain()
                raise
            self._synchronize()

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """Launch the tasks one at a time, waiting for each, so that each has a time of its own."""
        with self._lock:
            self._export(environment)
            for launch in self._launches:
                started = time.perf_counter()
                self._launch(launch, environment)
                self._synchronize(launch.task)
                observer(TaskFinished(launch.task, (time.perf_counter() - started) * 1e3))

    def close(self) -> None:
        """Free the arena."""
        with self._lock:
            if self._arena is not None:
                self._runtime.free(self._arena)
                self._arena = None

    def _prepare(self, task: KernelTask) -> _Launch | None:
        if task.config is None:
            return None
        if task.kernel.allocates:
            raise ExecutionError(
                f"kernel '{task.kernel.name}' for {task.kernel.signature} allocates its results, which only a device "
                f"in host memory can do; {task.device} is not one",
                hint="register it with allocates=False and write into the results that it is given",
            )
        values = [self._early(arg.value) for arg in task.args]
        late = tuple((i, arg.value) for i, arg in enumerate(task.args) if self._is_late(arg.value))
        try:
            kernel = self._runtime.load(task.kernel)
        except Exception as error:
            raise kernel_failure(task, error) from error
        return _Launch(task, kernel, task.config, tuple(values), late)

    def _is_late(self, value: Any) -> bool:
        return any(spec.buffer not in self._segment.offsets for spec in flatten_tensors(value))

    def _early(self, value: Any) -> Any:
        return value if self._is_late(value) else self._resolve(value, {})

    def _resolve(self, value: Any, environment: Environment) -> Any:
        if isinstance(value, TensorSpec):
            begin = value.storage_offset * value.dtype.itemsize
            offset = self._segment.offsets.get(value.buffer)
            if offset is not None:
                return PointerArg(self._arena, offset + begin, value)
            region: Region = environment[value.buffer]
            return PointerArg(region.buffer, region.byte_offset + begin, value)
        if isinstance(value, tuple):
            return tuple(self._resolve(item, environment) for item in value)
        return value

    def _export(self, environment: Environment) -> None:
        for buffer in self._segment.exports:
            environment[buffer] = Region(self._arena, self._segment.offsets[buffer])

    def _launch(self, launch: _Launch, environment: Environment) -> None:
        args: Sequence[Any] = launch.args
        if launch.late:
            args = list(args)
            for position, value in launch.late:
                args[position] = self._resolve(value, environment)
        if log.isEnabledFor(TRACE):
            log.trace("%s: %s", launch.task.name, ", ".join(map(str, args)))
        try:
            self._runtime.launch(launch.kernel, launch.config, args)
        except Exception as error:
            raise kernel_failure(launch.task, error) from error

    def _drain(self) -> None:
        """After a failure, let what was launched before finish: it still uses this segment's memory."""
        with contextlib.suppress(Exception):  # the failure that led here is the one to tell
            self._runtime.synchronize()

    def _synchronize(self, task: KernelTask | None = None) -> None:
        try:
            self._runtime.synchronize()
        except KagentError:
            raise
        except Exception as error:
            if task is not None:
                raise kernel_failure(task, error) from error
            raise ExecutionError(
                f"{self._segment.device} failed while it ran {self._segment.name}: {type(error).__name__}: {error}",
                hint="profile = true runs task by task and names the one that fails",
            ) from error
