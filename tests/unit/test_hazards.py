"""Hazards: which tasks wait for which, checked against a walk over every byte."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.extract import hazards
from kagent_core.extract.hazards import RANDOM_STATE, SIDE_EFFECTS, HazardTracker, TransitiveReduction
from kagent_core.specs import MemRange

from .builders import run_order, task

BUFFERS, NBYTES = 3, 24

ranges = st.builds(
    lambda buffer, start, length: MemRange(buffer, start, min(length, NBYTES - start)),
    st.integers(0, BUFFERS - 1),
    st.integers(0, NBYTES - 1),
    st.integers(0, 12),
)
accesses = st.tuples(st.lists(ranges, max_size=3), st.lists(ranges, max_size=2))
programs = st.lists(accesses, max_size=25)


class ByteWalk:
    """The oracle: last writer and the readers since of every single byte."""

    def __init__(self):
        self.writer = {}
        self.readers = {}
        self.last = {}

    def add(self, number, reads, writes):
        found = {self.last.get(r.buffer) for r in reads if r.nbytes == 0}  # the buffer must be there
        self.last.update({w.buffer: number for w in writes})
        read = {(r.buffer, at) for r in reads for at in range(r.offset, r.end)}
        written = {(w.buffer, at) for w in writes for at in range(w.offset, w.end)}
        for byte in read | written:  # read after write, write after write
            found.add(self.writer.get(byte))
        for byte in written:  # write after read
            found |= self.readers.get(byte, set())
        for byte in read:
            self.readers.setdefault(byte, set()).add(number)
        for byte in written:
            self.writer[byte] = number
            self.readers[byte] = set()
        return tuple(sorted(found - {None, number}))


def dependencies(program):
    tracker = HazardTracker()
    return [tracker.add(number, *accessed) for number, accessed in enumerate(program)]


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (("w", 0, 8), ("r", 4, 8), True),  # read after write
        (("r", 0, 8), ("w", 7, 1), True),  # write after read
        (("w", 0, 8), ("w", 0, 1), True),  # write after write
        (("r", 0, 8), ("r", 0, 8), False),
        (("w", 0, 8), ("r", 8, 8), False),  # neighbours share no byte
        (("w", 8, 8), ("w", 0, 8), False),
        (("w", 0, 0), ("r", 0, 8), False),  # a range without bytes
        (("w", 0, 8), ("w", 4, 0), False),
    ],
)
def test_the_three_hazards(first, second, waits):
    tracker = HazardTracker()
    found = ()
    for number, (kind, offset, nbytes) in enumerate((first, second)):
        span = [MemRange(5, offset, nbytes)]
        found = tracker.add(number, *((span, []) if kind == "r" else ([], span)))
    assert found == ((0,) if waits else ())


def test_the_same_bytes_of_another_buffer_are_no_hazard():
    tracker = HazardTracker()
    tracker.add(0, [], [MemRange(1, 0, 8)])
    assert tracker.add(1, [MemRange(2, 0, 8)], []) == ()


def test_a_task_does_not_wait_for_itself():
    tracker = HazardTracker()
    span = MemRange(1, 0, 8)
    assert tracker.add(0, [span, span], [span, MemRange(1, 4, 8)]) == ()
    assert tracker.add(1, [span], [span]) == (0,)


def test_an_overwritten_writer_is_not_waited_for_again():
    tracker = HazardTracker()
    span = MemRange(1, 0, 8)
    tracker.add(0, [], [span])
    tracker.add(1, [], [span])
    assert tracker.add(2, [span], []) == (1,)


@pytest.mark.parametrize("state", [RANDOM_STATE, SIDE_EFFECTS])
def test_random_draws_and_side_effects_keep_their_order(state):
    tracker = HazardTracker()
    found = [tracker.add(number, [state], [state]) for number in range(3)]
    assert found == [(), (0,), (1,)]
    assert tracker.add(3, [MemRange(0, 0, 1)], []) == ()


@settings(max_examples=300, deadline=None)
@given(programs)
def test_equals_a_walk_over_every_byte(program):
    oracle = ByteWalk()
    assert dependencies(program) == [oracle.add(number, *accessed) for number, accessed in enumerate(program)]


def run(program, order):
    """Run tasks on real memory: each writes a value that depends on all that it reads."""
    memory = [bytearray(NBYTES) for _ in range(BUFFERS)]
    seen = {}
    for number in order:
        reads, writes = program[number]
        seen[number] = tuple(bytes(memory[r.buffer][r.offset : r.end]) for r in reads)
        value = zlib.crc32(repr((number, seen[number])).encode()) & 0xFF
        for span in writes:
            memory[span.buffer][span.offset : span.end] = bytes([value]) * span.nbytes
    return memory, seen


@settings(max_examples=200, deadline=None)
@given(programs, st.randoms(use_true_random=False))
def test_any_order_that_keeps_the_dependencies_gives_the_same_memory(program, randoms):
    priorities = [randoms.randint(-3, 3) for _ in program]
    tasks = [
        task(number, depends_on=depends_on, priority=priorities[number])
        for number, depends_on in enumerate(dependencies(program))
    ]
    order = [each.id for each in run_order(tasks)]
    assert sorted(order) == list(range(len(program)))
    assert run(program, order) == run(program, range(len(program)))


def test_orders_do_differ_from_program_order():
    """The property above would hold of an order that never changes anything, too."""
    tasks = [task(n, priority=n) for n in range(4)]
    assert [each.id for each in run_order(tasks)] == [3, 2, 1, 0]


def pieces_visited(monkeypatch, program):
    """How many pieces of buffers' histories the tracker looks at."""
    visited = 0
    touched = hazards._BufferHistory.touched

    def counted(history, start, end):
        nonlocal visited
        found = touched(history, start, end)
        visited += len(found)
        return found

    monkeypatch.setattr(hazards._BufferHistory, "touched", counted)
    dependencies(program)
    return visited


