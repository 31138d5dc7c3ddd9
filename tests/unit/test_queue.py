"""TaskQueue: order, waiting, and its two ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kagent_core.errors import ExecutionError
from kagent_core.extract.queue import TaskQueue

from .builders import task

SECONDS = 30
"""Far more than anything here takes; only a deadlock waits so long."""


def drain(queue):
    """Take until the queue has ended."""
    taken = []
    while (one := queue.take(SECONDS)) is not None:
        taken.append(one.id)
    return taken


def test_the_highest_priority_first_then_in_the_order_of_submission():
    queue = TaskQueue()
    queue.submit([task(0), task(1, priority=2)])
    queue.submit([task(2, priority=2), task(3, priority=-1), task(4)])
    assert len(queue) == 5
    queue.close()
    assert drain(queue) == [1, 2, 0, 4, 3]
    assert len(queue) == 0


def test_a_closed_queue_gives_what_it_has_then_none():
    queue = TaskQueue()
    queue.submit([task(0)])
    queue.close()
    assert queue.take(0).id == 0
    assert queue.take(0) is None
    assert queue.take(0) is None
    queue.close()  # again changes nothing


def test_submitting_to_a_closed_queue_is_an_error():
    queue = TaskQueue()
    queue.close()
    with pytest.raises(ExecutionError, match="closed"):
        queue.submit([task(0)])
    assert len(queue) == 0


def test_waiting_ends_with_a_timeout():
    queue = TaskQueue()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        queue.take(timeout=0.01)
    queue.submit([task(0)])  # and the queue goes on working
    assert queue.take(0).id == 0


def waiting_takers(queue, pool, count):
    """Start takers on an empty queue and return once all of them wait."""
    arrived = threading.Semaphore(0)
    wait_for = queue._changed.wait_for

    def counted(predicate, timeout=None):
        arrived.release()
        return wait_for(predicate, timeout)

    queue._changed.wait_for = counted
    takers = [pool.submit(queue.take, SECONDS) for _ in range(count)]
    for _ in range(count):
        assert arrived.acquire(timeout=SECONDS)
    with queue._changed:  # the last one has let go of the lock: it waits
        pass
    return takers


def test_take_waits_until_a_task_comes():
    queue = TaskQueue()
    with ThreadPoolExecutor(3) as pool:
        takers = waiting_takers(queue, pool, 3)
        assert not any(taker.done() for taker in takers)
        queue.submit([task(n) for n in range(3)])
        assert sorted(taker.result(SECONDS).id for taker in takers) == [0, 1, 2]


def test_closing_wakes_everyone_who_waits():
    queue = TaskQueue()
    with ThreadPoolExecutor(3) as pool:
        takers = waiting_takers(queue, pool, 3)
        queue.close()
        assert [taker.result(SECONDS) for taker in takers] == [None] * 3


def test_a_failure_wakes_everyone_with_its_cause():
    queue = TaskQueue()
    cause = ValueError("the extractor broke")
    with ThreadPoolExecutor(3) as pool:
        takers = waiting_takers(queue, pool, 3)
        queue.fail(cause)
        for taker in takers:
            error = taker.exception(SECONDS)
            assert isinstance(error, ExecutionError)
            assert error.__cause__ is cause
            assert "the extractor broke" in str(error)


def test_after_a_failure_nothing_is_taken_or_submitted():
    queue = TaskQueue()
    queue.submit([task(0)])
    queue.fail(RuntimeError("gone"))
    assert len(queue) == 0
    for action in (lambda: queue.take(0), lambda: queue.submit([task(1)])):
        with pytest.raises(ExecutionError, match="gone"):
            action()
    queue.close()  # closing does not hide the failure
    with pytest.raises(ExecutionError, match="gone"):
        queue.take(0)


def test_many_threads_lose_nothing_and_take_nothing_twice():
    queue = TaskQueue()
    producers, each = 4, 250
    with ThreadPoolExecutor(producers + 4) as pool:
        takers = [pool.submit(drain, queue) for _ in range(4)]
        submitters = [
            pool.submit(lambda first=first: [queue.submit([task(first + n)]) for n in range(each)])
            for first in range(0, producers * each, each)
        ]
        for submitter in submitters:
            submitter.result(SECONDS)
        queue.close()
        taken = [number for taker in takers for number in taker.result(SECONDS)]
    assert sorted(taken) == list(range(producers * each))


def test_a_task_is_given_out_only_when_what_it_waits_for_is_finished():
    queue = TaskQueue()
    queue.submit([task(0), task(1, depends_on=(0,)), task(2, depends_on=(1,), priority=9)])
    first = queue.take(0)
    assert first.id == 0
    with pytest.raises(TimeoutError):
        queue.take(0)
    queue.finish(first)
    second = queue.take(0)
    assert second.id == 1
    queue.finish(second)
    assert queue.take(0).id == 2


def test_a_task_submitted_after_its_dependency_finished_is_ready():
    queue = TaskQueue()
    queue.submit([task(0)])
    queue.finish(queue.take(0))
    queue.submit([task(1, depends_on=(0, 77))])
    assert queue.take(0).id == 1


def test_closed_with_a_task_under_way_waits_for_what_it_releases():
    queue = TaskQueue()
    queue.submit([task(0), task(1, depends_on=(0,))])
    queue.close()
    first = queue.take(0)
    threading.Timer(0.05, queue.finish, [first]).start()
    assert queue.take(SECONDS).id == 1
    assert queue.take(0) is None


def test_a_full_queue_makes_submit_wait():
    queue = TaskQueue(limit=2)
    queue.submit([task(0), task(1)])
    with pytest.raises(TimeoutError, match="stayed full"):
        queue.submit([task(2)], timeout=0.01)
    assert len(queue) == 2
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.submit, [task(2), task(3)])
        assert [queue.take(SECONDS).id for _ in range(4)] == [0, 1, 2, 3]
        waiting.result(SECONDS)


@pytest.mark.parametrize("end", ["close", "fail"])
def test_ending_a_full_queue_releases_who_submits(end):
    queue = TaskQueue(limit=1)
    queue.submit([task(0)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.submit, [task(1)])
        threading.Timer(0.05, queue.close if end == "close" else lambda: queue.fail(ValueError("broken"))).start()
        with pytest.raises(ExecutionError):
            waiting.result(SECONDS)


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        TaskQueue(limit=0)


def test_join_waits_for_everything():
    queue = TaskQueue()
    queue.join(0)
    queue.submit([task(0), task(1)])
    with pytest.raises(TimeoutError, match="2 tasks"):
        queue.join(0.01)
    queue.finish(queue.take(0))
    last = queue.take(0)
    threading.Timer(0.05, queue.finish, [last]).start()
    queue.join(SECONDS)


def test_the_death_of_a_worker_fails_every_pending_task_and_the_queue_restarts():
    queue = TaskQueue()
    queue.submit([task(number) for number in range(20)])

    def work():
        with queue.worker():
            queue.take(SECONDS)
            raise MemoryError("the device is gone")

    def take_all():
        while (one := queue.take(SECONDS)) is not None:
            queue.finish(one)
            threading.Event().wait(0.01)

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(take_all), pool.submit(queue.join, SECONDS)]
        with pytest.raises(MemoryError):
            pool.submit(work).result(SECONDS)
        for other in others:
            with pytest.raises(ExecutionError, match="the device is gone") as caught:
                other.result(SECONDS)
            assert isinstance(caught.value.__cause__, MemoryError)
    assert len(queue) == 0
    queue.restart()
    queue.submit([task(0)])
    assert queue.take(0).id == 0


def test_finishing_after_a_failure_is_harmless():
    queue = TaskQueue()
    queue.submit([task(0), task(1, depends_on=(0,))])
    first = queue.take(0)
    queue.fail(ValueError("broken"))
    queue.finish(first)
    queue.restart()
    assert len(queue) == 0


def test_the_first_cause_is_the_one_that_is_told():
    queue = TaskQueue()
    queue.fail(ValueError("first"))
    queue.fail(ValueError("second"))
    with pytest.raises(ExecutionError, match="first"):
        queue.take(0)
