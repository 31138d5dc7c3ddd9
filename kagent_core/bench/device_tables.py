"""The figures of ``kagent bench device`` as tables."""

from __future__ import annotations

from rich.console import Console

from kagent_core.bench.device_figures import KAGENT, DeviceFigures, RowFigures
from kagent_core.bench.tables import format_ratio
from kagent_core.bench.timing import Timing
from kagent_core.cli.output import counted, make_table, print_remark


def print_device(console: Console, figures: DeviceFigures) -> None:
    """Print times and ratios, then what is missing and why, then the tasks where they were asked for."""
    machine = figures.machine
    print_remark(
        console,
        f"{figures.device} ({figures.name}); eager PyTorch on {machine['processor']}, "
        f"{counted(machine['threads'], 'thread')}, torch {machine['torch']}, Python {machine['python']}; "
        f"minimum / median of {figures.rounds} rounds in which the contenders take turns",
    )
    peers = [name for name in figures.contenders if name != KAGENT]
    table = make_table(
        "ms per call",
        *(f"{name}>" for name in figures.contenders),
        *(f"over\n{name.partition(':')[0]}>" for name in peers),
        "GFLOP/s\nkagent>",
        "fall-\nbacks>",
    )
    for row in figures.rows:
        times = (_milliseconds(row.per_call.get(name)) for name in figures.contenders)
        ratios = (format_ratio(row.ratio(name)) for name in peers)
        table.add_row(row.row.name, *times, *ratios, _speed(row.gflops(KAGENT)), str(row.fallbacks))
    console.print()
    console.print(table)
    print_remark(
        console,
        "without gradients; eager on the CPU; over: kagent's time over the other's, by the minima, so that below 1 "
        "kagent is faster; kagent takes inputs from host memory and leaves results there, a peer keeps both on the "
        "device",
    )
    for reason, names in _reasons(figures).items():
        print_remark(console, f"no figure for {reason[0]} in {', '.join(names)}: {reason[1]}")
    for row in figures.rows:
        _print_tasks(console, row)
    print_remark(console, f"measured in {figures.elapsed_s:.0f} s")


def _print_tasks(console: Console, row: RowFigures) -> None:
    if not row.tasks:
        return
    table = make_table(f"longest tasks of {row.row.name}", "tasks>", "ms each>", "GFLOP/s>", "launch")
    for task in row.tasks:
        name = f"{task.kernel}\n  {task.problem}"
        table.add_row(name, str(task.count), f"{task.minimum_ms:.3f}", _speed(task.gflops), task.launch)
    console.print()
    console.print(table)


def _reasons(figures: DeviceFigures) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in figures.rows:
        for contender, reason in row.unavailable.items():
            found.setdefault((contender, reason), []).append(row.row.name)
    return found


def _milliseconds(timing: Timing | None) -> str:
    return "-" if timing is None else f"{timing.minimum / 1e3:.2f} / {timing.median / 1e3:.2f}"


def _speed(gflops: float | None) -> str:
    return "-" if gflops is None else f"{gflops:.0f}"
