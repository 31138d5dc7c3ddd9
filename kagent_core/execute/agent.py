"""ExecutorAgent: one per device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kagent_core.device import OpenDevice, SealedSegment, Segment
from kagent_core.execute.arena import plan_arena
from kagent_core.execute.launch import LaunchEach
from kagent_core.execute.model_parameters import ModelParameters, Watch
from kagent_core.execute.pool import DeviceMemory, MemoryUse
from kagent_core.execute.streams import plan_streams
from kagent_core.extract.queue import TaskQueue, in_order
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import BufferSpec, KernelDescriptor, TensorSpec
from kagent_core.watch.memory import memory_watch

log = get_logger("execute")


class ExecutorAgent:
    """Takes tasks from queues, orders them, gives them memory and runs them, on one device.

    Parameters
    ----------
    opened
        The device.
    memory_limit_nbytes
        The most of its memory that plans and parameters may take; by default all that the device says it has.
    watch
        How a change of a parameter is noticed.
    cache_dir
        Where compiled code is kept.
    """

    def __init__(self, opened: OpenDevice, memory_limit_nbytes: int | None, watch: Watch, cache_dir: Path) -> None:
        self.opened = opened
        self.lock = threading.RLock()
        limit = memory_limit_nbytes or opened.info.memory_nbytes or None
        self.memory = DeviceMemory(opened.runtime, opened.device, self.lock, limit)
        self.parameters = ModelParameters(self.memory, watch, lambda: memory_watch(cache_dir))
        self._loaded: dict[tuple[Any, ...], Any] = {}

    def prepare(
        self,
        queue: TaskQueue,
        buffers: Sequence[BufferSpec],
        exports: frozenset[int],
        bases: Mapping[int, TensorSpec],
        name: str,
        in_place: Collection[int] = (),
        steady: Collection[int] = (),
    ) -> Segment:
        """Take every task from a closed queue and return them ordered, with an arena planned for their memory.

        Buffers that are `in_place` have memory of their own, on this device or another; those that are `steady` hold
        the same tensors call after call.

        Raises
        ------
        ExecutionError
            When the queue has failed, or the tasks' dependencies cannot be met.
        """
        ordered = in_order(queue)
        runtime = self.opened.runtime
        streams = plan_streams(ordered, {}, runtime.streams).streams if runtime.streams > 1 else ()
        touched = {span.buffer for task in ordered for span in (*task.reads, *task.writes)}
        in_place = frozenset(touched.intersection(in_place))
        arena = plan_arena(ordered, buffers, exports, not runtime.host_memory, streams, in_place)
        log.debug(
            "%s: %d tasks on %s, arena of %d bytes for %d buffers",
            name,
            len(ordered),
            self.opened.device,
            arena.nbytes,
            len(arena.offsets),
        )
        return Segment(
            device=self.opened.device,
            tasks=tuple(ordered),
            buffers=tuple(buffers),
            offsets=arena.offsets,
            arena_nbytes=arena.nbytes,
            exports=exports - in_place,
            bases=bases,
            name=name,
            in_place=in_place,
            steady=frozenset(touched.intersection(steady)),
        )

    def seal(self, segment: Segment) -> Callable[[], SealedSegment]:
        """Return what makes instances of a segment, the device's own way or else launch by launch."""
        sealed = self.opened.runtime.seal(segment)
        if sealed is not None:
            return sealed
        return lambda: LaunchEach(self.memory, segment, self.load)

    def memory_use(self) -> MemoryUse:
        """Return what the device's memory is used for. Parameters that are gone have given theirs back."""
        self.parameters.sweep()
        return self.memory.use()

    def release_unused(self) -> None:
        """Give the device back what parameters that are gone have left, and what is kept for reuse."""
        self.parameters.sweep()
        self.memory.trim()

    def load(self, kernel: KernelDescriptor) -> Any:
        """Return a kernel as the runtime loads it. Source text is compiled once per device, however often it is used.

        Called with `lock` held, as all that uses the runtime.
        """
        if kernel.source is None:
            return self.opened.runtime.load(kernel)
        key = (kernel.name, kernel.source, kernel.parameters)
        if key not in self._loaded:
            self._loaded[key] = self.opened.runtime.load(kernel)
        return self._loaded[key]
