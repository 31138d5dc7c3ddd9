"""Level 5: many calls, threads, shapes and plans that come and go, faults of the device; and no growth of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kagent_core.errors import KagentError
from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance.case import CannotRunError, Case, Ran, Target
from kagent_core.testing.conformance.checks import Checks
from kagent_core.testing.conformance.opened import METHODS, PREPARED, InjectedFaultError, Opened, opened
from kagent_core.testing.conformance.threads import in_threads

checks = Checks(5)

SLACK_NBYTES = 16 << 20
"""How much the process may grow between the end of the warm-up and the end of a case: what allocators keep."""

FAULTY = (*(method for method in METHODS if method != "free"), PREPARED)
"""Methods whose faults are tried: what cannot be freed is lost, whatever the core does."""


def cases(target: Target) -> Iterator[Case]:
    """Yield the level's cases."""
    return checks.cases(target)


# -- calls


@checks.add("calls")
def one_plan_many_calls(device: str, full: bool) -> Ran:
    """The same shapes, other values, each result compared."""
    calls = 10_000 if full else 300
    with opened(device, watch=True) as opening:
        compiled = opening.compile(program, *inputs(0))
        growth = Growth(opening)
        for call in range(calls):
            given = inputs(call)
            assert_same(tuple(compiled(list(given))), program(*given), f"call {call}")
            growth.look(call, warm_up=calls // 5)
        growth.assert_none(f"{calls} calls of one plan")
        return opening.ran(f"{calls} calls, {growth}")


@checks.add("calls")
def single_operators_many_times(device: str, full: bool) -> Ran:
    import kagent_core

    calls = 10_000 if full else 300
    with opened(device, watch=True) as opening:
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        growth = Growth(opening)
        for call in range(calls):
            signature = ("aten::add.Tensor", "aten::mul.Tensor", "aten::mm")[call % 3]
            want = (torch.add, torch.mul, torch.mm)[call % 3](x, y)
            assert_same(kagent_core.run_op(signature, x, y, device=device), want, f"call {call}")
            growth.look(call, warm_up=calls // 5)
        growth.assert_none(f"{calls} single operators")
        return opening.ran(f"{calls} calls, {growth}")


@checks.add("calls")
def new_shapes_all_the_time(device: str, full: bool) -> Ran:
    """One compiled function with symbolic sizes and a small cache of plans: old plans give their memory back."""
    shapes = 500 if full else 60
    options: Any = {"device": device, "plan_cache_size": 4}
    with opened(device, watch=True, plan_cache_size=4) as opening:
        compiled = torch.compile(program, backend="kagent", options=options, dynamic=True)
        growth = Growth(opening)
        for number in range(shapes):
            given = inputs(number, rows=3 + number * 7 % 101)
            assert_same(compiled(*given), program(*given), f"shape {number}")
            growth.look(number, warm_up=shapes // 3)
        growth.assert_none(f"{shapes} shapes")
        return opening.ran(f"{shapes} shapes, {growth}")


@checks.add("calls")
def plans_that_come_and_go(device: str, full: bool) -> Ran:
    """Programs are compiled, run and dropped: every buffer goes back to the device."""
    plans = 300 if full else 30
    with opened(device, watch=True) as opening:
        growth = Growth(opening)
        for number in range(plans):
            given = inputs(number)
            compiled = opening.compile(program, *given)
            assert_same(tuple(compiled(list(given))), program(*given), f"plan {number}")
            del compiled
            if number % 10 == 9:
                gc.collect()
            growth.look(number, warm_up=plans // 3)
        gc.collect()
        opening.session.close_abandoned()
        live = opening.watched.live
        assert live == 0, f"{live} buffers are still allocated after every one of {plans} plans was given up"
        growth.assert_none(f"{plans} plans")
        return opening.ran(f"{plans} plans, {growth}")


@checks.add("calls")
def memory_that_is_freed_can_be_used_again(device: str, full: bool) -> str:
    """Blocks are allocated, written and freed: in all, far more than stays."""
    blocks, nbytes = 256 if full else 32, 16 << 20
    with opened(device, watch=True) as opening:
        growth = Growth(opening)
        data = bytes(nbytes)
        for number in range(blocks):
            with opening.buffer(nbytes) as buffer:
                opening.write(buffer, 0, data)
            growth.look(number, warm_up=blocks // 4)
        growth.assert_none(f"{blocks} blocks of {nbytes} bytes that were freed", slack=4 * nbytes)
        memory = opening.device.info.memory_nbytes
        if opening.runtime.host_memory or opening.device.info.emulated or not memory:
            return f"{blocks} blocks, {growth}"
        block = max(nbytes, memory // 16)
        for _ in range(40):  # in all, more than twice of what there is: what is lost shows as memory that is refused
            with opening.buffer(block) as buffer:
                opening.write(buffer, block - nbytes, data)
        return f"{blocks} blocks, and 40 of {block} bytes, {growth}"


# -- threads


@checks.add("threads")
def threads_with_one_program(device: str, full: bool) -> Ran:
    """Each call that runs has memory of its own, and no more is kept than there were calls at once."""
    threads, calls = 4, 2_500 if full else 60
    with opened(device, watch=True) as opening:
        compiled = opening.compile(program, *inputs(0))

        def work(number: int) -> None:
            for call in range(calls):
                given = inputs(1000 * number + call)
                assert_same(tuple(compiled(list(given))), program(*given), f"thread {number}, call {call}")

        one = inputs(0)
        compiled(list(one))
        each = opening.watched.live
        in_threads(work, threads)
        live = opening.watched.live
        assert live <= threads * each, f"{live} buffers are held after {threads} threads; one call holds {each}"
        return opening.ran(f"{threads} threads, {calls} calls each")


@checks.add("threads")
def threads_with_programs_of_their_own(device: str, full: bool) -> Ran:
    """Compiled one after the other, run and given up side by side."""
    threads, rounds = 4, 50 if full else 5
    with opened(device, watch=True) as opening:
        for _ in range(rounds):
            compiled = [opening.compile(program, *inputs(number, rows=4 + number)) for number in range(threads)]

            def work(number: int, compiled: Sequence[Any] = compiled) -> None:
                for call in range(10):
                    given = inputs(call, rows=4 + number)
                    assert_same(tuple(compiled[number](list(given))), program(*given), f"thread {number}, call {call}")

            in_threads(work, threads)
            del compiled, work
        gc.collect()
        opening.session.close_abandoned()
        live = opening.watched.live
        assert live == 0, f"{live} buffers are still allocated after every program was given up"
        return opening.ran(f"{threads} threads, {rounds} rounds")


# -- faults


@checks.add("faults", method=FAULTY)
def a_fault_of(device: str, method: str, full: bool) -> Ran:
    """Each call of a method fails once: a typed error that names an operator, and the next call is right."""
    with opened(device, watch=True) as opening:
        points = calls_of(opening, method)
    if not points:
        raise CannotRunError(f"the core never calls {method} of this device while a program is built and run")
    points = points if full else min(points, 12)
    for nth in range(1, points + 1):
        with opened(device, watch=True) as opening:  # anew: what is loaded once stays loaded
            one_fault(opening, method, nth)
    return opening.ran(f"{points} points")


def one_fault(opening: Opened, method: str, nth: int) -> None:
    """Let one call of a method fail, and run once more."""
    watch = opening.watched
    compiled = opening.compile(program, *inputs(0))
    watch.fail(method, nth)
    try:
        run_twice(compiled)
    except KagentError as error:
        told = str(error)
        assert "aten::" in told, f"the error for {method} call {nth} names no operator: {told}"
        assert "injected fault" in told, f"the error for {method} call {nth} does not say what failed: {told}"
    except InjectedFaultError as error:
        raise AssertionError(f"the fault in {method} call {nth} came out raw, not as a KagentError") from error
    else:
        assert not watch.disarm(), f"call {nth} of {method} never came, though it did before"
        raise AssertionError(f"the fault in {method} call {nth} was told to nobody")
    finally:
        watch.disarm()
    run_twice(compiled)
    give_up(compiled)
    assert watch.live == 0, f"{watch.live} buffers are lost after the fault in {method} call {nth}"


# -- helpers


def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute a bit of what most devices have kernels for."""
    hidden = torch.relu(torch.addmm(b, x, w))
    return hidden * 2.0 + b, torch.mm(hidden, w)


def inputs(seed: int, rows: int = 6) -> tuple[torch.Tensor, ...]:
    """Return arguments of `program`."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in ((rows, 8), (8, 8), (8,)))


def run_twice(compiled: Any) -> None:
    """Build a plan and replay it; compare both times."""
    for seed in range(2):
        given = inputs(seed)
        assert_same(tuple(compiled(list(given))), program(*given), f"call {seed}")


def calls_of(opening: Opened, method: str) -> int:
    """Return how often a method is called by a program that is built, replayed and given up without faults."""
    before = opening.watched.calls[method]
    compiled = opening.compile(program, *inputs(0))
    run_twice(compiled)
    give_up(compiled)
    return opening.watched.calls[method] - before


def give_up(compiled: Any) -> None:
    """Close a program's plans, so that their memory goes back."""
    for plan in compiled.plans():
        plan.close()


class Growth:
    """Watches memory over many rounds: the process's, and the device's buffers.

    Parameters
    ----------
    opening
        The device, watched.
    """

    def __init__(self, opening: Opened) -> None:
        self._opening = opening
        self._rss = 0
        self._live = 0

    def look(self, position: int, warm_up: int) -> None:
        """Take the measure when the warm-up ends."""
        if position == warm_up:
            gc.collect()
            self._rss, self._live = resident_nbytes(), self._in_use()

    def assert_none(self, what: str, slack: int = SLACK_NBYTES) -> None:
        """Assert that neither has grown since the warm-up, but for a slack of the process's memory."""
        gc.collect()
        live = self._in_use()
        assert live <= self._live, f"{live} buffers are allocated after {what}, {self._live} were after the warm-up"
        grown = resident_nbytes() - self._rss
        assert grown <= slack, f"the process grew by {grown} bytes over {what}, expected at most {slack}"

    def _in_use(self) -> int:
        """Return how many buffers there are beside those that are kept for reuse, which come and go with sizes."""
        self._opening.session.release_unused()
        return self._opening.watched.live

    def __str__(self) -> str:
        return f"{self._live} buffers, process grown by {max(0, resident_nbytes() - self._rss) >> 10} KiB"


def resident_nbytes() -> int:
    """Return the process's memory that is in use, in bytes.

    Raises
    ------
    CannotRunError
        Where the system does not tell.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        raise CannotRunError("the system does not tell how much memory a process uses (/proc/self/status)") from None
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10
