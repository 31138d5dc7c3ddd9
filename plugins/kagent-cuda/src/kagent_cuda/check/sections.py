"""Parts of the check, each in a process of its own: one that fails, crashes or takes too long leaves the others alone.

A fault on a GPU is there to stay for the process that made it, so that nothing that runs later in it could be believed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from kagent_cuda.check.setting import Setting

POLL_S = 0.1
TOLD_LINES = 12


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes
    ----------
    name
        What was tried.
    figures
        By column, a number or a text.
    failed
        Why it is wrong; None where it is not.
    aim
        What the figures should be, in words; empty where there is no aim.
    met
        Whether they are; None where there is no aim, or nothing to hold against it.
    """

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    aim: str = ""
    met: bool | None = None


Tell = Callable[[Row], None]


@dataclass(frozen=True)
class Section:
    """One part.

    Attributes
    ----------
    name
        For the table and for ``--only``.
    budget_s
        Seconds that it may take.
    run
        Does it, and tells every row when it is known.
    """

    name: str
    budget_s: float
    run: Callable[[Setting, Tell], None]


@dataclass
class Outcome:
    """What became of a section.

    Attributes
    ----------
    name
        Of the section.
    rows
        All that it told.
    state
        ``done``, ``failed``, ``cut`` or ``skipped``.
    note
        Why, where it is not ``done``.
    elapsed_s
        Seconds that it took.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    state: str = "done"
    note: str = ""
    elapsed_s: float = 0.0

    @property
    def wrong(self) -> bool:
        """Whether something was found to be wrong; a section that was cut short is not."""
        return self.state == "failed" or any(row.failed is not None for row in self.rows)


def run_section(section: Section, setting: Setting, budget_s: float) -> Outcome:
    """Run a section in a process of its own, at most for some seconds.

    Parameters
    ----------
    section
        What to run.
    setting
        Handed to it.
    budget_s
        When these are over the process is ended, and what it told before counts.
    """
    started = time.monotonic()
    outcome = Outcome(section.name)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        source, sink = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of ours runs here
            pid = os.fork()
        if pid == 0:
            os.close(source)
            _be_the_section(section, setting, sink, log)
        os.close(sink)
        try:
            _collect(outcome, pid, source, started + budget_s)
        finally:
            os.close(source)
        if outcome.state == "failed" and not outcome.note.startswith("raised"):
            outcome.note += _last_lines(log)
    if outcome.state == "cut":
        outcome.note = f"cut after {budget_s:.0f} s, with {len(outcome.rows)} rows told"
    outcome.elapsed_s = time.monotonic() - started
    return outcome


def _be_the_section(section: Section, setting: Setting, sink: int, log: IO[str]) -> None:
    """Run a section in the process that was made for it. Does not return."""
    os.setsid()  # so that what it starts can be ended with it
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    try:
        with os.fdopen(sink, "w") as told:

            def tell(row: Row) -> None:
                told.write(json.dumps({"row": asdict(row)}) + "\n")
                told.flush()

            try:
                section.run(setting, tell)
                told.write(json.dumps({"end": True}) + "\n")
            except Exception as error:  # noqa: BLE001  whatever it is, it is told and the next section runs
                traceback.print_exc()
                first, *_ = str(error).strip().splitlines() or [""]
                told.write(json.dumps({"error": f"raised {type(error).__name__}: {first}"}) + "\n")
    finally:
        os._exit(0)


def _collect(outcome: Outcome, pid: int, source: int, deadline: float) -> None:
    """Read what a section tells until its process ends, or the deadline comes."""
    buffered, ended = b"", False
    status: int | None = None
    while True:
        readable, _, _ = select.select([source], [], [], POLL_S)
        data = os.read(source, 65536) if readable else b""
        buffered += data
        *lines, buffered = buffered.split(b"\n")
        for line in lines:
            ended |= _take(outcome, json.loads(line))
        if data:
            continue
        if status is not None:
            break
        waited, found = os.waitpid(pid, os.WNOHANG)
        if waited:
            status = found
        elif time.monotonic() > deadline:
            outcome.state = "cut"
            break
        elif readable:  # the pipe is closed and the process is about to end
            time.sleep(POLL_S)
    _end_group(pid, reap=status is None)
    if status is not None and not ended:
        outcome.state = "failed"
        outcome.note = outcome.note or f"its process ended with {_spelled(status)}"


def _take(outcome: Outcome, told: dict[str, Any]) -> bool:
    """Enter what was told, and return whether it was the end."""
    if "row" in told:
        outcome.rows.append(Row(**told["row"]))
    elif "error" in told:
        outcome.note = told["error"]
    return "end" in told


def _end_group(pid: int, reap: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # compilers that it started may still run
    if reap:
        os.waitpid(pid, 0)


def _spelled(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _last_lines(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.rstrip() for line in log.read().splitlines() if line.strip()][-TOLD_LINES:]
    return "; it said:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""
