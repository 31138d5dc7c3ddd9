"""The figures of ``kagent bench fused``, what they should be at most, and their JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kagent_core
from kagent_core.bench.figures import Aim, geometric_mean, rounded
from kagent_core.bench.memory import CallMemory
from kagent_core.bench.timing import Timing

SCHEMA_VERSION = 1
"""Of the JSON; it changes when a key changes its meaning or goes away."""

PEERS = ("eager", "inductor")

EVERY_ROW_AIM = 1.0
MEAN_AIM = 0.833  # 1.2 times as fast
COMPILE_AIM = 0.2
MEMORY_AIM = 1.0


@dataclass(frozen=True)
class RowFigures:
    """What was measured of one chain at one size.

    Attributes
    ----------
    chain, size, shape, dtype
        What was called; the shape is that of the largest argument.
    per_call
        By contender: ``kagent``, and the peers that could run it.
    first_call_ms
        By compiler, milliseconds of the first call, with a cold cache.
    memory
        By contender, what a call needs besides its arguments.
    unavailable
        Peers that could not compile it, with the reason.
    """

    chain: str
    size: str
    shape: tuple[int, ...]
    dtype: str
    per_call: dict[str, Timing]
    first_call_ms: dict[str, float]
    memory: dict[str, CallMemory]
    unavailable: dict[str, str]

    @property
    def name(self) -> str:
        """The chain and the size."""
        return f"{self.chain} {self.size}"

    def ratio(self, peer: str) -> float | None:
        """What kagent takes over what a peer takes, by the minima; None where the peer is missing."""
        return self._over(peer, {name: timing.minimum for name, timing in self.per_call.items()})

    @property
    def best_ratio(self) -> float:
        """What kagent takes over what the faster peer takes, by the minima."""
        return max(ratio for peer in PEERS if (ratio := self.ratio(peer)) is not None)

    def compile_ms(self, contender: str) -> float | None:
        """Milliseconds that the first call took longer than another one; None where the contender is missing."""
        if contender not in self.first_call_ms:
            return None
        return self.first_call_ms[contender] - self.per_call[contender].minimum / 1e3

    @property
    def compile_ratio(self) -> float | None:
        """What compiling takes over what it takes inductor; None where that is missing."""
        return self._over("inductor", {name: self.compile_ms(name) or 0.0 for name in self.first_call_ms})

    @property
    def memory_ratio(self) -> float | None:
        """The memory of a call over that of inductor's; None where that is missing."""
        return self._over("inductor", {name: float(memory.nbytes) for name, memory in self.memory.items()})

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "chain": self.chain,
            "size": self.size,
            "shape": self.shape,
            "dtype": self.dtype,
            "per_call": {name: timing.as_dict() for name, timing in self.per_call.items()},
            "ratios": {peer: rounded(self.ratio(peer)) for peer in PEERS} | {"best": rounded(self.best_ratio)},
            "compile_ms": {name: rounded(self.compile_ms(name)) for name in self.first_call_ms},
            "compile_ratio": rounded(self.compile_ratio),
            "memory": {name: memory.as_dict() for name, memory in self.memory.items()},
            "memory_ratio": rounded(self.memory_ratio),
            "unavailable": self.unavailable,
        }

    @staticmethod
    def _over(peer: str, values: dict[str, float]) -> float | None:
        return values["kagent"] / values[peer] if peer in values else None


@dataclass(frozen=True)
class FusedFigures:
    """Everything that was measured.

    Attributes
    ----------
    machine
        What the figures depend on.
    rounds
        Rounds that counted.
    rows
        One per chain and size.
    elapsed_s
        Seconds that the measuring took.
    """

    machine: dict[str, Any]
    rounds: int
    rows: Sequence[RowFigures]
    elapsed_s: float

    def means(self) -> dict[str, float | None]:
        """Return the geometric mean of each ratio over the rows that have it; None where none has."""
        return {
            **{peer: geometric_mean([row.ratio(peer) for row in self.rows]) for peer in PEERS},
            "best": geometric_mean([row.best_ratio for row in self.rows]),
            "compile": geometric_mean([row.compile_ratio for row in self.rows]),
            "memory": geometric_mean([row.memory_ratio for row in self.rows]),
        }

    def aims(self) -> list[Aim]:
        """Compare the figures with what they should be at most; without inductor, only what can be compared."""
        mean = self.means()["best"]
        assert mean is not None
        aims = [
            self._worst("time / the better of eager and inductor", EVERY_ROW_AIM, lambda row: row.best_ratio),
            Aim("geometric mean of that", f"{len(self.rows)} rows", MEAN_AIM, mean),
            self._worst("compile time / inductor's", COMPILE_AIM, lambda row: row.compile_ratio),
            # a few bytes of alignment are no difference
            self._worst("memory of a call / inductor's", MEMORY_AIM, lambda row: rounded(row.memory_ratio, 2)),
        ]
        return [aim for aim in aims if aim is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON. Times are in microseconds unless their name says otherwise."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kagent": kagent_core.__version__,
            "machine": self.machine,
            "rounds": self.rounds,
            "elapsed_s": round(self.elapsed_s, 1),
            "rows": [row.as_dict() for row in self.rows],
            "geometric_means": {name: rounded(mean) for name, mean in self.means().items()},
            "aims": [aim.as_dict() for aim in self.aims()],
        }

    def _worst(self, name: str, at_most: float, ratio: Callable[[RowFigures], float | None]) -> Aim | None:
        return Aim.of_worst(name, at_most, ((ratio(row), row.name) for row in self.rows))
