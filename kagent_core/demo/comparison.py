"""The demo's figures: kagent against eager PyTorch, on the same batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kagent_core.demo.encoder import Batch

Encode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ROUNDS = 10
FEWEST_ROUNDS = 3
ENOUGH_S = 10.0
"""Seconds after which no further round is begun, so that a busy machine does not keep the user waiting."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over all rounds, and how many there were."""

    minimum: float
    median: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.minimum:.1f} / {self.median:.1f}"


def time_rounds(
    contenders: Sequence[Encode], batch: Batch, on_round: Callable[[], None], enough_s: float = ENOUGH_S
) -> list[Timing]:
    """Time the contenders on one batch, in turn, so that a busy machine is equally slow for all of them."""
    elapsed: list[list[float]] = [[] for _ in contenders]
    began = time.perf_counter()
    for done in range(ROUNDS):
        if done >= FEWEST_ROUNDS and time.perf_counter() - began > enough_s:
            break
        for encode, times in zip(contenders, elapsed, strict=True):
            start = time.perf_counter()
            encode(batch.tokens, batch.mask)
            times.append((time.perf_counter() - start) * 1e3)
        on_round()
    return [Timing(min(times), statistics.median(times), len(times)) for times in elapsed]


def largest_difference(encode: Encode, batch: Batch, vectors: torch.Tensor) -> float:
    """Return the largest absolute difference between `vectors` and what `encode` makes of the same batch."""
    return float((encode(batch.tokens, batch.mask) - vectors).abs().max())
