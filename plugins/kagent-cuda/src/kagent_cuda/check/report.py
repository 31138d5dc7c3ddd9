"""What the check found, as a table and as JSON."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

import kagent_core
from kagent_cuda.check.sections import Outcome, Row
from kagent_cuda.check.setting import Setting

SCHEMA_VERSION = 1
"""Of the JSON; it changes when a key changes its meaning or goes away."""

WIDTH = 46
MARKS = {True: "met", False: "NOT MET", None: ""}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table: a line per row, with what it measured and what was aimed at."""
    return "\n".join(line for outcome in outcomes for line in _lines(outcome)) + "\n"


def _lines(outcome: Outcome) -> Iterator[str]:
    state = "" if outcome.state == "done" else f": {outcome.state.upper()}"
    yield f"── {outcome.name} ({outcome.elapsed_s:.0f} s){state} ".ljust(100, "─")
    for row in outcome.rows:
        yield _line(row)
    if outcome.note:
        yield f"  {outcome.note}"


def _line(row: Row) -> str:
    figures = "  ".join(f"{name} {value}" for name, value in row.figures.items())
    aim = f"  [aim: {row.aim}{': ' + MARKS[row.met] if row.met is not None else ''}]" if row.aim else ""
    line = f"  {row.name:<{WIDTH}}  {figures}{aim}".rstrip()
    return line if row.failed is None else f"{line}\n    WRONG: {row.failed}"


def summary(outcomes: Sequence[Outcome], elapsed_s: float) -> str:
    """Return the last line."""
    wrong = sum(outcome.wrong for outcome in outcomes)
    cut = sum(outcome.state in ("cut", "skipped") for outcome in outcomes)
    judged = [row.met for outcome in outcomes for row in outcome.rows if row.met is not None]
    told = f"{len(outcomes)} sections in {elapsed_s:.0f} s: {wrong} wrong, {cut} not finished"
    return told + (f"; {sum(judged)} of {len(judged)} aims met" if judged else "")


def as_dict(setting: Setting, facts: dict[str, Any], outcomes: Sequence[Outcome], elapsed_s: float) -> dict[str, Any]:
    """Return all of it for JSON.

    Parameters
    ----------
    setting
        On what it ran.
    facts
        Of the device.
    outcomes
        What was found.
    elapsed_s
        Seconds that all took.
    """
    return {
        "schema": SCHEMA_VERSION,
        "kagent": kagent_core.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "command": sys.argv[1:],
        "device": {"name": setting.device, "emulated": setting.emulated, **facts},
        "tiny": setting.tiny,
        "torch_cuda": setting.torch_cuda,
        "cuda_tensors": setting.cuda_tensors,
        "elapsed_s": round(elapsed_s, 1),
        "sections": [{**asdict(outcome), "wrong": outcome.wrong} for outcome in outcomes],
    }
