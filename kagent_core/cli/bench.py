"""``kagent bench``: what kagent itself costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kagent_core.cli.output import make_console

bench_app = typer.Typer(no_args_is_help=True)


@bench_app.callback()
def _bench() -> None:
    """Measure what kagent itself costs."""


@bench_app.command()
def overhead(
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE as JSON, too.")
    ] = None,
) -> None:
    """Measure extraction per operator and replay per task, with no computation to speak of."""
    import kagent_core.bench.overhead as benchmark

    benchmark.run(make_console(), json_path)
