"""``kagent demo``: semantic search with a real model, compiled by kagent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from kagent_core.cli.output import (
    DeviceOption,
    counted,
    make_console,
    make_table,
    print_line,
    print_paragraphs,
    print_remark,
)
from kagent_core.errors import KagentError

if TYPE_CHECKING:
    from kagent_core.demo.passages import Passage
    from kagent_core.demo.search import Outcome

QUESTIONS = (
    "How do I run my own PyTorch model with kagent?",
    "What does a plugin for a new device have to bring?",
    "What happens when a device has no kernel for an operator?",
    "How can I see what kagent did with my model, and why?",
)


def demo_command(
    queries: Annotated[
        list[str] | None,
        typer.Option("--query", metavar="TEXT", help="Your own question; may be given more than once."),
    ] = None,
    device: DeviceOption = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="DIR", help="Search the *.md, *.txt and *.rst files in DIR instead."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="K", min=1, help="Passages per question; else 1, or 3 for your own."),
    ] = None,
) -> None:
    """Search kagent's docs, or your own text, by meaning.

    The sentence-embedding model all-MiniLM-L6-v2 is compiled with kagent and answers a few questions.
    A table then compares its time and results with eager PyTorch.
    """
    if text is not None and not queries:
        raise KagentError("--text was given without a question", hint='ask one: --query "..."')

    from kagent_core.demo.files import own_docs, users_files
    from kagent_core.demo.search import search

    console = make_console()
    files = own_docs() if text is None else users_files(text)
    questions = queries or QUESTIONS
    with _progress(console) as on_progress:
        top = top or (3 if queries else 1)
        outcome = search(files, questions, device=device, top=top, on_progress=on_progress)
    _print_summary(console, outcome, len(files))
    for question, answer in zip(questions, outcome.answers, strict=True):
        _print_answer(console, question, answer)
    _print_comparison(console, outcome)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on a terminal; print nothing elsewhere."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    # Redrawn when something is done, and else rarely: drawing takes time from what is being measured.
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet, refresh_per_second=2) as progress:
        task = progress.add_task("starting")

        def show(doing: str, done: int, steps: int) -> None:
            progress.update(task, description=doing, completed=done, total=steps or None, refresh=True)

        yield show


def _print_summary(console: Console, outcome: Outcome, files: int) -> None:
    from kagent_core.demo.encoder import MODEL_NAME

    target, embedded = outcome.target, outcome.embedded
    emulated = ", emulated" if target.emulated else ""
    print_remark(
        console,
        f"{MODEL_NAME} on {target.device} ({target.name}{emulated}): "
        f"{counted(outcome.passages, 'passage')} of {counted(files, 'file')} embedded in {embedded.total_s:.1f} s, "
        f"compilation included ({embedded.first_s:.1f} s for the first batch)",
    )


def _print_answer(console: Console, question: str, answer: Sequence[tuple[float, Passage]]) -> None:
    console.print()
    print_line(console, Text(question, style="bold cyan"))
    for score, passage in answer:
        where = f"{passage.file}: {passage.heading}" if passage.heading else passage.file
        print_line(console, Text(f"  {score:.2f}  ", style="green").append(where, style="not bold dim"))
        print_paragraphs(console, passage.text, indent=8)


def _print_comparison(console: Console, outcome: Outcome) -> None:
    from torch import get_num_threads

    target, comparison, reports = outcome.target, outcome.comparison, outcome.embedded.reports
    fallbacks = Counter(fallback for report in reports for fallback in report.fallbacks)
    table = make_table("device", "eager ms>", "kagent ms>", "largest difference>", "tasks per call>", "fallbacks>")
    table.add_row(
        f"{target.device}, emulated" if target.emulated else str(target.device),
        str(comparison.eager),
        str(comparison.kagent),
        f"{comparison.difference:.1e}" if comparison.difference else "0",
        str(sum(report.tasks for report in reports)),
        str(fallbacks.total()),
    )
    console.print()
    console.print(table)
    for fallback, count in fallbacks.items():
        times = f"{count} × " if count > 1 else ""
        print_remark(console, f"fallback: {times}{fallback.signature} ran on {fallback.device}: {fallback.reason}")
    texts, length = comparison.timed.tokens.shape
    threads = get_num_threads()
    legend = (
        f"ms: minimum / median of {comparison.eager.rounds} rounds with {counted(texts, 'text')} of {length} tokens, "
        f"{counted(threads, 'thread')}; difference: over {counted(comparison.texts, 'text')}"
    )
    print_line(console, Text(legend, style="dim"))
