"""``kagent conformance``: what of kagent works on a device.

``--json`` writes what `kagent_core.testing.conformance.report` documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kagent_core.cli.output import counted, make_console, make_table, print_line, print_paragraphs, print_remark
from kagent_core.errors import KagentError

if TYPE_CHECKING:
    from kagent_core.testing.conformance import Case, Counts, Finding, Report

_SCRIPTS_SHOWN = 2
_FAILURES_SHOWN = 20


_COLUMNS: dict[str, Callable[[Counts], int]] = {
    "cases": lambda counts: counts.cases,
    "passed": lambda counts: counts.right,
    "native": lambda counts: counts.native,
    "fallback": lambda counts: counts.fallback,
    "failed": lambda counts: counts.failed,
    "expected": lambda counts: counts.expected,
    "unexpected": lambda counts: counts.unexpected,
    "not run": lambda counts: counts.could_not_run,
}
_ALWAYS = ("cases", "passed", "native", "fallback", "failed")  # the others only where they have something to tell


def conformance_command(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="TYPE or TYPE:INDEX.", show_default=False)],
    level: Annotated[
        int | None, typer.Option("--level", metavar="N", help="The levels up to this one; else all.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every sample, dtype and model: takes hours.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PATTERN", help="Only these cases, such as '1/*transposed*'.")
    ] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - prints it.")
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as an HTML page.")
    ] = None,
    scripts: Annotated[
        Path | None, typer.Option("--scripts", metavar="DIR", help="Write a script for each failure into DIR.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the script of every failure.")] = False,
) -> None:
    """Find out what of kagent works on a device.

    Six levels of cases, from the device's contract to whole models, each compared with eager PyTorch.
    DEVICE fake is a device without hardware that comes with kagent.
    The exit code is 0 when nothing failed but what the plugin lists as failing.
    """
    from kagent_core.testing.conformance import run_conformance
    from kagent_core.testing.conformance.runner import up_to

    console = make_console(stderr=json_path == "-")
    with _quiet_logs(), _Bar() as bar:
        report = run_conformance(
            device, up_to(level), full, only, on_start=bar.start, on_finding=bar.show, doing=bar.doing
        )
    _print_report(console, report, verbose)
    written = [] if scripts is None else report.write_scripts(scripts)
    _write(console, html_path, report.to_html)
    if json_path == "-":
        typer.echo(report.to_json(), nl=False)
    elif json_path is not None:
        _write(console, Path(json_path), report.to_json)
    if scripts is not None:
        print_remark(console, f"{counted(len(written), 'script')} in {scripts}")
    if not report.passed:
        raise typer.Exit(1)


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Say nothing of fallbacks, which the report tells, unless the user asks for logs."""
    name = "KAGENT_LOGS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "error"
    try:
        yield
    finally:
        del os.environ[name]


class _Bar:
    """A progress bar on stderr, where that is a terminal."""

    def __init__(self) -> None:
        console = make_console(stderr=True)
        columns = (
            TextColumn("{task.description}", table_column=None),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("collecting", total=None)
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._progress.stop()

    def start(self, cases: Sequence[Case]) -> None:
        """Take the number of cases."""
        self._progress.update(self._task, total=len(cases))

    def doing(self, case: Case) -> None:
        """Name the case that begins."""
        failed = f", {self._failed} failed" if self._failed else ""
        self._progress.update(self._task, description=f"level {case.level}{failed}: {case.name[:40]:<40}")

    def show(self, finding: Finding) -> None:
        """Count a case that is done."""
        self._failed += finding.outcome.value == "failed"
        self._progress.advance(self._task)


def _write(console: Console, path: Path | None, text: object) -> None:
    if path is None:
        return
    assert callable(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise KagentError(f"cannot write the report to '{path}': {error.strerror}") from None
    print_remark(console, f"written to {path}")


def _print_report(console: Console, report: Report, verbose: bool) -> None:
    from kagent_core.testing.conformance import LEVELS
    from kagent_core.testing.conformance.report import OPERATORS

    counts = {level: report.counts(level) for level in report.levels}
    columns = [name for name in _COLUMNS if name in _ALWAYS or any(_COLUMNS[name](c) for c in counts.values())]
    table = make_table("level", *(f"{name}>" for name in columns))
    for column in table.columns:
        column.no_wrap = True
    for level, of_level in counts.items():
        if of_level.cases or report.only is None:
            style = "red" if of_level.failed or of_level.unexpected else "green" if of_level.flawless else ""
            numbers = (_COLUMNS[name](of_level) for name in columns)
            title = Text(f"{level} {LEVELS[level]}", style=style)
            table.add_row(title, *(str(number) if number else "-" for number in numbers))
    console.print(table)
    console.print()
    _print_failures(console, report, verbose)
    if report.counts(OPERATORS).cases and report.only is None:
        print_remark(console, "{} of {} core ATen overloads ran on the device itself".format(*report.core_operators()))
    print_line(console, Text(f"{report.info.device}: {report.badge()}", style="bold"))


def _print_failures(console: Console, report: Report, verbose: bool) -> None:
    failures = report.failures
    for number, finding in enumerate(failures):
        if number == _FAILURES_SHOWN and not verbose:
            print_remark(console, f"... and {counted(len(failures) - number, 'more failure').removesuffix('s')}")
            break
        print_line(console, Text(f"{finding.outcome.value}: ", style="bold red").append(finding.case.key, style="bold"))
        print_paragraphs(console, finding.detail, indent=2)
        if finding.script and (verbose or number < _SCRIPTS_SHOWN):
            print_remark(console, "  a script that reproduces it:")
            for line in finding.script.splitlines():
                print_line(console, Text(f"    {line}", style="dim"))
    if failures:
        console.print()
        print_remark(console, "--scripts DIR writes a script for each failure, --html FILE a page with all of them")
