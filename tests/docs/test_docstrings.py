"""Every example in a docstring gives what it shows."""

from __future__ import annotations

import doctest
import importlib
import io
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kagent_core
import kagent_cpu
from kagent_core import hookspecs

LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_names() -> Iterator[str]:
    for package in (kagent_core, kagent_cpu):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                yield found.name


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    return [test for name in module_names() for test in finder.find(importlib.import_module(name)) if test.examples]


EXAMPLES = examples()


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no config file leads
    torch._dynamo.reset()


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example(test: doctest.DocTest) -> None:
    report = io.StringIO()
    # Dynamo takes back what it put into a function's globals: they must outlive the test
    results = doctest.DocTestRunner(optionflags=LOOSE).run(test, out=report.write, clear_globs=False)
    assert not results.failed, report.getvalue()


def test_every_hook_has_an_example() -> None:
    with_example = {test.name.rpartition(".")[2] for test in EXAMPLES}
    hooks = {name for name in vars(hookspecs) if name.startswith("kagent_")}
    assert len(hooks) > 10
    assert hooks <= with_example
