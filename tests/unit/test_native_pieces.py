"""A text in pieces is compiled by several processes at once, and does the same."""

from __future__ import annotations

import array
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kagent_core.errors import CompilationError
from kagent_core.native import Compiler, load
from kagent_core.native import cache as cache_module
from kagent_core.native import pieces as pieces_module
from kagent_core.native.pieces import LEAST, OWN, PiecedText

NAMES = ("first", "second", "third")


def program(padding: int = LEAST) -> PiecedText:
    """Return a text whose last piece calls the functions of the others; each piece has some characters more."""
    declared = "".join(f"{OWN} void {name}(long long *t);\n" for name in NAMES)
    comment = f"/* {'.' * padding} */"
    defined = [
        f"{OWN} void {name}(long long *t) {{ t[{n}] += helper({n}); }} {comment}" for n, name in enumerate(NAMES)
    ]
    run = f"void run(long long *t) {{ {' '.join(f'{name}(t);' for name in NAMES)} }}"
    helper = "static long long helper(long long n) { return 10 * n + 1; }\n"
    return PiecedText(helper + declared, (*defined, run))


def ran(text: PiecedText, directory: Path, compiler: Compiler) -> list[int]:
    values = array.array("q", [0, 0, 0])
    load(text, directory, compiler).function("run")(values.buffer_info()[0])
    return list(values)


def suffixes(cache_dir: Path) -> set[str]:
    return {path.suffix for path in (cache_dir / "native").rglob("*") if path.is_file()}


def test_shares_of_a_text_do_what_the_text_does(
    commands, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "processors", lambda: 1)
    assert ran(program(), tmp_path / "whole", compiler) == [1, 11, 21]
    monkeypatch.setattr(cache_module, "processors", lambda: 3)
    counting, calls = commands
    assert ran(program(), tmp_path / "shares", counting) == [1, 11, 21]
    assert sorted("-c " in call for call in calls()) == [False, True, True, True]
    left = suffixes(tmp_path / "shares")
    assert left == {".c", ".so"}


def test_functions_of_pieces_are_not_seen_from_outside(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models in one process may have kernels of the same name."""
    monkeypatch.setattr(cache_module, "processors", lambda: 3)
    library = load(program(), tmp_path, compiler)
    with pytest.raises(CompilationError, match="has no function 'first'"):
        library.function("first")


def test_a_short_text_is_compiled_as_a_whole(commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "processors", lambda: 8)
    counting, calls = commands
    assert ran(program(padding=1), tmp_path, counting) == [1, 11, 21]
    assert len(calls()) == 1


def test_the_error_of_a_share_is_told(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "processors", lambda: 3)
    text = program()
    wrong = dataclasses.replace(
        text, pieces=(*text.pieces[:1], text.pieces[1] + "int wrong = nowhere;", *text.pieces[2:])
    )
    with pytest.raises(CompilationError, match="nowhere"):
        load(wrong, tmp_path, compiler)
    left = suffixes(tmp_path)
    assert left == {".c"}


@given(st.lists(st.integers(0, 3 * LEAST), min_size=1, max_size=20), st.integers(1, 12))
def test_shares_are_all_of_the_text_each_once(lengths: list[int], most: int) -> None:
    text = PiecedText("", tuple("x" * length for length in lengths))
    spans = [tuple(int(flag.partition("=")[2]) for flag in share) for share in text.shares(most)]
    firsts, pasts = zip(*spans, strict=True)
    assert (firsts[0], pasts[-1]) == (0, len(lengths))
    assert firsts[1:] == pasts[:-1]
    assert all(first < past for first, past in spans)
    assert len(spans) <= min(most, max(1, sum(lengths) // LEAST))


def test_shares_are_about_equally_long() -> None:
    lengths = [LEAST] * 4 + [4 * LEAST] + [LEAST] * 4
    text = PiecedText("", tuple("x" * length for length in lengths))
    sizes = []
    for share in text.shares(3):
        first, past = (int(flag.partition("=")[2]) for flag in share)
        sizes.append(sum(lengths[first:past]) // LEAST)
    assert sizes == [4, 4, 4]


def test_a_process_counts_the_processors_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module.os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    assert pieces_module.processors() == 2
    monkeypatch.delattr(pieces_module.os, "sched_getaffinity")
    monkeypatch.setattr(pieces_module.os, "cpu_count", lambda: None)
    assert pieces_module.processors() == 1