def chain(length):
    """Each task reads what the one before has made."""
    return [([MemRange(n, 0, 64)], [MemRange(n + 1, 0, 64)]) for n in range(length)]


def in_place(length):
    """All tasks write pieces of one buffer, over and over."""
    chosen = random.Random(0)
    spans = [MemRange(0, 64 * chosen.randrange(16), 64) for _ in range(length)]
    return [([span], [span]) for span in spans]


def read_by_all(length):
    """A parameter that every task reads, in which nobody writes."""
    return [([MemRange(0, 0, 64)], [MemRange(n + 1, 0, 64)]) for n in range(length)]


@pytest.mark.parametrize("shape", [chain, in_place, read_by_all])
def test_ten_thousand_tasks_take_linear_work(monkeypatch, shape):
    assert pieces_visited(monkeypatch, shape(10_000)) <= 4 * 10_000


# -- leaving out what other dependencies imply


def reduced(dependencies, limit=30_000):
    reduction = TransitiveReduction(limit)
    return [reduction.reduce(number, found) for number, found in enumerate(dependencies)]


def ancestors(dependencies):
    found = []
    for direct in dependencies:
        found.append(set(direct).union(*(found[number] for number in direct)))
    return found


@settings(max_examples=200, deadline=None)
@given(programs)
def test_the_reduction_keeps_who_waits_for_whom_and_nothing_more(program):
    full = dependencies(program)
    kept = reduced(full)
    assert ancestors(kept) == ancestors(full)
    for number, direct in enumerate(kept):
        assert direct == tuple(sorted(direct))
        for dependency in direct:  # without it, somebody would no longer be waited for
            fewer = [*kept[:number], tuple(d for d in direct if d != dependency)]
            assert dependency not in ancestors(fewer)[number]


def test_past_the_limit_dependencies_come_as_they_are():
    full = [(), (0,), (0, 1), (0, 1, 2), (0, 3)]
    assert reduced(full) == [(), (0,), (1,), (2,), (3,)]
    kept = reduced(full, limit=2)
    assert kept == [(), (0,), (0, 1), (0, 1, 2), (0, 3)]


def test_a_dependency_on_a_task_of_another_segment_stays():
    reduction = TransitiveReduction()
    assert reduction.reduce(8, (3,)) == (3,)
    assert reduction.reduce(9, (3, 8)) == (3, 8)


def test_a_range_without_bytes_waits_for_who_made_its_buffer() -> None:
    tracker = HazardTracker()
    assert tracker.add(0, reads=[], writes=[MemRange(1, 0, 0)]) == ()
    assert tracker.add(1, reads=[MemRange(1, 0, 0)], writes=[MemRange(2, 0, 0)]) == (0,)
    assert tracker.add(2, reads=[MemRange(2, 0, 0), MemRange(3, 0, 0)], writes=[MemRange(4, 0, 8)]) == (1,)
    assert tracker.add(3, reads=[MemRange(4, 4, 0)], writes=[]) == (2,)
