"""In-order queues side by side, which wait for one another's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyopencl as cl


class OrderedQueue:
    """One in-order queue, of which others wait for single commands.

    Nothing is enqueued for an event that is only waited for: the next kernel takes it into its wait list, and the
    event of the last kernel stands for all that came before it.

    Parameters
    ----------
    context
        The device's.
    device
        Whose queue it is.

    Attributes
    ----------
    queue
        As pyopencl has it.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self.queue = cl.CommandQueue(context, device)
        self._awaited: list[cl.Event] = []
        self._last: cl.Event | None = None

    def launch(self, kernel: cl.Kernel, items: tuple[int, ...], block: tuple[int, ...]) -> None:
        """Enqueue a kernel, behind the events that this queue is to wait for."""
        awaited, self._awaited = self._awaited, []
        self._last = cl.enqueue_nd_range_kernel(self.queue, kernel, items, block, wait_for=awaited)

    def call(self, function: Callable[[], object]) -> None:
        """Call what enqueues its work itself, and takes no events."""
        if self._awaited:
            self._barrier()
        function()
        self._last = None

    def record(self) -> cl.Event:
        """Return an event that happens when everything enqueued so far has finished."""
        event = self._last
        if event is None or self._awaited:
            event = self._barrier()
        self.queue.flush()  # else another queue could wait for what is never sent to the device
        return event

    def wait(self, event: cl.Event) -> None:
        """Let what is enqueued from here on wait for an event of another queue."""
        self._awaited.append(event)

    def finish(self) -> None:
        """Wait, in the calling thread, for everything."""
        self._awaited, self._last = [], None
        self.queue.finish()

    def _barrier(self) -> Any:
        awaited, self._awaited = self._awaited, []
        self._last = cl.enqueue_barrier(self.queue, wait_for=awaited)
        return self._last
