"""The conformance kit: finds out what of kagent works on a device.

Six levels, each with many cases: the contract, packing and layouts, operators, fusion, models, endurance. `kagent
conformance DEVICE` runs them, and so does ``pytest --pyargs kagent_core.testing.conformance --kagent-device DEVICE``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kagent_core.testing.conformance.case import (
        LEVELS,
        CannotRunError,
        Case,
        Finding,
        Outcome,
        Ran,
        Target,
    )
    from kagent_core.testing.conformance.expected import ExpectedFailure, ExpectedFailures, read_expected
    from kagent_core.testing.conformance.report import Counts, Report
    from kagent_core.testing.conformance.runner import run_conformance

__all__ = [
    "LEVELS",
    "CannotRunError",
    "Case",
    "Counts",
    "ExpectedFailure",
    "ExpectedFailures",
    "Finding",
    "Outcome",
    "Ran",
    "Report",
    "Target",
    "read_expected",
    "run_conformance",
]

_HOMES = {
    "Counts": "report",
    "ExpectedFailure": "expected",
    "ExpectedFailures": "expected",
    "Report": "report",
    "read_expected": "expected",
    "run_conformance": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:  # pytest's plugin imports this package in every run: what is heavy comes when it is used
        raise AttributeError(f"module 'kagent_core.testing.conformance' has no attribute '{name}'")
    home = _HOMES.get(name, "case")
    return getattr(importlib.import_module(f"kagent_core.testing.conformance.{home}"), name)
