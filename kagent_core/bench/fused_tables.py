"""The figures of ``kagent bench fused`` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from kagent_core.bench.fused_figures import FusedFigures, RowFigures
from kagent_core.bench.tables import format_ratio, print_aims
from kagent_core.bench.timing import Timing
from kagent_core.cli.output import format_nbytes, make_table, print_remark

COMPILERS = ("inductor", "kagent")
CONTENDERS = ("eager", *COMPILERS)


def print_fused(console: Console, figures: FusedFigures) -> None:
    """Print the times, what compiling took and what memory a call needs, then the aims."""
    machine = figures.machine
    print_remark(
        console,
        f"{machine['processor']}, {machine['threads']} thread, torch {machine['torch']}, Python {machine['python']}; "
        f"minimum / median of {figures.rounds} rounds in which the contenders take turns",
    )
    _print_times(console, figures)
    _print_costs(console, figures)
    print_aims(console, figures.aims())
    print_remark(console, f"measured in {figures.elapsed_s:.0f} s")


def _print_times(console: Console, figures: FusedFigures) -> None:
    table = make_table(
        "ms per call", "size", *(f"{name}>" for name in CONTENDERS), "over\neager>", "over\ninductor>", "over\nbest>"
    )
    for label, row in _labelled(figures.rows):
        times = (_milliseconds(row.per_call.get(name)) for name in CONTENDERS)
        ratios = (row.ratio("eager"), row.ratio("inductor"), row.best_ratio)
        table.add_row(label, row.size, *times, *map(format_ratio, ratios))
    means = figures.means()
    shown = (format_ratio(means[name]) for name in ("eager", "inductor", "best"))
    table.add_row("geometric mean", *[""] * 4, *shown, style="bold")
    console.print()
    console.print(table)
    print_remark(
        console,
        "without gradients; inductor: torch.compile's default backend; over: kagent's time over the other's, by the "
        "minima, so that below 1 kagent is faster; best: the faster of eager and inductor",
    )
    _print_unavailable(console, figures.rows)


def _print_costs(console: Console, figures: FusedFigures) -> None:
    table = make_table(
        "costs",
        "shape",
        "compile, ms:\ninductor>",
        "\nkagent>",
        "\nratio>",
        "memory:\ninductor>",
        "\nkagent>",
        "\nratio>",
    )
    for label, row in _labelled(figures.rows):
        table.add_row(
            label,
            "x".join(map(str, row.shape)),
            *(_whole(row.compile_ms(name)) for name in COMPILERS),
            format_ratio(row.compile_ratio),
            *(format_nbytes(row.memory[name].nbytes) if name in row.memory else "-" for name in COMPILERS),
            format_ratio(row.memory_ratio),
        )
    means = figures.means()
    compiling, memory = format_ratio(means["compile"]), format_ratio(means["memory"])
    table.add_row("geometric mean", *[""] * 3, compiling, *[""] * 2, memory, style="bold")
    console.print()
    console.print(table)
    print_remark(
        console,
        "compile: the first call less another one, with cold caches, in a process that has compiled before; memory: "
        "most of what a call allocates and has not freed yet, with its result, and what is kept between calls; "
        "below 1 kagent needs less",
    )


def _labelled(rows: Sequence[RowFigures]) -> Iterator[tuple[str, RowFigures]]:
    """Yield the rows, the first of each chain with its name."""
    before = ""
    for row in rows:
        yield ("" if row.chain == before else row.chain), row
        before = row.chain


def _print_unavailable(console: Console, rows: Sequence[RowFigures]) -> None:
    """Print each reason once, with the rows that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for one in row.unavailable.items():
            found.setdefault(one, []).append(row.name)
    for (contender, reason), names in found.items():
        which = "every row" if len(names) == len(rows) else ", ".join(names)
        print_remark(console, f"{contender} could not compile {which}: {reason}")


def _milliseconds(timing: Timing | None) -> str:
    return "-" if timing is None else f"{_significant(timing.minimum / 1e3)} / {_significant(timing.median / 1e3)}"


def _significant(value: float) -> str:
    """Return a number with three significant digits, or three decimals where that is less."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
