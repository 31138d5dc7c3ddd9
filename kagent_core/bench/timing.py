"""How the benchmarks measure: one thread, contenders in turn, the minimum and the median of several rounds."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

ROUND_MS = 5.0
"""Milliseconds that eager PyTorch shall take in a round: small tensors are computed on many times in it."""

PLAN_ROUNDS = 10
CALL_ROUNDS = 50
"""Rounds in which plans are made, and in which functions are called. Many short ones: what disturbs the machine then
spoils some of them rather than all."""


@dataclass(frozen=True)
class Timing:
    """Minimum and median over all rounds, in microseconds."""

    minimum: float
    median: float

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """Return the timing of rounds that took `times`."""
        return cls(min(times), statistics.median(times))

    def per(self, count: int) -> Timing:
        """Return the timing of one of `count` equal parts."""
        return Timing(self.minimum / count, self.median / count)

    def __str__(self) -> str:
        return f"{self.minimum:.1f} / {self.median:.1f}"

    def as_dict(self) -> dict[str, float]:
        """Return the values for JSON."""
        return {"min_us": round(self.minimum, 3), "median_us": round(self.median, 3)}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, and restore its number of threads afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now rather than while the clock runs."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def time_calls(
    contenders: Mapping[str, Callable[[], object]],
    calls: int,
    rounds: int = CALL_ROUNDS,
    on_round: Callable[[], None] = lambda: None,
    settle: int = 0,
) -> dict[str, Timing]:
    """Time one call of each contender.

    In every round each contender in turn is called `calls` times, so that a machine that is busy for a while is
    equally slow for all of them. A round of warming up comes first and does not count.

    Parameters
    ----------
    contenders
        What to call, by name.
    calls
        Calls of each contender in one round; the round's figure is their mean.
    rounds
        Rounds that count.
    on_round
        Called after every round, the first one included, while no clock runs.
    settle
        Calls of each contender in one round before the clock runs: the threads of the one before it may still be
        waiting for more work, which takes a processor each.
    """
    elapsed: dict[str, list[float]] = {name: [] for name in contenders}
    with no_collection():
        for number in range(rounds + 1):
            for name, call in contenders.items():
                for _ in range(settle):
                    call()
                started = time.perf_counter()
                for _ in range(calls):
                    call()
                if number > 0:
                    elapsed[name].append((time.perf_counter() - started) * 1e6 / calls)
            on_round()
    return {name: Timing.of(times) for name, times in elapsed.items()}


def calls_per_round(call: Callable[[], object], most: int) -> int:
    """Return how often to call each contender in a round for `call` to take about `ROUND_MS`.

    Parameters
    ----------
    call
        The contender that sets the length: eager PyTorch. It is called twice.
    most
        Never more than that.
    """
    call()
    started = time.perf_counter()
    call()
    elapsed_ms = (time.perf_counter() - started) * 1e3
    return max(1, min(most, math.ceil(ROUND_MS / elapsed_ms)))
