"""The pool of a device's memory."""

from __future__ import annotations

import random
import threading

import pytest

from kagent_core.errors import ExecutionError
from kagent_core.execute.pool import SMALL_NBYTES, DeviceMemory, spelled_nbytes
from kagent_core.specs import Device
from kagent_core.testing.fake import FakeRuntime

FAKE = Device("fake", 0)


class Idle:
    """Stands for a plan with instances that idle."""

    def __init__(self, memory, since, *blocks):
        self.memory = memory
        self.since = since
        self.blocks = list(blocks)
        memory.register(self)

    def idle_since(self):
        return self.since if self.blocks else None

    def evict(self):
        if not self.blocks:
            return False
        self.memory.give(self.blocks.pop())
        return True


def make(limit=None, runtime=None):
    runtime = runtime or FakeRuntime()
    return DeviceMemory(runtime, FAKE, threading.RLock(), limit), runtime


def take(memory, nbytes, purpose="inputs"):
    return memory.take(nbytes, purpose, "somebody")


def test_what_is_given_back_is_used_again():
    memory, runtime = make()
    block = take(memory, 5000)
    memory.give(block)
    assert runtime.live == 1
    again = take(memory, 4900, "parameters")
    assert again.buffer is block.buffer
    assert runtime.calls["allocate"] == 1
    assert memory.use().by_purpose == {"inputs": 0, "parameters": 5000}


@pytest.mark.parametrize(("kept", "wanted", "again"), [(5000, 5001, False), (9001, 8000, False), (9000, 8000, True)])
def test_a_block_serves_what_fits_in_it_and_fills_most_of_it(kept, wanted, again):
    memory, runtime = make()
    memory.give(take(memory, kept))
    block = take(memory, wanted)
    assert block.nbytes >= wanted
    assert (runtime.calls["allocate"] == 1) == again


def test_a_small_block_serves_whatever_fits():
    memory, runtime = make()
    memory.give(take(memory, SMALL_NBYTES))
    take(memory, 1)
    assert runtime.calls["allocate"] == 1


def test_the_block_that_fits_best_is_taken():
    memory, _ = make()
    blocks = [take(memory, nbytes) for nbytes in (8800, 8100, 8400)]
    for block in blocks:
        memory.give(block)
    assert take(memory, 8000) is blocks[1]
    assert take(memory, 8000) is blocks[2]


def test_nothing_is_allocated_as_a_byte():
    memory, _ = make()
    assert take(memory, 0).nbytes == 1


def test_counts():
    memory, _ = make()
    one, two = take(memory, 1000), take(memory, 2000, "intermediates")
    memory.give(one)
    use = memory.use()
    assert (use.in_use_nbytes, use.cached_nbytes, use.peak_nbytes) == (2000, 1000, 3000)
    memory.give(two)
    memory.trim()
    use = memory.use()
    assert (use.in_use_nbytes, use.cached_nbytes, use.peak_nbytes) == (0, 0, 3000)


def test_no_more_is_kept_than_was_in_use_at_once():
    memory, runtime = make()
    for nbytes in range(1000, 20_000, 2000):  # none of them fits the next one
        memory.give(take(memory, nbytes))
        assert memory.use().cached_nbytes <= memory.use().peak_nbytes
    assert runtime.live < 10


def test_over_the_limit_what_is_kept_goes_first():
    memory, runtime = make(limit=10_000)
    memory.give(take(memory, 6000))
    kept = Idle(memory, 0.0, take(memory, 3000))
    take(memory, 7000)
    assert kept.blocks
    assert runtime.live == 2
    assert memory.use().cached_nbytes == 0


def test_then_what_idles_longest_goes_and_no_more_than_is_needed():
    memory, _ = make(limit=10_000)
    plans = [Idle(memory, since, take(memory, 3000)) for since in (2.0, 1.0, 3.0)]
    last = Idle(memory, 0.0)
    memory.register_last(last.evict)
    last.blocks.append(take(memory, 1000))
    last.since = None
    take(memory, 5000)
    assert [bool(plan.blocks) for plan in plans] == [False, False, True]
    assert last.blocks
    take(memory, 4000)
    assert not plans[2].blocks
    with pytest.raises(
        ExecutionError, match=r"fake:0 gave no 5000 bytes for the inputs of somebody: the limit is 9\.8 KiB"
    ):
        take(memory, 5000)
    assert not last.blocks


def test_a_driver_that_refuses_is_asked_again_when_there_is_room():
    class Small(FakeRuntime):
        def allocate(self, nbytes):
            if self.live >= 2:
                raise MemoryError("full")
            return super().allocate(nbytes)

    memory, runtime = make(runtime=Small())
    memory.give(take(memory, 100))
    take(memory, 2000)
    take(memory, 2000)  # for what is kept
    assert runtime.live == 2
    with pytest.raises(ExecutionError, match=r"gave no 10 bytes .*: full; 3\.9 KiB in use"):
        take(memory, 10)
    assert memory.use().in_use_nbytes == 4000


def test_a_driver_that_fails_otherwise_is_not_asked_again():
    memory, _ = make(runtime=FakeRuntime(faults={"allocate": 1}))
    with pytest.raises(RuntimeError, match="injected fault"):
        take(memory, 10)
    assert memory.use().in_use_nbytes == 0


def test_random_use_never_passes_the_limit_and_loses_nothing():
    chance = random.Random(0)
    for limit in (None, 40_000):
        memory, runtime = make(limit)
        held = []
        for _ in range(2000):
            if held and chance.random() < 0.5:
                memory.give(held.pop(chance.randrange(len(held))))
            else:
                nbytes = chance.choice((8, 200, 1000, 4000, 9000))
                try:
                    held.append(take(memory, nbytes))
                except ExecutionError:
                    assert limit is not None
                    assert memory.use().in_use_nbytes + nbytes > limit
            use = memory.use()
            assert use.in_use_nbytes == sum(block.nbytes for block in held) == sum(use.by_purpose.values())
            assert len({id(block.buffer) for block in held}) == len(held)
            assert limit is None or use.in_use_nbytes + use.cached_nbytes <= limit
        for block in held:
            memory.give(block)
        memory.trim()
        assert runtime.live == 0


@pytest.mark.parametrize(
    ("nbytes", "told"), [(1, "1 bytes"), (1023, "1023 bytes"), (2**20, "1.0 MiB"), (2**50, "1024.0 TiB")]
)
def test_spelling(nbytes, told):
    assert spelled_nbytes(nbytes) == told
