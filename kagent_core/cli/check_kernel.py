"""``kagent check-kernel``: kernels of one's own against eager PyTorch, and how fast they are.

With ``--json``, an object:

``right``
    Whether every kernel is.
``kernels``
    A list with one object per kernel: ``signature``, ``name``, ``device``, ``origin``, ``right``, ``samples``,
    ``taken``, ``compacted``, ``refused`` (an object: how many calls by reason), ``errors`` (the same of calls that
    ended with an error), ``broken`` (why it cannot be used; null: it can), ``decomposed`` (whether torch.compile takes
    the operator apart before kagent sees it), ``wrong`` (how many results), ``first_wrong`` (null, or an object:
    ``call``, ``difference``, ``index``, ``got``, ``expected``, ``arguments`` as ``name``, ``type`` and ``value``, and
    ``launch_config``), ``times`` (per size: ``tensors``, ``own_kernels``, ``per_call``) and ``remarks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kagent_core.cli.isolation import Isolation, isolate
from kagent_core.cli.output import (
    JsonOption,
    counted,
    make_console,
    make_table,
    print_json,
    print_line,
    print_remark,
)
from kagent_core.config import Config, load_config
from kagent_core.errors import KagentError
from kagent_core.plugins import PluginManager

if TYPE_CHECKING:
    from kagent_core.bench.one_kernel import KernelTimes
    from kagent_core.kernels import UserKernel
    from kagent_core.specs import PackedArg
    from kagent_core.testing.kernel_check import KernelCheck, WrongResult
    from kagent_core.testing.operator_samples import OperatorCall

_SHOWN_REASONS = 8


def check_kernel_command(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A Python script that registers kernels, or the source of one kernel.",
            show_default=False,
        ),
    ] = None,
    from_config: Annotated[
        bool, typer.Option("--config", help="Check the kernels of the config key kernels instead of a file.")
    ] = False,
    signature: Annotated[
        str | None, typer.Option("--signature", metavar="NAME", help="Of a source: the operator, such as aten::gelu.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Of a source: TYPE or TYPE:INDEX.")
    ] = None,
    prototype: Annotated[
        str | None,
        typer.Option("--prototype", metavar="TEXT", help="Of a source: its prototype; else read from the source."),
    ] = None,
    derived: Annotated[
        list[str] | None,
        typer.Option("--derived", metavar="NAME=EXPR", help="Of a source: a parameter that is derived; repeatable."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, help="Most samples per database entry and dtype.")
    ] = 10,
    timed: Annotated[bool, typer.Option("--time/--no-time", help="Whether right kernels are timed.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Compare kernels of your own with eager PyTorch, then time them.

    Each kernel computes samples of torch's operator database, and variants of them: strides, offsets,
    empty tensors, NaN and infinities; one that is right, sizes at the edges of blocks, too. What it
    writes must stay within its results. The exit code is 1 when a kernel is wrong, or computed nothing.
    """
    isolation = isolate()
    source = {"--signature": signature, "--device": device, "--prototype": prototype, "--derived": derived or None}
    config = load_config()
    kernels = _kernels(file, from_config, source, config)
    reports = [_check(kernel, config, samples, timed, as_json, isolation) for kernel in kernels]
    right = all(found.right for found, _ in reports)
    if as_json:
        print_json({"right": right, "kernels": [_as_json(found, times) for found, times in reports]})
    elif len(reports) > 1:
        wrong = [found.kernel.descriptor.name for found, _ in reports if not found.right]
        told = f"not right: {', '.join(wrong)}" if wrong else "all are right"
        print_remark(make_console(), f"{counted(len(reports), 'kernel')} checked, {told}")
    if not right:
        raise typer.Exit(1)


# -- which kernels


def _kernels(file: Path | None, from_config: bool, source: dict[str, Any], config: Config) -> list[UserKernel]:
    from kagent_core.kernels import configured_kernels

    if from_config == (file is not None):
        raise KagentError(
            "check-kernel got a FILE and --config" if from_config else "check-kernel got neither a FILE nor --config",
            hint="name a Python script that registers kernels, or the source of one kernel; or say --config alone",
        )
    given = [option for option, value in source.items() if value is not None]
    if file is None:
        if given:
            raise KagentError(f"{given[0]} is for the source of one kernel", hint="the config says it of each kernel")
        kernels = list(configured_kernels(config))
        if not kernels:
            raise KagentError("the config has no kernels", hint="add some with the key kernels, or name a FILE")
        return kernels
    if not file.is_file():
        raise KagentError(f"there is no file '{file}'")
    if file.suffix != ".py":
        return [_source_kernel(file, source, config)]
    if given:
        raise KagentError(f"{given[0]} is for the source of one kernel, and '{file}' is a Python script")
    return _registered_by(file)


