"""What the benchmarks share in how they report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kagent_core.errors import KagentError


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Show progress on a terminal; print nothing elsewhere."""
    columns = (SpinnerColumn(), TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def write_text(path: Path, text: str) -> None:
    """Write a file that ``--json`` names.

    Raises
    ------
    KagentError
        When it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KagentError(f"cannot write '{path}': {error.strerror}", hint="give --json another file") from error
