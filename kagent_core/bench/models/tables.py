"""The figures of ``kagent bench models`` as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from kagent_core.bench.functions import FunctionFigures
from kagent_core.bench.models.contenders import BY_NAME, EAGER, ENGINES, INDUCTOR, KAGENT
from kagent_core.bench.models.figures import ModelFigures, ModelsFigures
from kagent_core.bench.models.machine import Machine
from kagent_core.bench.models.where import KernelFigures, Where
from kagent_core.bench.tables import format_ratio, print_aims
from kagent_core.bench.timing import Timing
from kagent_core.cli.output import counted, format_nbytes, make_table, print_remark

MOST_KERNELS = 10
"""Of a model that are printed; the JSON has all."""

_FIGURES_WIDTH = 56
"""Columns that are kept for the figures of kernels; what is left is for their names."""


def print_models(console: Console, figures: ModelsFigures) -> None:
    """Print times, speeds, starts, memory and differences, then where the time goes, then the aims."""
    environment = figures.environment
    print_remark(
        console,
        f"{environment['processor']}, {counted(figures.threads, 'thread')}, torch {environment['torch']}, Python "
        f"{environment['python']}; minimum / median of {counted(figures.rounds, 'round')} in which the contenders take "
        "turns",
    )
    _print_models(console, figures)
    _print_times(console, figures)
    _print_speeds(console, figures)
    _print_starts(console, figures)
    _print_memory(console, figures)
    _print_differences(console, figures)
    _print_unavailable(console, figures)
    _print_where(console, figures)
    _print_functions(console, figures.functions)
    if aims := figures.aims():
        print_aims(console, aims)
    print_remark(console, f"measured in {figures.elapsed_s:.0f} s")


def _print_models(console: Console, figures: ModelsFigures) -> None:
    table = make_table("model", "batch>", "of")
    for model in figures.models:
        table.add_row(model.name, str(model.batch or ""), model.what)
    console.print()
    console.print(table)
    for name in figures.contenders:
        if name in ENGINES:
            version = figures.versions.get(name, "not installed")
            print_remark(
                console,
                f"{name} ({version}) is an ahead-of-time engine: it runs a model that was exported for it, with fixed "
                "shapes and weights, outside of PyTorch",
            )


def _print_times(console: Console, figures: ModelsFigures) -> None:
    _print(console, figures, "ms per call", figures.contenders, lambda model, name: _ms(model.per_call.get(name)))
    others = [name for name in figures.contenders if name not in ENGINES and name not in (EAGER, KAGENT)]
    remark = "; ".join(f"{name}: {BY_NAME[name].what}" for name in others)
    print_remark(console, "without gradients" + (f"; {remark}" if remark else ""))


def _print_speeds(console: Console, figures: ModelsFigures) -> None:
    names = [name for name in figures.contenders if name != EAGER]
    table = make_table("times as fast as eager", *(f"{name}>" for name in names), "kagent / better\ntorch.compile>")
    for model in figures.models:
        speeds = (format_ratio(model.speed(name)) for name in names)
        table.add_row(model.name, *speeds, format_ratio(model.over_compilers))
    means = figures.speeds()
    over = figures.mean(lambda model: model.over_compilers)
    table.add_row("geometric mean", *(format_ratio(means[name]) for name in names), format_ratio(over), style="bold")
    console.print()
    console.print(table)
    print_remark(
        console,
        "by the minima; above 1 a contender is faster than eager; last column: kagent's time over that of "
        "torch.compile in the better of its modes, below 1 kagent is faster; a mean is over the models that the "
        "contender runs",
    )


def _print_starts(console: Console, figures: ModelsFigures) -> None:
    if not any(model.starts for model in figures.models):
        return
    names = [name for name in figures.contenders if name != EAGER]
    table = make_table("first / second start, s", *(f"{name}>" for name in names), "kagent /\ninductor>")
    for model in figures.models:
        table.add_row(model.name, *(_starts(model, name) for name in names), format_ratio(model.compile_ratio))
    mean = figures.mean(lambda model: model.compile_ratio)
    table.add_row("geometric mean", *[""] * len(names), format_ratio(mean), style="bold")
    console.print()
    console.print(table)
    print_remark(
        console,
        "each in a new process, from the model in PyTorch to the first result, less what another call takes, imports "
        "not counted; first: nothing in any cache; second: with what the first one left, for an engine the exported "
        f"file; ratio: of the first starts of kagent and {INDUCTOR}",
    )


def _print_memory(console: Console, figures: ModelsFigures) -> None:
    if not any(model.starts for model in figures.models):
        return
    _print(
        console,
        figures,
        "memory of calls",
        figures.contenders,
        lambda model, name: "-" if (nbytes := model.memory_nbytes(name)) is None else format_nbytes(nbytes),
    )
    print_remark(
        console,
        "by how much the resident memory of a process that has the model in PyTorch has grown at most while it is "
        "called: buffers, packed weights and an engine's own copy of them, and what compiling leaves behind",
    )


def _print_differences(console: Console, figures: ModelsFigures) -> None:
    names = [name for name in figures.contenders if name != EAGER]
    _print(
        console,
        figures,
        "largest difference to eager",
        names,
        lambda model, name: f"{model.differences[name][0]:.1e}" if name in model.differences else "-",
    )


def _print_unavailable(console: Console, figures: ModelsFigures) -> None:
    """Print each reason once, with the models that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for model in figures.models:
        for one in model.unavailable.items():
            found.setdefault(one, []).append(model.name)
    for (contender, reason), names in found.items():
        which = "any model" if len(names) == len(figures.models) else ", ".join(names)
        print_remark(console, f"no figure for {contender} in {which}: {reason}")