def _source_kernel(file: Path, source: dict[str, Any], config: Config) -> UserKernel:
    from kagent_core.kernels import kernel

    signature = source["--signature"]
    if signature is None:
        raise KagentError(f"nothing says which operator '{file}' computes", hint="add --signature aten::...")
    device = source["--device"] or str(PluginManager(config).resolve(config.device).device)
    derived = dict(_pair(text) for text in source["--derived"] or [])
    made: UserKernel = kernel(
        signature,
        device=device,
        source=file,
        prototype=source["--prototype"],
        derived=derived or None,
        origin=str(file),
    )
    made.unregister()
    return made


def _pair(text: str) -> tuple[str, str]:
    name, equals, expression = (part.strip() for part in text.partition("="))
    if not equals or not name or not expression:
        raise KagentError(f"--derived is '{text}', expected NAME=EXPRESSION", hint="for example --derived n=numel")
    return name, expression


def _registered_by(file: Path) -> list[UserKernel]:
    """Run a script and return the kernels that it registers, each by itself."""
    from kagent_core.cli.needs import load_module
    from kagent_core.kernels import registered_kernels

    before = registered_kernels()
    load_module(file)
    made = [kernel for kernel in registered_kernels() if kernel not in before]
    if not made:
        raise KagentError(f"'{file}' registers no kernel", hint="register one with kagent_core.kernel(...)")
    for kernel in made:
        kernel.decorated = None  # the decorated one is in the list itself
        kernel.unregister()
    return made


# -- checking and timing


def _check(
    kernel: UserKernel, config: Config, samples: int, timed: bool, as_json: bool, isolation: Isolation
) -> tuple[KernelCheck, KernelTimes | None]:
    from kagent_core.bench.console import progress_bars
    from kagent_core.bench.one_kernel import SIZES, time_kernel
    from kagent_core.testing.kernel_check import check_kernel, without_kernels

    console = make_console(stderr=as_json)
    named = f"kernel '{kernel.descriptor.name}' for {kernel.descriptor.signature}"
    with progress_bars(console) as progress:
        bar = progress.add_task(f"checking {kernel.descriptor.name}", total=None)

        def on_call(call: OperatorCall) -> None:
            isolation.note(f"{named}, {call}")
            progress.advance(bar)

        found = check_kernel(kernel, config, samples, on_call)
    if not as_json:
        _print_check(console, found)
    if not timed or not found.right or found.base is None:
        return found, None
    with progress_bars(console) as progress:
        bar = progress.add_task(f"timing {kernel.descriptor.name}", total=len(SIZES))
        isolation.note(f"the timing of {named}")
        times = time_kernel(kernel, without_kernels(config, kernel), found.base, lambda: progress.advance(bar))
    if not as_json:
        _print_times(console, kernel, times)
    return found, times


# -- for people


def _print_check(console: Console, found: KernelCheck) -> None:
    kernel = found.kernel.descriptor
    console.print(Text(f"{kernel.name}", style="bold") + f" for {kernel.signature} on {found.kernel.device}, ", end="")
    print_line(console, Text(kernel.origin))
    if found.broken is not None:
        print_line(console, Text("  broken: ", style="bold red") + Text(found.broken.message, style="not bold default"))
        if found.broken.hint:
            print_remark(console, f"  hint: {found.broken.hint}")
        console.print()
        return
    compacted = f", {found.compacted} of them after a copy into another layout" if found.compacted else ""
    print_remark(console, f"  {counted(found.samples, 'call')}: {found.taken} computed by the kernel{compacted}")
    _print_counts(console, "left to other kernels", found.refused)
    _print_counts(console, "ended with an error", found.errors)
    if found.wrong:
        right = found.taken - len(found.wrong)
        print_remark(console, f"  {right} equal eager PyTorch, {len(found.wrong)} do not. The first that does not:")
        _print_wrong(console, found.wrong[0])
    elif found.taken:
        print_remark(console, f"  equal to eager PyTorch: {'all of them' if found.taken > 1 else 'yes'}")
    else:
        print_remark(console, "  nothing was checked: the kernel took none of the calls")
    if _is_decomposed(kernel.signature):
        print_remark(
            console,
            f"  torch.compile takes {kernel.signature} apart into other operators before kagent sees it: the kernel "
            "is used by run_op, and not in a compiled model",
        )
    console.print()


