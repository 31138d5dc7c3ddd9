"""Runs of the kit on fake devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kagent_core
from kagent_core.testing.conformance import Case, ExpectedFailures, Ran, Report, Target, run_conformance
from kagent_core.testing.fake import FakeDevice


def fake_run(device: FakeDevice, only: str | None = None, **options: Any) -> Report:
    """Run cases on a fake device, with nothing expected to fail."""
    options = {"expected": ExpectedFailures(), **options}
    if only is not None:
        options.setdefault("levels", [int(only[0])])
    with kagent_core.use_plugin(device):
        return run_conformance("fake:0", only=only, **options)


def case_of(run: Callable[[Target], Ran], name: str = "made up", level: int = 1, family: str = "test") -> Case:
    """Make a case of a function."""
    return Case(level, name, family, run, lambda target: f"# {name} on {target.device}\nraise SystemExit(1)\n")
