"""The demo's work: embed passages with the compiled model, find those that answer, compare with eager."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kagent_core.config import load_config
from kagent_core.demo.comparison import ROUNDS, Encode, Timing, largest_difference, time_rounds
from kagent_core.demo.encoder import MODEL_NAME, Batch, load_encoder, make_batches
from kagent_core.demo.passages import Passage, split
from kagent_core.errors import KagentError
from kagent_core.inspect.report import PlanReport
from kagent_core.session import Session, session_for
from kagent_core.specs import DeviceInfo

CHECKED_BATCHES = 4
"""Batches, evenly picked from all, that eager PyTorch embeds as well."""

OnProgress = Callable[[str, int, int], None]
"""Is told what is being done, how many steps of it are done, and how many there are (0: not known)."""


@dataclass(frozen=True)
class Embedded:
    """What came out of the compiled model, and what it took.

    Attributes
    ----------
    vectors
        One per passage: float32 [passages, 384].
    batches
        Batches with their vectors, in the order in which they were computed.
    reports
        Of the plans that the first batch runs: one per captured graph.
    first_s, total_s
        Seconds for the first batch, compilation included, and for all of them.
    """

    vectors: torch.Tensor
    batches: list[tuple[Batch, torch.Tensor]]
    reports: list[PlanReport]
    first_s: float
    total_s: float


@dataclass(frozen=True)
class Comparison:
    """kagent against eager PyTorch.

    Attributes
    ----------
    timed
        The batch that was timed.
    eager, kagent
        Milliseconds that it took.
    difference
        Largest absolute difference between their vectors.
    texts
        Number of texts whose vectors were compared.
    """

    timed: Batch
    eager: Timing
    kagent: Timing
    difference: float
    texts: int


@dataclass(frozen=True)
class Outcome:
    """All that the demo has to tell.

    Attributes
    ----------
    target
        The device that the model ran on.
    passages
        Number of passages that were searched.
    answers
        For each question, the best passages with their scores (cosine similarities), best first.
    embedded, comparison
        What it took.
    """

    target: DeviceInfo
    passages: int
    answers: list[list[tuple[float, Passage]]]
    embedded: Embedded
    comparison: Comparison


@torch.inference_mode()
def search(
    files: Sequence[tuple[str, Path]],
    questions: Sequence[str],
    *,
    device: str | None,
    top: int,
    on_progress: OnProgress,
) -> Outcome:
    """Answer questions from text files with a model that kagent compiles.

    Parameters
    ----------
    files
        The texts, each with the name to show.
    questions
        What is asked.
    device
        Where to run; None leaves that to the config.
    top
        Passages per answer.
    on_progress
        Is told how far it is.

    Raises
    ------
    KagentError
        When there is no text, no such device, or the demo's packages are not installed.
    """
    options: dict[str, Any] = {} if device is None else {"device": device}
    session = session_for(load_config(options))
    passages = _read_passages(files)
    on_progress(f"loading {MODEL_NAME}", 0, 0)
    eager, tokenizer = load_encoder()
    compiled: Encode = torch.compile(eager, backend="kagent", options=options)
    batches = _timed_batch_first(make_batches(tokenizer, [passage.content for passage in passages]))
    with _plain_errors():
        embedded = _embed(compiled, batches, session, on_progress)
        asked = [(batch, compiled(batch.tokens, batch.mask)) for batch in make_batches(tokenizer, questions)]
        comparison = _compare(eager, compiled, embedded, asked, on_progress)
    answers = _find(asked, passages, embedded.vectors, top)
    return Outcome(session.target, len(passages), answers, embedded, comparison)


def _read_passages(files: Sequence[tuple[str, Path]]) -> list[Passage]:
    passages = [
        passage for name, path in files for passage in split(path.read_text(encoding="utf-8", errors="replace"), name)
    ]
    if not passages:
        names = ", ".join(name for name, _ in files[:5])
        raise KagentError(f"the text files are empty: {names}", hint="search others: --text DIR")
    return passages


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise kagent's own errors as themselves: torch wraps what a backend raises."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, KagentError):
            raise error.inner_exception from None
        raise


def _timed_batch_first(batches: list[Batch]) -> list[Batch]:
    """Put a batch of the most frequent shape first: it is the one that is timed."""
    lengths = Counter(batch.length for batch in batches)
    timed = max(batches, key=lambda batch: (lengths[batch.length], len(batch.rows)))
    return [timed, *(batch for batch in batches if batch is not timed)]


def _embed(compiled: Encode, batches: list[Batch], session: Session, on_progress: OnProgress) -> Embedded:
    on_progress(f"compiling for {session.target.device}", 0, 0)
    before = {id(report) for report in session.reports}
    start = time.perf_counter()
    results = [compiled(batches[0].tokens, batches[0].mask)]
    first_s = time.perf_counter() - start
    reports = [report for report in session.reports if id(report) not in before]
    for batch in batches[1:]:
        on_progress(f"embedding on {session.target.device}", len(results), len(batches))
        results.append(compiled(batch.tokens, batch.mask))
    total_s = time.perf_counter() - start
    vectors = torch.empty(sum(len(batch.rows) for batch in batches), results[0].shape[1])
    for batch, result in zip(batches, results, strict=True):
        vectors[list(batch.rows)] = result[: len(batch.rows)]
    return Embedded(vectors, list(zip(batches, results, strict=True)), reports, first_s, total_s)


def _compare(
    eager: Encode,
    compiled: Encode,
    embedded: Embedded,
    asked: Sequence[tuple[Batch, torch.Tensor]],
    on_progress: OnProgress,
) -> Comparison:
    count = len(embedded.batches)
    picked = sorted({index * count // CHECKED_BATCHES for index in range(CHECKED_BATCHES)})
    compared = [embedded.batches[index] for index in picked] + list(asked)
    done, steps = 0, len(compared) + ROUNDS

    def step() -> None:
        nonlocal done
        on_progress("comparing with eager PyTorch", done, steps)
        done += 1

    difference = 0.0
    for batch, vectors in compared:
        step()
        difference = max(difference, largest_difference(eager, batch, vectors))
    timed = embedded.batches[0][0]
    eager_ms, kagent_ms = time_rounds([eager, compiled], timed, on_round=step)
    texts = sum(len(batch.rows) for batch, _ in compared)
    return Comparison(timed, eager_ms, kagent_ms, difference, texts)


def _find(
    asked: Sequence[tuple[Batch, torch.Tensor]], passages: Sequence[Passage], vectors: torch.Tensor, top: int
) -> list[list[tuple[float, Passage]]]:
    """Return the best passages for each question: those whose vectors point most nearly the same way."""
    answers: dict[int, list[tuple[float, Passage]]] = {}
    for batch, result in asked:
        for row, vector in zip(batch.rows, result, strict=False):  # the batch's other rows are padding
            scores = vectors @ vector
            best = torch.argsort(scores, descending=True, stable=True)[:top].tolist()
            answers[row] = [(float(scores[index]), passages[index]) for index in best]
    return [answers[row] for row in sorted(answers)]
