"""The streams of a device: launches on different ones may run side by side."""

from __future__ import annotations

from typing import Any

STREAMS = 4
"""Streams of a device. Models have few chains that do not depend on each other, and each fills much of a GPU."""


class Streams:
    """Streams of which the first is the one where memory is allocated, copied and freed.

    The others start where the first one is, and are gathered into it before anybody waits for it.

    Parameters
    ----------
    device
        cuda-core's.
    count
        How many.
    """

    def __init__(self, device: Any, count: int = STREAMS) -> None:
        self._all = [device.create_stream() for _ in range(count)]
        self._apart: set[int] = set()
        self._events: list[Any] = []
        self._recorded: list[Any] = []

    @property
    def first(self) -> Any:
        """The stream of memory, with all that was started on the others before what comes now."""
        for number in sorted(self._apart):
            self._all[0].wait(self._record(number))
        self._apart.clear()
        return self._all[0]

    def on(self, number: int) -> Any:
        """Return a stream, where all that the first one has been given until it was joined last is ordered before."""
        if number and number not in self._apart:
            self._all[number].wait(self._record(0))
            self._apart.add(number)
        return self._all[number]

    def record_event(self, number: int) -> Any:
        """Return an event that happens when the stream has come so far; it is good until `synchronize`."""
        self.on(number)
        return self._record(number)

    def wait_event(self, number: int, event: Any) -> None:
        """Let a stream wait for an event."""
        self.on(number).wait(event)

    def synchronize(self) -> None:
        """Wait until every stream is done."""
        self.first.sync()
        self._events += self._recorded
        self._recorded.clear()

    def _record(self, number: int) -> Any:
        # making an event costs more than recording one
        event = self._all[number].record(self._events.pop()) if self._events else self._all[number].record()
        self._recorded.append(event)
        return event
