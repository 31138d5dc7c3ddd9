"""The figures of ``kagent bench device``, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kagent_core
from kagent_core.bench.device_rows import Row
from kagent_core.bench.figures import rounded
from kagent_core.bench.timing import Timing

SCHEMA_VERSION = 1
"""Of the JSON; it changes when a key changes its meaning or goes away."""

EAGER, KAGENT = "eager", "kagent"


@dataclass(frozen=True)
class TaskFigures:
    """One task of a row.

    Attributes
    ----------
    kernel
        What ran.
    problem
        See `kagent_core.profile.problem.problem_key`.
    launch
        Its launch config, tile sizes among it, as text.
    count
        How many tasks of the row are just like it.
    minimum_ms
        Of one of them, waiting for the device included.
    flops
        Floating-point operations of one of them, where it is a product or a convolution.
    """

    kernel: str
    problem: str
    launch: str
    count: int
    minimum_ms: float
    flops: int | None

    @property
    def gflops(self) -> float | None:
        """10⁹ floating-point operations per second."""
        return None if self.flops is None else self.flops / self.minimum_ms / 1e6

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "kernel": self.kernel,
            "problem": self.problem,
            "launch": self.launch,
            "count": self.count,
            "min_ms": round(self.minimum_ms, 4),
            "gflops": rounded(self.gflops, 1),
        }


@dataclass(frozen=True)
class RowFigures:
    """What was measured of one row.

    Attributes
    ----------
    row
        What was called.
    per_call
        By contender: ``eager``, ``kagent`` and the peers that have the row.
    first_call_ms
        Milliseconds of kagent's first call: capturing, planning and compiling included.
    fallbacks
        Operators of it that ran on another device.
    unavailable
        Contenders without a figure, with the reason.
    tasks
        Those that take longest, where they were asked for.
    """

    row: Row
    per_call: dict[str, Timing]
    first_call_ms: float | None
    fallbacks: int
    unavailable: dict[str, str]
    tasks: Sequence[TaskFigures] = ()

    def ratio(self, peer: str) -> float | None:
        """What kagent takes over what a peer takes, by the minima; None where one is missing."""
        if peer not in self.per_call or KAGENT not in self.per_call:
            return None
        return self.per_call[KAGENT].minimum / self.per_call[peer].minimum

    def gflops(self, contender: str) -> float | None:
        """10⁹ floating-point operations per second, by the minimum."""
        if self.row.flops is None or contender not in self.per_call:
            return None
        return self.row.flops / self.per_call[contender].minimum / 1e3

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        peers = [name for name in self.per_call if name != KAGENT]
        return {
            "row": self.row.name,
            "what": self.row.what,
            "per_call": {name: timing.as_dict() for name, timing in self.per_call.items()},
            "gflops": {name: rounded(self.gflops(name), 1) for name in self.per_call},
            "ratios": {name: rounded(self.ratio(name)) for name in peers},
            "first_call_ms": rounded(self.first_call_ms, 1),
            "fallbacks": self.fallbacks,
            "unavailable": self.unavailable,
            "tasks": [task.as_dict() for task in self.tasks],
        }


@dataclass(frozen=True)
class DeviceFigures:
    """Everything that was measured.

    Attributes
    ----------
    machine
        What the figures depend on.
    device, name
        The device, and the hardware's own name.
    rounds
        Rounds that counted.
    rows
        One per row.
    elapsed_s
        Seconds that the measuring took.
    """

    machine: dict[str, Any]
    device: str
    name: str
    rounds: int
    rows: Sequence[RowFigures]
    elapsed_s: float

    @property
    def contenders(self) -> list[str]:
        """Everyone who was asked for: eager, kagent, and then the peers, also those without any figure."""
        named = (name for row in self.rows for name in (*row.per_call, *row.unavailable))
        return list(dict.fromkeys((EAGER, KAGENT, *named)))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON. Times are in microseconds unless their name says otherwise."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kagent": kagent_core.__version__,
            "machine": self.machine,
            "device": self.device,
            "name": self.name,
            "rounds": self.rounds,
            "elapsed_s": round(self.elapsed_s, 1),
            "rows": [row.as_dict() for row in self.rows],
        }
