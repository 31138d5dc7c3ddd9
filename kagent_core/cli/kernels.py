"""``kagent kernels``: the kernels of a device, and those that a program needs and the device lacks.

With ``--json``, an object:

``device``
    The device's name, such as ``"opencl:0"``.
``on_demand``
    Whether the device makes kernels on demand, for operators that nobody registered a kernel for.
``kernels``
    A list with one object per kernel: ``signature``, ``name``, ``dtypes`` (a list; null: all), ``layout``,
    ``layouts`` (an object, by tensor), ``priority``, ``origin``, ``on_demand``.
``set_aside``
    A list with one object per kernel that cannot be used: ``signature``, ``name``, ``origin``, ``reason``, ``hint``.

With ``--missing`` and ``--json``, an object:

``device``
    As above.
``calls``, ``signatures``
    How many operators the program calls, and how many different ones.
``missing``
    A list with one object per signature that the device lacks, most frequent first: ``signature``, ``count``,
    ``example`` (tensors that came) and ``reasons`` (why the kernels that it has do not take them).
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kagent_core.cli.output import JsonOption, counted, make_console, make_table, print_json, print_remark
from kagent_core.config import load_config
from kagent_core.errors import KagentError
from kagent_core.inspect import logs
from kagent_core.plugins import PluginManager
from kagent_core.registry import KernelRegistry
from kagent_core.specs import DeviceInfo, KernelDescriptor

if TYPE_CHECKING:
    from kagent_core.cli.needs import Missing, Needs
    from kagent_core.device import OpenDevice


def list_kernels(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="TYPE or TYPE:INDEX.", show_default=False)],
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="Only signatures that contain this, or that match it where it has * or ?.",
            show_default=False,
        ),
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(
            "--missing",
            metavar="MODEL.py[:FUNCTION]",
            help="List what a program needs and the device lacks. The file defines `model` and `inputs`, "
            "or FUNCTION, which returns the two.",
        ),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="With --missing: the backward pass, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the kernels of a device, or those that a program needs and the device lacks.

    With --missing, the program runs once, in PyTorch itself. Its inputs are a tensor, a tuple of the
    arguments, or a dict of keyword arguments.
    """
    if train and missing is None:
        raise KagentError("--train says how to look for missing kernels", hint="add --missing MODEL.py")
    config = load_config()
    logs.configure(config.logs)
    manager = PluginManager(config)
    info = manager.resolve(device)
    try:
        opened = manager.open(info)
        if missing is None:
            _list_registered(info, opened.registry, pattern, as_json)
        else:
            _list_missing(opened, missing, pattern, train, as_json)
    finally:
        manager.close()


