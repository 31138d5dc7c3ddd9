"""TaskQueue: the door between the extractor, which submits tasks, and the executor, which takes them."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kagent_core.errors import ExecutionError
from kagent_core.specs import KernelTask


class TaskQueue:
    """A thread-safe queue of KernelTasks that gives out only what is ready.

    A task is ready when every task that it depends on, and that was submitted before or with it, is finished. Among
    those that are ready the highest priority goes first, then the order of submission.

    A queue ends in one of two ways: `close` (no more tasks will come) or `fail` (something broke: whoever waits, now
    or later, gets the cause, until `restart`).

    Parameters
    ----------
    limit
        Most tasks that are submitted and not taken; `submit` waits while there are so many. None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"a queue's limit is at least 1, not {limit}")
        self._limit = limit
        self._changed = threading.Condition()
        self._cause: BaseException | None = None
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._ready: list[tuple[int, int, KernelTask]] = []
        self._blocked: dict[int, tuple[int, KernelTask]] = {}
        self._missing: dict[int, int] = {}
        self._dependents: dict[int, list[int]] = {}
        self._open: set[int] = set()  # submitted and not finished
        self._submitted = 0

    def __len__(self) -> int:
        """How many tasks are submitted and not taken."""
        with self._changed:
            return len(self._ready) + len(self._blocked)

    def submit(self, tasks: Iterable[KernelTask], timeout: float | None = None) -> None:
        """Add tasks, waiting while the queue is full.

        Parameters
        ----------
        tasks
            A dependency on a task that the queue has never seen is taken as met.
        timeout
            Seconds to wait for room for each; None waits without limit.

        Raises
        ------
        ExecutionError
            When the queue is closed or has failed.
        TimeoutError
            When it stayed full; the tasks before are in it.
        """
        batch = list(tasks)
        with self._changed:
            self._raise_if_ended()
            if self._limit is None:
                self._enter(batch)
                return
            for task in batch:
                if not self._changed.wait_for(self._room_or_end, timeout):
                    raise TimeoutError(f"the task queue stayed full ({self._limit} tasks) for {timeout} s")
                self._raise_if_ended()
                self._enter([task])

    def take(self, timeout: float | None = None) -> KernelTask | None:
        """Return the next task that is ready, waiting for one; None when the queue is closed and all are taken.

        Parameters
        ----------
        timeout
            Seconds to wait; None waits without limit.

        Raises
        ------
        ExecutionError
            When the queue has failed, with the cause; when it is closed and what is left waits in a circle.
        TimeoutError
            When no task became ready in time.
        """
        with self._changed:
            if not self._changed.wait_for(self._something_to_do, timeout):
                raise TimeoutError(f"no task came within {timeout} s")
            self._raise_if_failed()
            if self._ready:
                task = heapq.heappop(self._ready)[2]
                self._changed.notify_all()
                return task
            if self._blocked:
                stuck = ", ".join(task.name for _, task in self._blocked.values())
                raise ExecutionError(f"these tasks depend on each other in a circle: {stuck}")
            return None

    def finish(self, task: KernelTask) -> None:
        """Say that a task that was taken is done: what waits for it may become ready."""
        with self._changed:
            self._open.discard(task.id)
            for dependent in self._dependents.pop(task.id, ()):
                self._missing[dependent] -= 1
                if self._missing[dependent] == 0:
                    del self._missing[dependent]
                    order, blocked = self._blocked.pop(dependent)
                    heapq.heappush(self._ready, (-blocked.priority, order, blocked))
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait until every task that was submitted is finished.

        Raises
        ------
        ExecutionError
            When the queue fails first, with the cause.
        TimeoutError
            When they are not finished in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open or self._cause is not None, timeout):
                raise TimeoutError(f"{len(self._open)} tasks were not finished within {timeout} s")
            self._raise_if_failed()

    def close(self) -> None:
        """Say that no more tasks will come. Those that are there can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Drop every task and give everyone who waits, now or later, the cause."""
        with self._changed:
            if self._cause is None:
                self._cause = cause
            self._reset()
            self._changed.notify_all()

    def restart(self) -> None:
        """Take a queue that was closed or has failed into use again, empty."""
        with self._changed:
            self._cause = None
            self._closed = False
            self._reset()
            self._changed.notify_all()

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Mark a block as the work of a taker: if it ends by an exception, the queue fails with it at once."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    # -- inside, with the lock held

    def _enter(self, batch: list[KernelTask]) -> None:
        self._open.update(task.id for task in batch)
        for task in batch:
            missing = {d for d in task.depends_on if d in self._open}
            order = self._submitted
            self._submitted += 1
            if not missing:
                heapq.heappush(self._ready, (-task.priority, order, task))
                continue
            self._blocked[task.id] = (order, task)
            self._missing[task.id] = len(missing)
            for dependency in missing:
                self._dependents.setdefault(dependency, []).append(task.id)
        self._changed.notify_all()

    def _room_or_end(self) -> bool:
        full = self._limit is not None and len(self._ready) + len(self._blocked) >= self._limit
        return not full or self._closed or self._cause is not None

    def _something_to_do(self) -> bool:
        running = len(self._open) > len(self._ready) + len(self._blocked)
        return bool(self._ready) or self._cause is not None or (self._closed and not (self._blocked and running))

    def _raise_if_failed(self) -> None:
        if self._cause is not None:
            raise ExecutionError(f"the task queue has failed: {self._cause}") from self._cause

    def _raise_if_ended(self) -> None:
        self._raise_if_failed()
        if self._closed:
            raise ExecutionError("tasks were submitted to a queue that is closed")


def in_order(queue: TaskQueue) -> list[KernelTask]:
    """Take every task of a closed queue, each finished before the next is taken: the order in which they can run.

    Raises
    ------
    ExecutionError
        As `TaskQueue.take`.
    """
    ordered: list[KernelTask] = []
    while (task := queue.take()) is not None:
        ordered.append(task)
        queue.finish(task)
    return ordered
