"""Which stream each task runs on, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagent_core.extract.hazards import HazardTracker, TransitiveReduction
from kagent_core.specs import KernelTask, MemRange

_ARENA = -100
"""Stands for the arena in hazards: no program has a buffer of this number."""


@dataclass(frozen=True)
class StreamPlan:
    """Streams and events of a segment's tasks, by position.

    Attributes
    ----------
    streams
        The stream of each task.
    waits
        For each task, the positions of tasks on other streams whose events its stream waits for first.
    recorded
        Positions of the tasks after which an event is recorded.
    """

    streams: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    recorded: frozenset[int]


def plan_streams(tasks: Sequence[KernelTask], offsets: Mapping[int, int], count: int) -> StreamPlan:
    """Spread independent chains of tasks over `count` streams.

    A task goes on the stream of a task that it waits for, if it is the first to follow it there; else on the stream
    with the fewest tasks. Buffers that take turns in the same bytes of the arena add hazards of their own: what is
    safe in one stream is not in two.

    Parameters
    ----------
    tasks
        In an order in which they could run one by one.
    offsets
        Byte offset in the arena of each buffer that lies in it.
    count
        Number of streams.
    """
    dependencies = physical_dependencies(tasks, offsets)
    last: list[int | None] = [None] * count
    load = [0] * count
    streams: list[int] = []
    waits: list[tuple[int, ...]] = []
    for position, needed in enumerate(dependencies):
        stream = next((streams[d] for d in reversed(needed) if last[streams[d]] == d), None)
        if stream is None:
            stream = min(range(count), key=lambda s: (load[s], s))
        streams.append(stream)
        load[stream] += 1
        last[stream] = position
        waits.append(tuple(d for d in needed if streams[d] != stream))
    return StreamPlan(tuple(streams), tuple(waits), frozenset(d for needed in waits for d in needed))


def physical_dependencies(tasks: Sequence[KernelTask], offsets: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return, by position, the earlier tasks that each must wait for, with buffers at their places in the arena."""
    hazards, reduction = HazardTracker(), TransitiveReduction()

    def place(span: MemRange) -> MemRange:
        offset = offsets.get(span.buffer)
        return span if offset is None else MemRange(_ARENA, offset + span.offset, span.nbytes)

    found: list[tuple[int, ...]] = []
    for position, task in enumerate(tasks):
        needed = hazards.add(position, map(place, task.reads), map(place, task.writes))
        found.append(reduction.reduce(position, needed))
    return found
