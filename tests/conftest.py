"""What every test may rely on."""

from __future__ import annotations

import pytest

from kagent_core.inspect import logs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let what tests compare with files be written anew."""
    told = "write golden files, and passages of the docs that are made from code, anew instead of comparing them"
    parser.addoption("--update-golden", action="store_true", help=told)


@pytest.fixture(autouse=True)
def log_levels_of_its_own():
    """A session's ``logs`` hold for the process: take them back, so that no test hears less for another's sake."""
    yield
    logs.configure("")
