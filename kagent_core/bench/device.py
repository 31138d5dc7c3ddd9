"""``kagent bench device``: a device through kagent, next to eager PyTorch on the CPU and to other libraries."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kagent_core.bench.console import measured, progress_bars
from kagent_core.bench.device_figures import EAGER, KAGENT, DeviceFigures, RowFigures
from kagent_core.bench.device_rows import BY_NAME, Function, Row
from kagent_core.bench.device_tables import print_device
from kagent_core.bench.device_tasks import longest_tasks
from kagent_core.bench.figures import describe_machine
from kagent_core.bench.fused import chosen
from kagent_core.bench.peers import NotMeasuredError, Peer, peer_named
from kagent_core.bench.timing import calls_per_round, time_calls
from kagent_core.config import load_config
from kagent_core.errors import KagentError
from kagent_core.session import session_for

MOST_CALLS = 100

TOLERANCE = 2e-3
"""What is asked is only whether all computed the same; how exact kagent is, the conformance kit tells."""

Call = Callable[[], object]


def run(
    console: Console,
    device: str,
    rows: str | None,
    peers: Sequence[str],
    rounds: int,
    tasks: int,
    json_path: Path | None,
) -> None:
    """Measure, print the tables and, when asked to, write the figures down.

    Parameters
    ----------
    console
        Where to print.
    device
        Its name.
    rows
        Names of rows with commas between them; they may be patterns, as for files. None: all.
    peers
        See `kagent_core.bench.peers.peer_named`.
    rounds
        Rounds that count.
    tasks
        How many tasks of each row to show: those that take longest.
    json_path
        File for the figures as JSON.

    Raises
    ------
    KagentError
        When the device cannot be used, a name is unknown, a contender computes something wrong, or the file cannot be
        written.
    """
    named = [BY_NAME[name] for name in chosen(rows, list(BY_NAME), "--rows", "row")]
    libraries = [peer_named(text) for text in peers]
    measured(json_path, lambda: measure(console, device, named, libraries, rounds, tasks), print_device, console)


def measure(
    console: Console, device: str, rows: Sequence[Row], peers: Sequence[Peer], rounds: int, tasks: int
) -> DeviceFigures:
    """Measure rows on a device, with as many threads as torch is set to, and a progress bar on a terminal.

    Parameters
    ----------
    console
        For the progress bar.
    device
        Its name.
    rows
        What to call.
    peers
        Other libraries.
    rounds
        Rounds that count.
    tasks
        How many tasks of each row to time one by one.
    """
    started = time.perf_counter()
    info = session_for(load_config({"device": device})).target
    with torch.no_grad(), torch.random.fork_rng(devices=()), progress_bars(console) as progress:
        torch.manual_seed(0)
        bar = progress.add_task(f"measuring {info.device}", total=len(rows))
        figures = []
        for row in rows:
            progress.update(bar, description=f"{info.device}: {row.name}")
            figures.append(_measure(str(info.device), row, peers, rounds, tasks))
            progress.advance(bar)
    elapsed_s = time.perf_counter() - started
    return DeviceFigures(describe_machine(), str(info.device), info.name, rounds, figures, elapsed_s)


def _measure(device: str, row: Row, peers: Sequence[Peer], rounds: int, tasks: int) -> RowFigures:
    try:
        function, args = row.make()
    except KagentError as error:  # MiniLM without its packages
        return RowFigures(row, {}, None, 0, {KAGENT: f"{error.message}; {error.hint}"})
    session = session_for(load_config({"device": device}))
    planned = len(session.reports)
    contenders: dict[str, Call] = {EAGER: lambda: function(*args)}
    started = time.perf_counter()
    compiled = _compile(function, device)
    expected, result = function(*args), compiled(*args)
    first_call_ms = (time.perf_counter() - started) * 1e3
    fallbacks = sum(len(report.fallbacks) for report in list(session.reports)[planned:])
    _check(row, KAGENT, result, expected)
    contenders[KAGENT] = lambda: compiled(*args)
    unavailable: dict[str, str] = {}
    for peer in peers:
        try:
            call, result = peer.call(row.name, function, args)
        except NotMeasuredError as error:
            unavailable[peer.name] = str(error)
            continue
        _check(row, peer.name, result, expected)
        contenders[peer.name] = call
    per_call = time_calls(contenders, calls_per_round(contenders[EAGER], MOST_CALLS), rounds, settle=1)
    shown = longest_tasks(function, args, device, tasks) if tasks else ()
    _forget(session)
    return RowFigures(row, per_call, first_call_ms, fallbacks, unavailable, shown)


def _compile(function: Function, device: str) -> Function:
    torch._dynamo.reset()  # what other rows compiled of torch.matmul and the like
    compiled: Any = torch.compile(function, backend="kagent", options={"device": device})
    return compiled  # type: ignore[no-any-return]


def _forget(session: Any) -> None:
    torch._dynamo.reset()
    gc.collect()
    session.close_abandoned()


def _check(row: Row, contender: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a contender's result with eager's.

    Raises
    ------
    KagentError
        When it is wrong.
    """
    try:
        torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE)
    except AssertionError as error:
        raise KagentError(
            f"{contender} computes row '{row.name}' wrong: {' '.join(str(error).split())}",
            hint="run it alone, with --rows; KAGENT_LOGS=codegen=debug prints kagent's kernels",
        ) from error
