"""How the commands print."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kagent_core.cli.output import format_nbytes, make_console, print_error, print_paragraphs, print_remark
from kagent_core.errors import KagentError


def printing(width: int) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width, markup=False, highlight=False), stream


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "-"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**30, "64 GiB"),
        (2**51, "2048 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_a_remark_is_wrapped_with_its_further_lines_indented() -> None:
    console, stream = printing(12)
    print_remark(console, "one two three [four] five")
    assert stream.getvalue() == "one two\n  three\n  [four]\n  five\n"


def test_paragraphs_keep_their_lines_and_have_no_spaces_at_the_end() -> None:
    console, stream = printing(14)
    print_paragraphs(console, "one two three\n\n  code", indent=4)
    assert stream.getvalue() == "    one two\n    three\n\n      code\n"


def test_an_error_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(KagentError(f"'[bold]{'x' * 200}' is no name", hint="use [another]"))
    shown = capsys.readouterr()
    assert shown.err == f"error: '[bold]{'x' * 200}' is no name\n  hint: use [another]\n"
    assert shown.out == ""


def test_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width == 100
    monkeypatch.setenv("COLUMNS", "77")
    assert make_console().width == 77
