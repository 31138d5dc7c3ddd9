"""The docs list which of PyTorch's core operators have generated kernels, as the code has it."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kagent_core.backend import decompositions
from kagent_core.codegen.coverage import NOT_GENERATED, Coverage, coverage

PAGE = Path(__file__).parents[2] / "docs" / "generated-kernels.md"
BEGIN, END = "<!-- core operators -->\n", "<!-- end -->"
UPDATE = "python -m pytest tests/docs/test_core_operators.py --update-golden"

GROUPS = {
    "lowered": "Lowered to an expression",
    "parametrised": "With a parametrised kernel",
    "decomposed": "Decomposed",
    "view": "Views",
}

COVERAGE = list(coverage(frozenset(decompositions())))


def short(operator: Coverage) -> str:
    return operator.signature.removeprefix("aten::")


def paragraphs() -> Iterator[str]:
    """Yield what the page says, group by group."""
    for how, title in GROUPS.items():
        names = [f"`{short(operator)}`" for operator in COVERAGE if operator.how == how]
        text = f"**{title}** ({len(names)}): {', '.join(names)}."
        yield textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
    left = [operator for operator in COVERAGE if operator.how == "none"]
    yield f"**Without a generated kernel** ({len(left)}): the device's own kernel runs, or the fallback device's."
    rows = [f"| `{short(operator)}` | {operator.reason} |" for operator in left]
    yield "\n".join(["| operator | why |", "|---|---|", *rows])


def test_the_page_lists_what_the_code_covers(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    written, _, after = rest.partition(END)
    expected = "\n" + "\n\n".join(paragraphs()) + "\n\n"
    assert END in rest
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + BEGIN + expected + END + after, encoding="utf-8", newline="\n")
        return
    if written != expected:
        lines = difflib.unified_diff(written.splitlines(True), expected.splitlines(True), PAGE.name, "the code")
        pytest.fail(f"{''.join(lines)}\nWrite the list anew:\n    {UPDATE}")


def test_every_core_operator_is_accounted_for() -> None:
    signatures = [operator.signature for operator in COVERAGE]
    assert len(signatures) > 150
    assert len(set(signatures)) == len(signatures)
    assert {operator.how for operator in COVERAGE} == {*GROUPS, "none"}


def test_every_operator_without_a_kernel_has_its_reason() -> None:
    left = {operator.signature: operator.reason for operator in COVERAGE if operator.how == "none"}
    assert [signature for signature, reason in left.items() if not reason] == []
    # and no reason outlives its operator
    assert set(NOT_GENERATED) == set(left)