def _print_counts(console: Console, what: str, counts: Any) -> None:
    if counts:
        print_remark(console, f"  {sum(counts.values())} {what}:")
    for reason, count in counts.most_common(_SHOWN_REASONS):
        print_remark(console, f"    {count:>4}  {reason}")
    if len(counts) > _SHOWN_REASONS:
        print_remark(console, f"    and {counted(len(counts) - _SHOWN_REASONS, 'other reason')}")


def _print_wrong(console: Console, wrong: WrongResult) -> None:
    element = wrong.error.element
    print_remark(console, f"    {wrong.call}")
    if element is None:
        print_remark(console, f"    {wrong.error}")
    else:
        index = f"[{', '.join(map(str, element.index))}]" if element.index else "of 0 dimensions"
        print_remark(console, f"    {element.count} of {element.total} elements are wrong, the first one is {index}:")
        print_remark(console, f"      expected {element.want}")
        print_remark(console, f"      got      {element.got}")
    print_remark(console, "    called with:")
    for line in _columns([(arg.name, arg.type or "", _value(arg)) for arg in wrong.task.args]):
        print_line(console, Text(f"      {line}"))
    print_remark(console, f"    launch config: {_launch(wrong)}")


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines, their columns one below the other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def _launch(wrong: WrongResult) -> str:
    return "nothing is launched" if wrong.task.config is None else str(wrong.task.config)


def _value(arg: PackedArg) -> str:
    from kagent_core.specs import TensorSpec

    if isinstance(arg.value, TensorSpec):
        access = "" if arg.access is None else f", {arg.access.value}"
        return f"{arg.value} strides {arg.value.strides} offset {arg.value.storage_offset}{access}"
    if isinstance(arg.value, tuple):
        return f"({', '.join(map(str, arg.value))})"
    return "null" if arg.value is None else str(arg.value)


def _print_times(console: Console, kernel: UserKernel, times: KernelTimes) -> None:
    from kagent_core.bench.one_kernel import EAGER, OWN, YOURS
    from kagent_core.bench.tables import format_ratio

    if times.sizes:
        table = make_table("µs per call", f"{YOURS}>", f"{kernel.device}'s own>", "eager>", "/ own>", "/ eager>")
        table.columns[0].no_wrap = True
        for size in times.sizes:
            own = size.per_call.get(OWN)
            table.add_row(
                size.tensors,
                str(size.per_call[YOURS]),
                "-" if own is None else str(own),
                str(size.per_call[EAGER]),
                format_ratio(size.ratio(OWN)),
                format_ratio(size.ratio(EAGER)),
            )
        console.print(table)
        names = list(dict.fromkeys(name for size in times.sizes for name in size.own_kernels))
        print_remark(
            console,
            "minimum / median, one thread, in turn; ratios are those of the minima, below 1 yours is faster; "
            f"{kernel.device}'s own: {', '.join(names) or 'none'}",
        )
    for remark in times.remarks:
        print_remark(console, remark)
    console.print()


def _is_decomposed(signature: str) -> bool:
    from kagent_core.backend import decompositions
    from kagent_core.capture.schemas import resolve_overload

    overload = resolve_overload(signature)
    return overload in decompositions() or overload._can_decompose()


# -- for programs


def _as_json(found: KernelCheck, times: KernelTimes | None) -> dict[str, Any]:
    kernel = found.kernel.descriptor
    return {
        "signature": kernel.signature,
        "name": kernel.name,
        "device": str(found.kernel.device),
        "origin": kernel.origin,
        "right": found.right,
        "samples": found.samples,
        "taken": found.taken,
        "compacted": found.compacted,
        "refused": dict(found.refused),
        "errors": dict(found.errors),
        "broken": None if found.broken is None else str(found.broken),
        "decomposed": _is_decomposed(kernel.signature),
        "wrong": len(found.wrong),
        "first_wrong": _wrong_as_json(found.wrong[0]) if found.wrong else None,
        "times": [size.as_dict() for size in times.sizes] if times else [],
        "remarks": list(times.remarks) if times else [],
    }


def _wrong_as_json(wrong: WrongResult) -> dict[str, Any]:
    element = wrong.error.element
    return {
        "call": str(wrong.call),
        "difference": str(wrong.error),
        "index": None if element is None else list(element.index),
        "got": None if element is None else element.got,
        "expected": None if element is None else element.want,
        "arguments": [{"name": arg.name, "type": arg.type, "value": _value(arg)} for arg in wrong.task.args],
        "launch_config": None if wrong.task.config is None else str(wrong.task.config),
    }
