"""What every test may rely on."""

from __future__ import annotations

import pytest

from kagent_core.inspect import logs


@pytest.fixture(autouse=True)
def log_levels_of_its_own():
    """A session's ``logs`` hold for the process: take them back, so that no test hears less for another's sake."""
    yield
    logs.configure("")
