"""What every test may rely on."""

from __future__ import annotations

import logging

import pytest

from kagent_core.inspect import logs
from kagent_core.testing import collecting

from .seeding import pytest_report_header, random_numbers_of_its_own

__all__ = ["pytest_report_header", "random_numbers_of_its_own"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let what tests compare with files be written anew."""
    told = "write golden files, and passages of the docs that are made from code, anew instead of comparing them"
    parser.addoption("--update-golden", action="store_true", help=told)


@pytest.fixture(autouse=True)
def log_levels_of_its_own():
    """A session's ``logs`` hold for the process: take them back, so that no test hears less for another's sake."""
    yield
    logs.configure("")


@pytest.fixture
def only_new_garbage():
    """For tests that collect garbage again and again."""
    with collecting.only_new_garbage():
        yield


class _Bugs(logging.Handler):
    """Collects what kagent says of bugs of its own, which a user's program survives and a test does not."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "lowering rule" in message and "has a bug" in message:
            self.told.append(f"{message}\n{self.format(record)}")


@pytest.fixture(autouse=True)
def no_lowering_rule_has_a_bug():
    """Every lowering rule makes a kernel or says why not."""
    handler, logger = _Bugs(), logging.getLogger("kagent.codegen")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.told, "\n".join(handler.told)
