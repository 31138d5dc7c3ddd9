"""Fixtures of the conformance kit's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kagent_core
from kagent_core.testing import FakeDevice


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What a test compiled is not taken again by the next one."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    """The fake device, registered while the test runs."""
    plugin = FakeDevice()
    with kagent_core.use_plugin(plugin):
        yield plugin
