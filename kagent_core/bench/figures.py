"""The figures of ``kagent bench overhead``, what they should be at most, and their JSON."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

import kagent_core
from kagent_core.bench.extraction import ExtractionFigures
from kagent_core.bench.functions import FunctionFigures
from kagent_core.bench.replay import ReplayFigures
from kagent_core.config import Config
from kagent_core.session import Session

SCHEMA_VERSION = 1
"""Of the JSON; it changes when a key changes its meaning or goes away."""

EXTRACTION_AIM_US = 100.0
GROWTH_AIM = 1.25
REPLAY_AIM_US = 6.0


@dataclass(frozen=True)
class Figures:
    """Everything that was measured.

    Attributes
    ----------
    machine
        What the figures depend on.
    plan_rounds, call_rounds
        Rounds that counted, for extraction and for the calls of plans and functions.
    extraction, replay, functions
        One per graph, per chain of operators and per function.
    elapsed_s
        Seconds that the measuring took.
    """

    machine: dict[str, Any]
    plan_rounds: int
    call_rounds: int
    extraction: Sequence[ExtractionFigures]
    replay: Sequence[ReplayFigures]
    functions: Sequence[FunctionFigures]
    elapsed_s: float

    @property
    def growth(self) -> float:
        """Time per operator in the largest graph over that in the next smaller one: 1 when costs grow linearly."""
        *_, smaller, largest = self.extraction
        return largest.total.minimum / smaller.total.minimum

    def aims(self) -> list[Aim]:
        """Compare the figures, by their minima, with what they should be at most."""
        slowest = max(self.extraction, key=lambda one: one.total.minimum)
        heaviest = max(self.replay, key=lambda one: one.overhead.minimum)
        smaller, largest = (f"{one.operators:,}" for one in self.extraction[-2:])
        return [
            Aim(
                "extraction, µs per operator",
                f"{slowest.operators:,} operators",
                EXTRACTION_AIM_US,
                slowest.total.minimum,
            ),
            Aim("growth of that", f"from {smaller} to {largest} operators", GROWTH_AIM, self.growth),
            Aim("replay overhead, µs per task", heaviest.name, REPLAY_AIM_US, heaviest.overhead.minimum),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON. Times are in microseconds unless their name says otherwise."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kagent": kagent_core.__version__,
            "machine": self.machine,
            "rounds": {"extraction": self.plan_rounds, "replay": self.call_rounds, "functions": self.call_rounds},
            "elapsed_s": round(self.elapsed_s, 1),
            "extraction": [one.as_dict() for one in self.extraction],
            "extraction_growth": round(self.growth, 3),
            "replay": [one.as_dict() for one in self.replay],
            "functions": [one.as_dict() for one in self.functions],
            "aims": [aim.as_dict() for aim in self.aims()],
        }


@dataclass(frozen=True)
class Aim:
    """What a figure should be at most, and what it was.

    Attributes
    ----------
    name, case
        The figure, and the case in which it is worst.
    at_most, measured
        In the unit that the name says.
    """

    name: str
    case: str
    at_most: float
    measured: float

    @property
    def met(self) -> bool:
        """Whether it was."""
        return self.measured <= self.at_most

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "name": self.name,
            "case": self.case,
            "at_most": self.at_most,
            "measured": round(self.measured, 3),
            "met": self.met,
        }

    @classmethod
    def of_worst(cls, name: str, at_most: float, found: Iterable[tuple[float | None, str]]) -> Self | None:
        """Return the figure in the case in which it is greatest, of those that have it; None where none has.

        Parameters
        ----------
        name, at_most
            As for the class.
        found
            Values, and their cases.
        """
        measured, case = max(((value, case) for value, case in found if value is not None), default=(None, ""))
        return None if measured is None else cls(name, case, at_most, measured)


def rounded(value: float | None, digits: int = 3) -> float | None:
    """Return a figure as JSON has it; None where there is none."""
    return None if value is None else round(value, digits)


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None where there is none."""
    logarithms = [math.log(value) for value in values if value is not None]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    session = Session(Config(device="cpu"))
    processor = session.target.name
    session.close()
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
