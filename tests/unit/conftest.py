"""The C compiler of this machine, for tests of what compiles."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from kagent_core.native import Compiler, find_compiler, why_no_compiler


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Return the compiler that is found where the environment names none."""
    monkeypatch.delenv("CC", raising=False)
    found = find_compiler()
    assert found is not None, why_no_compiler()
    return found


@pytest.fixture
def commands(compiler: Compiler, tmp_path: Path) -> tuple[Compiler, Callable[[], list[str]]]:
    """Return a compiler that writes down how it is called, and a function that reads that."""
    calls, script = tmp_path / "calls", tmp_path / "counting-cc"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {shlex.join(compiler.command)} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    read = lambda: calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
    return dataclasses.replace(compiler, command=(str(script),)), read
