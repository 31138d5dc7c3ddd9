"""ExecutorAgent: one per device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kagent_core.device import OpenDevice, SealedSegment, Segment
from kagent_core.execute.arena import plan_arena
from kagent_core.execute.launch import LaunchEach
from kagent_core.extract.queue import TaskQueue, in_order
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import BufferSpec, KernelDescriptor, TensorSpec

log = get_logger("execute")


class ExecutorAgent:
    """Takes tasks from queues, orders them, gives them memory and runs them, on one device.

    Parameters
    ----------
    opened
        The device.
    """

    def __init__(self, opened: OpenDevice) -> None:
        self.opened = opened
        self.lock = threading.RLock()
        self._loaded: dict[tuple[Any, ...], Any] = {}

    def prepare(
        self,
        queue: TaskQueue,
        buffers: Sequence[BufferSpec],
        exports: frozenset[int],
        bases: Mapping[int, TensorSpec],
        name: str,
    ) -> Segment:
        """Take every task from a closed queue and return them ordered, with an arena planned for their memory.

        Raises
        ------
        ExecutionError
            When the queue has failed, or the tasks' dependencies cannot be met.
        """
        ordered = in_order(queue)
        arena = plan_arena(ordered, buffers, exports, keep_exports=not self.opened.runtime.host_memory)
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
            exports=exports,
            bases=bases,
            name=name,
        )

    def seal(self, segment: Segment) -> Callable[[], SealedSegment]:
        """Return what makes instances of a segment, the device's own way or else launch by launch."""
        sealed = self.opened.runtime.seal(segment)
        if sealed is not None:
            return sealed
        return lambda: LaunchEach(self.opened.runtime, segment, self.lock, self.load)

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