def _print_where(console: Console, figures: ModelsFigures) -> None:
    machine = figures.machine
    if machine is None:
        return
    copies = ", ".join(f"{format_nbytes(nbytes)}: {speed:.0f}" for nbytes, speed in machine.copies)
    console.print()
    print_remark(
        console,
        f"what the machine can do: {machine.gflops:.0f} GFLOP/s in a product with packed weights; GB/s of copies, by "
        f"what they read and write in all: {copies}",
    )
    for model in figures.models:
        if model.where is not None:
            _print_kernels(console, model.name, model.where, machine)
    print_remark(
        console,
        "ms: the least of each task, added up, while a call and its kernels are each the least as a whole, measured in "
        "turn; of machine: GFLOP/s over those of the product, or, where there is no product, GB/s over those of the "
        "smallest copy that moves as much; outside of kernels: guards, launching, looking after changed weights, and "
        "the like",
    )


def _print_kernels(console: Console, name: str, where: Where, machine: Machine) -> None:
    table = make_table(
        f"where {name}'s time goes", "tasks>", "ms>", "% of\nkernels>", "GFLOP/s>", "GB/s>", "% of\nmachine>"
    )
    for column in table.columns:
        column.no_wrap = True
    table.columns[0].max_width = max(24, console.width - _FIGURES_WIDTH)
    spent_ms = sum(kernel.time_ms for kernel in where.kernels)
    shown, rest = where.kernels[:MOST_KERNELS], where.kernels[MOST_KERNELS:]
    for kernel in shown:
        table.add_row(f"{kernel.kernel}\n  {_problem(kernel)}", *_kernel(kernel, spent_ms, machine))
    if rest:
        spent = sum(kernel.time_ms for kernel in rest)
        count = sum(kernel.count for kernel in rest)
        table.add_row("others", str(count), f"{spent:.3f}", _percent(spent / spent_ms), "", "", "")
    outside_ms = where.call_ms - where.kernels_ms
    console.print()
    console.print(table)
    print_remark(
        console,
        f"a call: {where.call_ms:.3f} ms; its kernels: {where.kernels_ms:.3f} ms; outside of kernels: {outside_ms:.3f} "
        f"ms, {_percent(where.outside)}% of a call; Dynamo's part of it, with any backend: {where.dynamo_ms:.3f} ms, "
        f"{_percent(where.dynamo_ms / where.call_ms)}%",
    )


def _problem(kernel: KernelFigures) -> str:
    """Return shapes and dtypes, without the operator where the kernel is called as it is."""
    text = kernel.problem.replace("]:c", "]")
    operator, _, rest = text.partition("(")
    return f"({rest}" if kernel.kernel.startswith(operator) else text


def _kernel(kernel: KernelFigures, spent_ms: float, machine: Machine) -> Sequence[str]:
    share = kernel.share(machine)
    return (
        str(kernel.count),
        f"{kernel.time_ms:.3f}",
        _percent(kernel.time_ms / spent_ms),
        "-" if kernel.gflops is None else f"{kernel.gflops:.0f}",
        "-" if kernel.gbytes_per_s is None else f"{kernel.gbytes_per_s:.1f}",
        "-" if share is None else _percent(share),
    )


def _print_functions(console: Console, functions: Sequence[FunctionFigures]) -> None:
    if not functions:
        return
    names = list(functions[0].per_call)
    table = make_table("µs per call of one operator", *(f"{name}>" for name in names), "kagent /\ndefault>")
    for one in functions:
        times = (str(one.per_call[name]) if name in one.per_call else "-" for name in names)
        table.add_row(one.name, *times, format_ratio(one.ratio("kagent", "default backend")))
    console.print()
    console.print(table)


def _print(
    console: Console,
    figures: ModelsFigures,
    title: str,
    names: Sequence[str],
    cell: Callable[[ModelFigures, str], str],
) -> None:
    table = make_table(title, *(f"{name}>" for name in names))
    for model in figures.models:
        table.add_row(model.name, *(cell(model, name) for name in names))
    console.print()
    console.print(table)


def _starts(model: ModelFigures, name: str) -> str:
    first, second = model.compile_s(name), model.compile_s(name, again=True)
    if first is None:
        return "-"
    return f"{first:.1f}" if second is None else f"{first:.1f} / {second:.1f}"


def _ms(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return f"{_significant(timing.minimum / 1e3)} / {_significant(timing.median / 1e3)}"


def _significant(value: float) -> str:
    """Return a number with three significant digits, or three decimals where that is less."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
