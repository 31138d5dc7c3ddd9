"""The streams of a device: launches on different ones may run side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STREAMS = 4
"""Streams of a device. Models have few chains that do not depend on each other, and each fills much of a GPU."""


class Streams:
    """Streams of which the first is the one where memory is allocated, copied and freed.

    The others start where the first one is, and are gathered into it before anybody waits for it.

    A stream of somebody else's can be the first one for a while: what is launched then comes after all that it was
    given, and what it is given later comes after that. Its owner need not be waited for, nor wait.

    Parameters
    ----------
    device
        cuda-core's.
    count
        How many.
    """

    def __init__(self, device: Any, count: int = STREAMS) -> None:
        self._all = [device.create_stream() for _ in range(count)]
        self._own = self._all[0]
        self._apart: set[int] = set()
        self._events: list[Any] = []
        self._recorded: list[Any] = []
        self._borrowed: tuple[int, Any] | None = None
        self._left: Any = None
        self._behind = False

    @property
    def first(self) -> Any:
        """The stream of memory, with all that was started on the others before what comes now."""
        self._catch_up()
        for number in sorted(self._apart):
            self._all[0].wait(self._record(number))
        self._apart.clear()
        return self._all[0]

    def on(self, number: int) -> Any:
        """Return a stream, where all that the first one has been given until it was joined last is ordered before."""
        self._catch_up()
        if number and number not in self._apart:
            self._all[number].wait(self._record(0))
            self._apart.add(number)
        return self._all[number]

    def borrow(self, handle: int, stream_of: Callable[[int], Any]) -> None:
        """Make somebody else's stream the first one, after all that was started before.

        Parameters
        ----------
        handle
            The driver's.
        stream_of
            Makes cuda-core's stream of a handle.
        """
        if self._is_borrowing():  # somebody failed in between
            self.give_back()
        if self._borrowed is None or self._borrowed[0] != handle:
            before = self._left if self._behind else self._joined()
            self._borrowed = handle, stream_of(handle)
            self._borrowed[1].wait(before)
        elif not self._behind:  # else nothing was started since but on that stream itself
            self._borrowed[1].wait(self._joined())
        self._behind = False
        self._all[0] = self._borrowed[1]

    def give_back(self) -> bool:
        """Let the owner of the borrowed stream go on, after what was started; False where none is borrowed now.

        The stream of our own stays behind until it is used: its owner may never be, and may destroy the other one.
        """
        if not self._is_borrowing():
            return False
        self._left = self.first.record(self._left) if self._left is not None else self.first.record()
        self._behind = True
        self._all[0] = self._own
        self._reuse_events()
        return True

    def record_event(self, number: int) -> Any:
        """Return an event that happens when the stream has come so far; it is good until `synchronize`."""
        self.on(number)
        return self._record(number)

    def wait_event(self, number: int, event: Any) -> None:
        """Let a stream wait for an event."""
        self.on(number).wait(event)

    def synchronize(self) -> None:
        """Wait until every stream is done. A borrowed one is given back."""
        self.first.sync()
        self._all[0] = self._own
        self._reuse_events()

    def _is_borrowing(self) -> bool:
        return self._all[0] is not self._own

    def _catch_up(self) -> None:
        """Let our own first stream wait for what was started on a borrowed one."""
        if self._behind:
            self._behind = False
            self._own.wait(self._left)

    def _joined(self) -> Any:
        """Return an event that happens when all that was started has finished."""
        assert self.first is self._all[0]
        return self._record(0)

    def _reuse_events(self) -> None:
        # who waits for an event waits for what it was recorded for last when that was asked for
        self._events += self._recorded
        self._recorded.clear()

    def _record(self, number: int) -> Any:
        # making an event costs more than recording one
        event = self._all[number].record(self._events.pop()) if self._events else self._all[number].record()
        self._recorded.append(event)
        return event
