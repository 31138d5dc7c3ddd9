"""``kagent bench``: what kagent itself costs, how fast its fused kernels, a device and whole models are."""

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
    """Measure what kagent itself costs, how fast its fused kernels are, how fast a device is, and whole models."""


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


@bench_app.command()
def models(
    names: Annotated[
        str | None, typer.Option("--models", metavar="NAMES", help="Only these models, such as resnet18,mobile*.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option("--model", metavar="FILE.py:FUNCTION", help="A model of your own: it returns (model, inputs)."),
    ] = None,
    contenders: Annotated[
        str | None, typer.Option("--contenders", metavar="NAMES", help="Only these next to eager, such as kagent.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Threads of a call.")] = 1,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="Of every model; else each has its own.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Rounds that count.")] = 20,
    starts: Annotated[
        bool, typer.Option("--starts/--no-starts", help="Whether to measure compile times and memory, too.")
    ] = True,
    where: Annotated[bool, typer.Option("--where", help="Say where kagent's time goes, kernel by kernel.")] = False,
    json_path: _JsonFile = None,
) -> None:
    """Time whole models in inference, next to eager PyTorch, torch.compile and inference engines."""
    from kagent_core.bench.models.run import Asked, run

    run(make_console(), Asked(names, contenders, program, threads, batch, rounds, starts, where), json_path)
