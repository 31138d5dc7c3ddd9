"""What the benchmarks share in how they report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kagent_core.errors import KagentError


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Show progress on a terminal; print nothing elsewhere."""
    columns = (SpinnerColumn(), TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


class Figures(Protocol):
    """What a benchmark has measured."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""


Measured = TypeVar("Measured", bound=Figures)


def measured(
    json_path: Path | None, measure: Callable[[], Measured], show: Callable[[Console, Measured], None], console: Console
) -> Measured:
    """Measure, print the figures and, where there is a file for them, write them down; return them.

    Raises
    ------
    KagentError
        When the file cannot be written, which is told before anything is measured.
    """
    if json_path is not None:
        write_text(json_path, "")
    figures = measure()
    show(console, figures)
    if json_path is not None:
        write_text(json_path, json.dumps(figures.as_dict(), indent=1) + "\n")
    return figures


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