def _matches(signature: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    if _has_wildcard(pattern):
        return fnmatch.fnmatchcase(signature, pattern)
    return pattern in signature


def _has_wildcard(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


# -- what there is


def _list_registered(info: DeviceInfo, registry: KernelRegistry, pattern: str | None, as_json: bool) -> None:
    added = [kernel for kernel in registry.kernels() if _matches(kernel.signature, pattern)]
    on_demand = _made_on_demand(registry, pattern) if registry.resolves else []
    if as_json:
        print_json(
            {
                "device": str(info.device),
                "on_demand": registry.resolves,
                "kernels": [_as_json(kernel, False) for kernel in added]
                + [_as_json(kernel, True) for kernel in on_demand],
                "set_aside": [
                    {
                        "signature": problem.kernel.signature,
                        "name": problem.kernel.name,
                        "origin": problem.kernel.origin,
                        "reason": problem.reason,
                        "hint": problem.hint,
                    }
                    for problem in registry.problems
                ],
            }
        )
        return
    listed = _leave_out_namespaces(on_demand, pattern)
    console = make_console()
    if added or listed:
        _print_table(console, [*added, *listed])
    print_remark(console, _summary(info, registry, pattern, len(added), len(listed)))
    if pattern is not None and len(listed) < len(on_demand):
        left_out = counted(len(on_demand) - len(listed), "kernel")
        wider = f"*::{pattern}" if _has_wildcard(pattern) else f"*::*{pattern}*"
        shown_by = f"kagent kernels {info.device} '{wider}'"
        print_remark(console, f"left out: {left_out} of other namespaces than aten; to list all: {shown_by}")
    for problem in registry.problems:
        print_remark(console, f"set aside: {problem}")


def _print_table(console: Console, kernels: list[KernelDescriptor]) -> None:
    """Print a row per kernel, and below the table, once, what is the same in every row."""
    columns = {
        "dtypes": [_dtypes(kernel) for kernel in kernels],
        "layout": [_layout(kernel) for kernel in kernels],
        "priority>": [str(kernel.priority) for kernel in kernels],
        "origin": [kernel.origin for kernel in kernels],
    }
    same = {name: values[0] for name, values in columns.items() if len(set(values)) == 1}
    names = ["" if kernel.name == kernel.signature else kernel.name for kernel in kernels]
    varying = {
        "signature": [kernel.signature for kernel in kernels],
        **({"kernel": names} if any(names) else {}),
        **{name: values for name, values in columns.items() if name not in same},
    }
    table = make_table(*varying)
    for column in table.columns:
        column.no_wrap = column.header in ("signature", "kernel", "priority")
        column.overflow = "fold"
    for row in zip(*varying.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    console.print()
    if any(names) and not all(names):
        print_remark(console, "where no kernel is named, its name is the signature")
    if same:
        whose = "each has " if len(kernels) > 1 else ""
        print_remark(console, whose + "; ".join(f"{name.removesuffix('>')}: {value}" for name, value in same.items()))


def _leave_out_namespaces(on_demand: list[KernelDescriptor], pattern: str | None) -> list[KernelDescriptor]:
    """Return ATen's kernels alone, unless the pattern names a namespace or there are none."""
    namespaces = {_namespace(kernel) for kernel in on_demand}
    if pattern is None or "aten" not in namespaces or _names_a_namespace(pattern, namespaces):
        return on_demand
    return [kernel for kernel in on_demand if _namespace(kernel) == "aten"]


def _names_a_namespace(pattern: str, namespaces: set[str]) -> bool:
    if "::" in pattern or (_has_wildcard(pattern) and not pattern.startswith("*")):
        return True
    return any(pattern.strip("*") in namespace for namespace in namespaces)


def _namespace(kernel: KernelDescriptor) -> str:
    return kernel.signature.partition("::")[0]


def _made_on_demand(registry: KernelRegistry, pattern: str | None) -> list[KernelDescriptor]:
    from kagent_core.cli.needs import known_operators

    added = set(registry.signatures())
    calls = [call for call in known_operators(core_only=pattern is None) if _matches(call.signature, pattern)]
    found = [registry.resolve(call) for call in calls if call.signature not in added]
    return [kernel for kernel in found if kernel is not None]


def _summary(info: DeviceInfo, registry: KernelRegistry, pattern: str | None, added: int, on_demand: int) -> str:
    registered = f"{info.device} has {counted(added, 'registered kernel')}{_which(added, pattern)}"
    if not registry.resolves:
        return registered
    among = "core ATen's operators; a pattern looks beyond those" if pattern is None else "PyTorch's operators"
    if added:
        return f"{registered}, and {on_demand} made on demand from {among}"
    return f"{info.device} has {counted(on_demand, 'kernel')}{_which(on_demand, pattern)}, made on demand from {among}"


def _which(count: int, pattern: str | None) -> str:
    return "" if pattern is None else f" that match{'es' if count == 1 else ''} '{pattern}'"


def _dtypes(kernel: KernelDescriptor) -> str:
    return "all" if kernel.dtypes is None else ", ".join(sorted(kernel.dtypes))


def _layout(kernel: KernelDescriptor) -> str:
    general = "any strides" if kernel.layout.takes_all else str(kernel.layout)
    return "; ".join([general, *(f"{name}: {layout}" for name, layout in dict(kernel.layouts).items())])


def _as_json(kernel: KernelDescriptor, on_demand: bool) -> dict[str, Any]:
    return {
        "signature": kernel.signature,
        "name": kernel.name,
        "dtypes": None if kernel.dtypes is None else sorted(kernel.dtypes),
        "layout": str(kernel.layout),
        "layouts": {name: str(layout) for name, layout in dict(kernel.layouts).items()},
        "priority": kernel.priority,
        "origin": kernel.origin,
        "on_demand": on_demand,
    }


# -- what a program lacks


def _list_missing(opened: OpenDevice, program: str, pattern: str | None, train: bool, as_json: bool) -> None:
    from kagent_core.cli.needs import needs_of

    info, needs = opened.info, needs_of(program, opened, train)
    lacking = [missing for missing in needs.missing if _matches(missing.signature, pattern)]
    if as_json:
        print_json(
            {
                "device": str(info.device),
                "calls": needs.calls,
                "signatures": needs.signatures,
                "missing": [_missing_as_json(missing) for missing in lacking],
            }
        )
        return
    console = make_console()
    if lacking:
        table = make_table("count>", "signature", "such as", "why")
        table.columns[1].no_wrap = True
        for missing in lacking:
            why = "; ".join(missing.reasons) or "no kernel for it"
            table.add_row(str(missing.count), missing.signature, missing.example, why)
        console.print(table)
        console.print()
    print_remark(console, _needs_in_words(info, needs))


def _needs_in_words(info: DeviceInfo, needs: Needs) -> str:
    calls = sum(missing.count for missing in needs.missing)
    if needs.calls == 0:
        return "the program calls no operator"
    if not needs.missing:
        which = "the program's only call" if needs.calls == 1 else f"each of the program's {needs.calls} calls"
        return f"{info.device} has a kernel for {which}"
    return (
        f"{info.device} lacks a kernel for {calls} of the program's {counted(needs.calls, 'call')}, "
        f"for {len(needs.missing)} of its {counted(needs.signatures, 'signature')}"
    )


def _missing_as_json(missing: Missing) -> dict[str, Any]:
    return {
        "signature": missing.signature,
        "count": missing.count,
        "example": missing.example,
        "reasons": list(missing.reasons),
    }
