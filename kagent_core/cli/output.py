"""How the commands print: tables and messages for people, JSON for programs."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kagent_core.errors import KagentError

_PIPE_WIDTH = 100
"""Columns where nobody says how wide the output is; rich would take 80."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="TYPE, TYPE:INDEX or auto; else what the config says."),
]


def make_console(stderr: bool = False) -> Console:
    """Return a console that writes plain text where its output is no terminal."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def print_error(error: KagentError) -> None:
    """Print an error on stderr: what is wrong, then what to do."""
    text = Text("error: ", style="bold red").append(error.message, style="not bold default")
    if error.hint is not None:
        text.append("\n  hint: ", style="bold").append(error.hint, style="not bold default")
    make_console(stderr=True).print(text, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def make_table(*columns: str) -> Table:
    """Return an empty table; a column whose name ends in ``>`` is aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return table


def print_remark(console: Console, remark: str) -> None:
    """Print a sentence below a table; where it is too long for a line, its other lines are indented."""
    lines = Text(remark).wrap(console, console.width - 2)
    for indent, line in zip(("", *["  "] * len(lines)), lines, strict=False):
        print_line(console, Text(indent) + line)


def print_paragraphs(console: Console, text: str, indent: int) -> None:
    """Print text, wrapped and indented as a whole."""
    for line in Text(text).wrap(console, console.width - indent):
        print_line(console, Text(" " * indent) + line)


def print_line(console: Console, line: Text) -> None:
    """Print a line as it is, without the spaces at its end."""
    line.rstrip()
    console.print(line, soft_wrap=True)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one.

    Examples
    --------
    >>> counted(1, "file"), counted(0, "file"), counted(2, "registered kernel")
    ('1 file', '0 files', '2 registered kernels')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_nbytes(nbytes: int) -> str:
    """Return a size in the largest binary unit that fits.

    Examples
    --------
    >>> format_nbytes(0), format_nbytes(1536), format_nbytes(64 * 2**30)
    ('-', '1.5 KiB', '64 GiB')
    """
    if nbytes == 0:
        return "-"
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"
