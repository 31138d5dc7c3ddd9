"""What a conformance run consists of: cases, and what came of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

LEVELS = (
    "contract",
    "packing and layouts",
    "operators",
    "fusion",
    "models",
    "endurance",
)
"""What each level is about, from 0; a device has a level when it has all before it and nothing of it failed."""


class Outcome(StrEnum):
    """What came of a case."""

    PASSED = "passed"
    """As it must be; of an operator: on the device itself."""

    FALLBACK = "fallback"
    """Right, but some of it ran on the fallback device; `Finding.detail` says why."""

    FAILED = "failed"
    """Wrong numbers, a wrong error or none, a crash."""

    EXPECTED = "expected failure"
    """Failed, as the plugin's list says."""

    UNEXPECTED = "unexpected pass"
    """Passed, though the plugin's list says that it fails: the list is to be mended."""

    COULD_NOT_RUN = "could not run"
    """Nothing was found out; `Finding.detail` says why."""


class CannotRunError(Exception):
    """Raised by a case that cannot find out what it is there for: something that it needs is missing."""


@dataclass(frozen=True)
class Target:
    """The device under test.

    Attributes
    ----------
    device
        As users name it, with its index: ``toy:0``.
    full
        Whether every sample, dtype and model is tried; else a selection that takes minutes.
    """

    device: str
    full: bool = False


@dataclass(frozen=True)
class Ran:
    """What a case that passed tells beside that.

    Attributes
    ----------
    fallbacks
        Why operators ran elsewhere, by signature; empty where all ran on the device.
    note
        Anything worth a line in the report, such as a count.
    """

    fallbacks: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One thing to find out.

    Attributes
    ----------
    level
        Position in `LEVELS`.
    name
        Unique within the level: ``add.float32``, ``copy_in of 0 bytes``.
    family
        What it is counted with in reports: an operator family (``pointwise``, ``linear algebra``), a part of the
        contract.
    run
        Returns what it found, or raises: `CannotRunError` where it cannot find out, anything else for a failure.
    script
        Returns a script that does the same by itself, with nothing but torch and kagent, and fails as the case fails.
    """

    level: int
    name: str
    family: str
    run: Callable[[Target], Ran]
    script: Callable[[Target], str]

    @property
    def key(self) -> str:
        """How a plugin's list of expected failures names it."""
        return f"{self.level}/{self.name}"


@dataclass(frozen=True)
class Finding:
    """What came of one case.

    Attributes
    ----------
    case
        The case.
    outcome
        In a word.
    detail
        Why it failed, fell back or could not run; the list's reason for an expected failure, and how it failed; the
        note of a case that passed.
    seconds
        How long it took.
    script
        Of a case that failed, a script that reproduces it.
    native
        Signatures of the operators that were placed on the device itself.
    """

    case: Case
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0
    script: str = ""
    native: frozenset[str] = frozenset()
