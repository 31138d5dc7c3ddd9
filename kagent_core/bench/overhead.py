"""``kagent bench overhead``: what kagent adds to the computation, in three tables and as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kagent_core.bench.console import measured, progress_bars
from kagent_core.bench.extraction import SIZES, measure_extraction
from kagent_core.bench.figures import Figures, describe_machine
from kagent_core.bench.functions import FUNCTIONS, measure_functions
from kagent_core.bench.replay import CASES, TASKS, measure_replay
from kagent_core.bench.tables import print_figures
from kagent_core.bench.timing import CALL_ROUNDS, PLAN_ROUNDS, one_thread


def run(console: Console, json_path: Path | None) -> None:
    """Measure on the CPU, print the tables and, when asked to, write the figures down.

    Parameters
    ----------
    console
        Where to print.
    json_path
        File for the figures as JSON.

    Raises
    ------
    KagentError
        When the CPU cannot be used, or the file cannot be written.
    """
    measured(json_path, lambda: measure(console), print_figures, console)


def measure(
    console: Console,
    sizes: Sequence[int] = SIZES,
    tasks: int = TASKS,
    plan_rounds: int = PLAN_ROUNDS,
    call_rounds: int = CALL_ROUNDS,
) -> Figures:
    """Measure all three parts in one thread, with progress bars on a terminal.

    Parameters
    ----------
    console
        For the progress bars.
    sizes
        Operators of the graphs that are planned, ascending; at least two.
    tasks
        Tasks of the plans that are replayed.
    plan_rounds, call_rounds
        Rounds that count, where plans are made and where plans or functions are called.
    """
    started = time.perf_counter()
    with one_thread(), progress_bars(console) as progress:
        task = progress.add_task(f"planning graphs of up to {max(sizes):,} operators", total=plan_rounds + 1)
        extraction = measure_extraction(sizes, plan_rounds, lambda: progress.advance(task))
        task = progress.add_task("replaying plans", total=len(CASES) * (call_rounds + 1))
        replay = measure_replay(tasks, call_rounds, lambda: progress.advance(task))
        task = progress.add_task("compiling and calling functions", total=len(FUNCTIONS) * (call_rounds + 1))
        called = measure_functions(call_rounds, lambda: progress.advance(task))
        elapsed_s = time.perf_counter() - started
        return Figures(describe_machine(), plan_rounds, call_rounds, extraction, replay, called, elapsed_s)
