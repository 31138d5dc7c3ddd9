"""Each test draws the same random numbers, whatever ran before it, on whichever worker."""

from __future__ import annotations

import os
import random
import zlib

import pytest
import torch

SEED = os.environ.get("TEST_SEED", "0")
"""Another one gives every test other numbers; a failure tells which it was."""


@pytest.fixture(autouse=True)
def random_numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    """Seed Python's and PyTorch's generators with the test's name."""
    seed = zlib.crc32(f"{SEED} {request.node.nodeid}".encode())
    random.seed(seed)
    torch.default_generator.manual_seed(seed)


def pytest_report_header() -> str:
    """Say how to draw the same numbers again."""
    return f"random numbers: TEST_SEED={SEED}"
