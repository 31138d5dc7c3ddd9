"""Running the rest of a command in a process of its own, so that a kernel that crashes it is told of."""

from __future__ import annotations

import mmap
import os
import signal
import sys

import typer

from kagent_core.errors import KagentError

_NOTE_NBYTES = 4096


class Isolation:
    """Says what the process of its own is at, where the other one can read it when that is gone."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NOTE_NBYTES)

    def note(self, text: str) -> None:
        """Note what comes next."""
        data = text.encode()[: _NOTE_NBYTES - 1]
        self._memory[: len(data) + 1] = data + b"\0"

    @property
    def noted(self) -> str:
        """What was noted last; empty where nothing was."""
        return self._memory[:].partition(b"\0")[0].decode(errors="replace")


def isolate() -> Isolation:
    """Go on in a process of its own; this one ends as that one ends.

    Where that would not be safe, because torch is there already and may have threads, or processes cannot be forked,
    the command goes on in this process.

    Raises
    ------
    KagentError
        In the process that is left, when the other one was ended by a signal.
    typer.Exit
        In the process that is left, with the exit code of the other one.
    """
    isolation = Isolation()
    if "torch" in sys.modules or not hasattr(os, "fork"):
        return isolation
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        return isolation
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends itself, and then so does this one
    try:
        _, status = os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGINT, before)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        during = f" during {isolation.noted}" if isolation.noted else ""
        raise KagentError(
            f"the process that ran the kernel was ended by {name}{during}",
            hint="a kernel that reads or writes beyond its tensors does that; it is given null for a tensor without "
            "elements, and must not touch it",
        )
    raise typer.Exit(os.waitstatus_to_exitcode(status))
