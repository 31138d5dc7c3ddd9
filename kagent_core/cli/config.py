"""``kagent config``: every configuration value and where it came from.

With ``--json``, an object with one object per key:

``value``
    The value: a string, a number, a boolean, a list, an object or null.
``source``
    An object: ``kind`` (``"default"``, ``"environment"`` or ``"file"``), ``key`` (as it is spelt there) and
    ``path`` (the file; else null).
``description``
    What the key means.
"""

from __future__ import annotations

from rich.text import Text

from kagent_core.cli.output import JsonOption, make_console, make_table, print_json
from kagent_core.config import Source, config_rows, load_config_with_sources


def show_config(as_json: JsonOption = False) -> None:
    """Show each configuration value, where it came from and what it means."""
    config, sources = load_config_with_sources()
    rows = config_rows(config, sources)
    if as_json:
        values = config.model_dump(mode="json")
        print_json(
            {
                row.key: {
                    "value": values[row.key],
                    "source": _source_as_json(sources[row.key]),
                    "description": row.description,
                }
                for row in rows
            }
        )
        return
    table = make_table("key", "value", "source", "what it means")
    table.columns[0].no_wrap = True
    for row in rows:
        style = "dim" if sources[row.key].kind == "default" else "green"
        table.add_row(
            row.key, row.value or Text("(empty)", style="dim"), Text(row.source, style=style), row.description
        )
    make_console().print(table)


def _source_as_json(source: Source) -> dict[str, str | None]:
    return {"kind": source.kind, "key": source.key, "path": None if source.path is None else str(source.path)}
