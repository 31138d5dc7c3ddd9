"""Hazards: which tasks must wait for which, from the bytes that they touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from kagent_core.specs import MemRange

RANDOM_STATE = MemRange(-1, 0, 1)
"""Stands for the random number generator: operators that draw from it keep their order."""

SIDE_EFFECTS = MemRange(-2, 0, 1)
"""Stands for the world outside: operators without results, such as assertions, keep their order."""


class _Piece:
    """Bytes of a buffer with one common history."""

    __slots__ = ("end", "readers", "start", "writer")

    def __init__(self, start: int, end: int, writer: int | None, readers: list[int]) -> None:
        self.start = start
        self.end = end
        self.writer = writer
        self.readers = readers


class _BufferHistory:
    """Last writer and the readers since, for every byte of a buffer: disjoint pieces in order."""

    __slots__ = ("pieces", "starts")

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.starts: list[int] = []

    def touched(self, start: int, end: int) -> list[_Piece]:
        """Return the pieces that make up [start, end), split and added so that they fit exactly."""
        self._split(start)
        self._split(end)
        low, high = bisect_left(self.starts, start), bisect_left(self.starts, end)
        result: list[_Piece] = []
        position = start
        for piece in self.pieces[low:high]:
            if piece.start > position:
                result.append(_Piece(position, piece.start, None, []))
            result.append(piece)
            position = piece.end
        if position < end:
            result.append(_Piece(position, end, None, []))
        self.pieces[low:high] = result
        self.starts[low:high] = [piece.start for piece in result]
        return result

    def _split(self, at: int) -> None:
        index = bisect_right(self.starts, at) - 1
        if index < 0:
            return
        piece = self.pieces[index]
        if piece.start < at < piece.end:
            self.pieces.insert(index + 1, _Piece(at, piece.end, piece.writer, list(piece.readers)))
            self.starts.insert(index + 1, at)
            piece.end = at

    def replace(self, start: int, end: int, writer: int) -> None:
        """Record that one task wrote all of [start, end), whose pieces `touched` has just made fit."""
        low, high = bisect_left(self.starts, start), bisect_left(self.starts, end)
        self.pieces[low:high] = [_Piece(start, end, writer, [])]
        self.starts[low:high] = [start]


class HazardTracker:
    """Finds read-after-write, write-after-read and write-after-write hazards, task by task in program order.

    A range without bytes waits for its buffer's last writer: it reads nothing, but the buffer must be there.

    Examples
    --------
    >>> tracker = HazardTracker()
    >>> tracker.add(0, reads=[], writes=[MemRange(7, 0, 64)])
    ()
    >>> tracker.add(1, reads=[MemRange(7, 0, 16)], writes=[MemRange(8, 0, 16)])
    (0,)
    >>> tracker.add(2, reads=[], writes=[MemRange(7, 32, 32)])
    (0,)
    >>> tracker.add(3, reads=[], writes=[MemRange(7, 0, 8)])
    (0, 1)
    """

    def __init__(self) -> None:
        self._histories: dict[int, _BufferHistory] = {}
        self._last_writers: dict[int, int] = {}

    def add(self, task: int, reads: Iterable[MemRange], writes: Iterable[MemRange]) -> tuple[int, ...]:
        """Record a task and return the ids of the earlier tasks that it must wait for, ascending."""
        found: set[int] = set()
        for span in reads:
            if span.nbytes <= 0 and span.buffer in self._last_writers:
                found.add(self._last_writers[span.buffer])
            for piece in self._pieces(span):
                if piece.writer is not None:
                    found.add(piece.writer)
                piece.readers.append(task)
        for span in writes:
            for piece in self._pieces(span):
                if piece.writer is not None:
                    found.add(piece.writer)
                found.update(piece.readers)
            self._last_writers[span.buffer] = task
            if span.nbytes > 0:
                self._histories[span.buffer].replace(span.offset, span.end, task)
        found.discard(task)
        return tuple(sorted(found))

    def _pieces(self, span: MemRange) -> list[_Piece]:
        if span.nbytes <= 0:
            return []
        history = self._histories.setdefault(span.buffer, _BufferHistory())
        return history.touched(span.offset, span.end)


class TransitiveReduction:
    """Leaves out the dependencies that others imply: if c waits for b and b for a, c need not wait for a.

    Each task's ancestors are one bit set in a Python integer, so that 10,000 tasks cost milliseconds and about 12 MiB
    while it lasts. Past `limit` tasks dependencies are returned as they come: redundant, but right.

    Examples
    --------
    >>> reduction = TransitiveReduction()
    >>> reduction.reduce(0, ()), reduction.reduce(1, (0,)), reduction.reduce(2, (0, 1))
    ((), (0,), (1,))
    """

    def __init__(self, limit: int = 30_000) -> None:
        self._limit = limit
        self._ancestors: dict[int, int] = {}
        self._bits: dict[int, int] = {}

    def reduce(self, task: int, dependencies: tuple[int, ...]) -> tuple[int, ...]:
        """Return the dependencies of a task, ascending, without those that the others imply.

        Tasks must come in an order in which each follows those it depends on.
        """
        if len(self._bits) >= self._limit:
            return dependencies
        covered = 0
        kept: list[int] = []
        for dependency in sorted(dependencies, key=lambda number: self._bits.get(number, -1), reverse=True):
            bit = self._bits.get(dependency)
            if bit is None:  # of an earlier segment: nothing is known of it
                kept.append(dependency)
            elif not covered >> bit & 1:
                kept.append(dependency)
                covered |= self._ancestors[dependency] | 1 << bit
        self._bits[task] = len(self._bits)
        self._ancestors[task] = covered
        return tuple(sorted(kept))
