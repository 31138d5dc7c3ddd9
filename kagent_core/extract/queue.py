"""TaskQueue: the door between the extractor, which submits tasks, and the executor, which takes them."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable

from kagent_core.errors import ExecutionError
from kagent_core.specs import KernelTask


class TaskQueue:
    """A thread-safe queue of KernelTasks: the highest priority first, then in the order of submission.

    A queue ends in one of two ways: `close` (no more tasks will come) or `fail` (something broke; takers get the
    cause).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, KernelTask]] = []
        self._submitted = 0
        self._closed = False
        self._cause: BaseException | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            return len(self._heap)

    def submit(self, tasks: Iterable[KernelTask]) -> None:
        """Add tasks.

        Raises
        ------
        ExecutionError
            When the queue is closed or has failed.
        """
        with self._changed:
            self._raise_if_failed()
            if self._closed:
                raise ExecutionError("tasks were submitted to a queue that is closed")
            for task in tasks:
                heapq.heappush(self._heap, (-task.priority, self._submitted, task))
                self._submitted += 1
            self._changed.notify_all()

    def take(self, timeout: float | None = None) -> KernelTask | None:
        """Return the next task, waiting for one; None when the queue is closed and empty.

        Parameters
        ----------
        timeout
            Seconds to wait; None waits without limit.

        Raises
        ------
        ExecutionError
            When the queue has failed, with the cause.
        TimeoutError
            When no task came in time.
        """
        with self._changed:
            if not self._changed.wait_for(self._something_to_do, timeout):
                raise TimeoutError(f"no task came within {timeout} s")
            self._raise_if_failed()
            return heapq.heappop(self._heap)[2] if self._heap else None

    def close(self) -> None:
        """Say that no more tasks will come. Those that are queued can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Drop every queued task and give everyone who waits, now or later, the cause."""
        with self._changed:
            self._cause = cause
            self._heap.clear()
            self._changed.notify_all()

    def _something_to_do(self) -> bool:
        return bool(self._heap) or self._closed or self._cause is not None

    def _raise_if_failed(self) -> None:
        if self._cause is not None:
            raise ExecutionError(f"the task queue has failed: {self._cause}") from self._cause
