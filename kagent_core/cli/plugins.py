"""``kagent plugins``: the plugins that are installed. None is imported.

With ``--json``, a list with one object per plugin:

``name``
    The entry point's name; for a device plugin, the device type.
``group``
    The entry point's group: ``"kagent.plugins"`` (devices) or ``"kagent.stages"``.
``distribution``, ``version``
    Who brings it.
``target``
    The module that the entry point names.
``state``
    ``"listed"``, ``"blocked"`` or ``"conflict"``.
``reason``
    Why it cannot be used; null when nothing is known against it.
"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from kagent_core.cli.output import JsonOption, make_console, make_table, print_json, print_remark
from kagent_core.config import load_config
from kagent_core.plugins import DEVICE_GROUP, PluginEntry, PluginManager, PluginState


def list_plugins(as_json: JsonOption = False) -> None:
    """List the installed plugins, without importing them."""
    entries = PluginManager(load_config()).entries()
    if as_json:
        print_json([_as_json(entry) for entry in entries])
        return
    console = make_console()
    if not entries:
        print_remark(console, "no plugin is installed")
        print_remark(console, "hint: install one: `pip install kagent-cpu` (or kagent-cuda, kagent-opencl)")
        return
    table = make_table("name", "brings", "state", "distribution", "target", "reason")
    for entry in entries:
        table.add_row(
            entry.name,
            "a device" if entry.group == DEVICE_GROUP else "stages",
            Text(entry.state.value, style="" if entry.state is PluginState.LISTED else "yellow"),
            f"{entry.distribution} {entry.version}".strip(),
            entry.target,
            entry.reason or "",
        )
    console.print(table)
    if any(entry.state is PluginState.LISTED for entry in entries):
        console.print()
        print_remark(console, "listed: not imported; `kagent devices` imports device plugins and says what they find")


def _as_json(entry: PluginEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "group": entry.group,
        "distribution": entry.distribution,
        "version": entry.version,
        "target": entry.target,
        "state": entry.state.value,
        "reason": entry.reason,
    }
