"""The figures of ``kagent bench overhead`` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from kagent_core.bench.extraction import PARTS, ExtractionFigures
from kagent_core.bench.figures import Aim, Figures
from kagent_core.bench.functions import FunctionFigures
from kagent_core.bench.replay import WIDTH, ReplayFigures
from kagent_core.cli.output import make_table, print_remark


def print_figures(console: Console, figures: Figures) -> None:
    """Print a table per part, then the aims."""
    machine = figures.machine
    print_remark(
        console,
        f"{machine['processor']}, {machine['threads']} thread, torch {machine['torch']}, Python {machine['python']}; "
        f"minimum / median of {figures.plan_rounds} rounds for extraction, {figures.call_rounds} for calls, in which "
        "the contenders take turns",
    )
    _print_extraction(console, figures.extraction)
    _print_replay(console, figures.replay)
    _print_functions(console, figures.functions)
    print_aims(console, figures.aims())
    print_remark(console, f"measured in {figures.elapsed_s:.0f} s")


def _print_extraction(console: Console, extraction: Sequence[ExtractionFigures]) -> None:
    table = make_table("µs per operator of a graph of", *(f"{one.operators:,}>" for one in extraction))
    table.add_row("tasks (a view is none)", *(f"{one.tasks:,}" for one in extraction))
    for part in PARTS:
        table.add_row(part.replace("_", " "), *(str(one.parts[part]) for one in extraction))
    table.add_row("from captured graph to plan", *(str(one.total) for one in extraction), style="bold")
    console.print()
    console.print(table)


def _print_replay(console: Console, replay: Sequence[ReplayFigures]) -> None:
    table = make_table("µs per task of a plan", "tasks>", *(f"{name}>" for name in replay[0].per_task), "overhead>")
    for one in replay:
        table.add_row(one.name, f"{one.tasks:,}", *map(str, one.per_task.values()), str(one.overhead))
    console.print()
    console.print(table)
    print_remark(
        console,
        f"tensors of {WIDTH} floats; bare calls: the same kernels with arguments that are ready; "
        "overhead: kagent less bare calls",
    )


def _print_functions(console: Console, called: Sequence[FunctionFigures]) -> None:
    table = make_table("µs per call of a function", "", "time>", "/ eager>", "/ default>", "first call, ms>")
    for one in called:
        for contender, timing in one.per_call.items():
            first = one.first_call_ms.get(contender)
            table.add_row(
                one.name if contender == "eager" else "",
                contender,
                str(timing),
                format_ratio(one.ratio(contender, "eager")),
                format_ratio(one.ratio(contender, "default backend")),
                "-" if first is None else f"{first:.0f}",
            )
    console.print()
    console.print(table)
    print_remark(
        console,
        "without gradients; default backend: torch.compile's own; aot_eager compiles nothing and shows what Dynamo "
        "and AOTAutograd cost by themselves; ratios are those of the minima; a first call includes compiling, with "
        "the caches as they were",
    )
    for one in called:
        for contender, reason in one.unavailable.items():
            print_remark(console, f"{contender} could not compile {one.name}: {reason}")


def print_aims(console: Console, aims: Sequence[Aim]) -> None:
    """Print what figures should be at most, and what they were."""
    table = make_table("aim, by the minima", "worst case", "at most>", "measured>", "")
    for aim in aims:
        table.add_row(aim.name, aim.case, f"{aim.at_most:g}", f"{aim.measured:.2f}", "met" if aim.met else "missed")
    console.print()
    console.print(table)


def format_ratio(value: float | None) -> str:
    """Return a ratio, or a dash for none."""
    return "-" if value is None else f"{value:.2f}"
