"""``kagent bench``: what kagent itself costs, and how fast its fused kernels are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kagent_core.cli.output import make_console

_JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE as JSON, too.")
]

bench_app = typer.Typer(no_args_is_help=True)


@bench_app.callback()
def _bench() -> None:
    """Measure what kagent itself costs, and how fast its fused kernels are."""


@bench_app.command()
def overhead(json_path: _JsonFile = None) -> None:
    """Measure extraction per operator and replay per task, with no computation to speak of."""
    import kagent_core.bench.overhead as benchmark

    benchmark.run(make_console(), json_path)


@bench_app.command()
def fused(
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="NAMES", help="Only these chains, such as gelu,silu-*.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="NAMES", help="Only these of small, middle and large.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Rounds that count.")] = 20,
    json_path: _JsonFile = None,
) -> None:
    """Time chains of operators that fuse, next to eager PyTorch and its default compiler."""
    import kagent_core.bench.fused as benchmark

    benchmark.run(make_console(), rows, sizes, rounds, json_path)
