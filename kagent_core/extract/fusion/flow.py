"""The data flow of some calls: who reads whose results, and what must come before what."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence

from kagent_core.extract.hazards import HazardTracker
from kagent_core.extract.ranges import memory_ranges
from kagent_core.specs import MemRange, OpCall, TensorSpec


class DataFlow:
    """What the calls of a request have to do with each other. Calls go by their position.

    Parameters
    ----------
    calls
        In a valid order.
    kept
        Buffers that somebody reads when all the calls have run; None when that is not known, which is taken as all.

    Attributes
    ----------
    producers
        For each call, who wrote what it reads, with the tensors that it reads of each.
    readers
        For each call, who reads what it wrote.
    """

    def __init__(self, calls: Sequence[OpCall], kept: Collection[int] | None = None) -> None:
        self.calls = tuple(calls)
        self._kept = kept
        self.producers: list[dict[int, list[TensorSpec]]] = []
        self.readers: list[list[int]] = [[] for _ in calls]
        self._writers = _Writers()
        self._mixed: dict[tuple[int, int], int] = {}
        for position, call in enumerate(self.calls):
            self._add_reads(position, call)
            for spec in call.outputs:
                self._writers.add(position, spec)

    @functools.cached_property
    def followers(self) -> list[set[int]]:
        """For each call, the later ones that must wait for it: readers, and writers of what it reads or wrote."""
        found: list[set[int]] = [set() for _ in self.calls]
        hazards = HazardTracker()
        for position, call in enumerate(self.calls):
            for earlier in hazards.add(position, *memory_ranges((call,))):
                found[earlier].add(position)
        return found

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield every pair of neighbours (producer, consumer), by consumer."""
        for consumer, producers in enumerate(self.producers):
            for producer in sorted(producers):
                yield producer, consumer

    def is_kept(self, position: int) -> bool:
        """Whether somebody reads what a call makes when all the calls have run."""
        return self._kept is None or any(spec.buffer in self._kept for spec in self.calls[position].fresh_results)

    def other_writer(self, producer: int, consumer: int) -> int | None:
        """Return who else wrote to a tensor that the consumer reads from the producer, if anybody did."""
        return self._mixed.get((producer, consumer))

    def overwriters(self, position: int) -> list[int]:
        """Return the later calls that write what a call reads, or wrote."""
        return sorted(self.followers[position].difference(self.readers[position]))

    def _add_reads(self, position: int, call: OpCall) -> None:
        producers: dict[int, list[TensorSpec]] = {}
        for spec in call.inputs:
            writers = self._writers.of(spec)
            for writer in writers:
                producers.setdefault(writer, []).append(spec)
                for other in writers:
                    if other != writer:
                        self._mixed[writer, position] = other
        for producer in producers:
            self.readers[producer].append(position)
        self.producers.append(producers)


class _Writers:
    """Who wrote which bytes of each buffer, the latest last."""

    def __init__(self) -> None:
        self._written: dict[int, list[tuple[int, TensorSpec, tuple[MemRange, ...]]]] = {}

    def add(self, position: int, spec: TensorSpec) -> None:
        self._written.setdefault(spec.buffer, []).append((position, spec, spec.ranges))

    def of(self, spec: TensorSpec) -> list[int]:
        """Return the writers whose bytes a tensor holds, the latest first.

        A tensor without elements has its buffer's last writer: it reads nothing, but the buffer must be there.
        """
        if spec.numel == 0:
            return [position for position, _, _ in self._written.get(spec.buffer, ())[-1:]]
        found: list[int] = []
        ranges: tuple[MemRange, ...] = ()
        for position, written, pieces in reversed(self._written.get(spec.buffer, ())):
            if written == spec:
                overlaps = covers = True
            else:
                ranges = ranges or spec.ranges
                overlaps = any(piece.overlaps(span) for piece in pieces for span in ranges)
                covers = all(_covered(span, pieces) for span in ranges)
            if overlaps and position not in found:
                found.append(position)
            if overlaps and covers:
                break
        return found


def _covered(span: MemRange, pieces: Sequence[MemRange]) -> bool:
    return any(piece.offset <= span.offset and span.end <= piece.end for piece in pieces)


def neighbours(calls: Sequence[OpCall]) -> Iterator[tuple[int, int]]:
    """Yield each pair (producer's id, consumer's id): the consumer reads bytes that the producer wrote last."""
    flow = DataFlow(calls)
    for producer, consumer in flow.pairs():
        yield flow.calls[producer].id, flow.calls[consumer].id
