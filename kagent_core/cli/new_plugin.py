"""``kagent new-plugin``: a device plugin to begin with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kagent_core.cli.output import make_console


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The device type, such as toy.", show_default=False)],
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="Where to; by default ./kagent-NAME.", show_default=False),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="SHAPE",
            help="language: the driver compiles a C-like language. kernels: it has a fixed set of kernels.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="The hardware's own name.")] = None,
    author: Annotated[str | None, typer.Option("--author", metavar="TEXT", help="Who writes the plugin.")] = None,
    license_name: Annotated[
        str | None,
        typer.Option("--license", metavar="NAME", help="Apache-2.0, MIT, BSD-3-Clause or Proprietary."),
    ] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Ask nothing: what is not given is the default.")
    ] = False,
) -> None:
    """Make a device plugin that works at once, on an emulated device.

    What is not given as an option is asked, unless there is no terminal to ask on.
    The plugin's README says what to do next, step by step.
    """
    from kagent_core.plugin_template import render

    folder = into if into is not None else Path(f"kagent-{name.replace('_', '-')}")
    given = {"shape": shape, "title": title, "author": author, "license": license_name}
    answers = {question: answer for question, answer in given.items() if answer is not None}
    render(name, folder, answers, ask=not defaults and sys.stdin.isatty())
    console = make_console()
    console.print(f"The plugin of device '{name}' is in {folder}. Next:", soft_wrap=True)
    for line in (
        f"cd {folder}",
        'python -m pip install -e ".[test]"',
        "python -m pytest              # everything passes: the device is emulated",
        f"kagent conformance {name}:0    # what works on it",
    ):
        console.print(f"    {line}", soft_wrap=True)
    console.print("Then follow the steps in README.md.", soft_wrap=True)
