"""``kagent bench``: what kagent itself costs, how fast its fused kernels are, and how fast a device is."""

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
    """Measure what kagent itself costs, how fast its fused kernels are, and how fast a device is."""


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


@bench_app.command()
def device(
    name: Annotated[str, typer.Argument(metavar="DEVICE", help="TYPE or TYPE:INDEX.")],
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="NAMES", help="Only these rows, such as gemm,layer*.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME[:DEVICE]", help="Another library on its own name of the device."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Rounds that count.")] = 10,
    tasks: Annotated[
        int, typer.Option("--tasks", metavar="N", min=0, help="Show the N tasks of each row that take longest.")
    ] = 0,
    json_path: _JsonFile = None,
) -> None:
    """Time products, pointwise operators and models on a device, next to eager PyTorch on the CPU."""
    import kagent_core.bench.device as benchmark

    benchmark.run(make_console(), name, rows, peers or (), rounds, tasks, json_path)
