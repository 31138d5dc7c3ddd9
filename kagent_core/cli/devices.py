"""``kagent devices``: what the plugins bring, and whether it can be used here.

With ``--json``, a list with one object per device:

``device``
    How to name it, such as ``"opencl:0"``.
``name``
    The hardware's own name.
``available``
    Whether it can be used on this machine.
``reason``
    Why not; null when it can.
``emulated``
    Whether no such hardware is involved.
``plugin``
    The distribution that brings it.
``memory_nbytes``, ``max_threads_per_block``, ``shared_nbytes``, ``max_parameters``
    Its limits, as in `DeviceInfo`.
``details``
    An object of strings: whatever else the plugin tells.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kagent_core.cli.output import (
    JsonOption,
    format_nbytes,
    make_console,
    make_table,
    print_json,
    print_remark,
)
from kagent_core.config import load_config
from kagent_core.errors import KagentError
from kagent_core.inspect import logs
from kagent_core.plugins import PluginManager
from kagent_core.specs import DeviceInfo


def list_devices(as_json: JsonOption = False) -> None:
    """List every device of every plugin, and why one cannot be used."""
    config = load_config()
    logs.configure(config.logs)
    manager = PluginManager(config)
    infos = manager.devices()
    if as_json:
        print_json([_as_json(info) for info in infos])
        return
    console = make_console()
    if infos:
        _print_table(console, infos)
    _print_choice(console, manager)


def _print_table(console: Console, infos: list[DeviceInfo]) -> None:
    table = make_table("device", "state", "name", "memory>", "plugin", "details")
    for column in table.columns:
        column.no_wrap = column.header in ("device", "memory", "plugin")
    for info in infos:
        table.add_row(
            str(info.device),
            _state(info),
            info.name,
            format_nbytes(info.memory_nbytes),
            info.plugin,
            ", ".join(f"{key} {value}" for key, value in info.details),
        )
    console.print(table)
    console.print()
    for info in infos:
        if info.reason is not None:
            print_remark(console, f"{info.device} is not available: {info.reason}")


def _state(info: DeviceInfo) -> Text:
    state = Text("available", style="green") if info.available else Text("not available", style="yellow")
    return state.append(", emulated", style="magenta") if info.emulated else state


def _print_choice(console: Console, manager: PluginManager) -> None:
    """Say which device a program gets here, or how to get one."""
    wanted = manager.config.device
    try:
        chosen = manager.resolve(wanted)
    except KagentError as error:
        print_remark(console, f"device = {wanted}: {error.message}")
        if error.hint is not None:
            print_remark(console, f"hint: {error.hint}")
    else:
        print_remark(console, f"device = {wanted}: programs run on {chosen.device}")


def _as_json(info: DeviceInfo) -> dict[str, Any]:
    return {
        "device": str(info.device),
        "name": info.name,
        "available": info.available,
        "reason": info.reason,
        "emulated": info.emulated,
        "plugin": info.plugin,
        "memory_nbytes": info.memory_nbytes,
        "max_threads_per_block": info.max_threads_per_block,
        "shared_nbytes": info.shared_nbytes,
        "max_parameters": info.max_parameters,
        "details": dict(info.details),
    }
