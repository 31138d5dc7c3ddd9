"""Fixtures of the pipeline's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kagent_core
from kagent_core.testing import FakeDevice

from .forced import generated_everywhere


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing that another test compiled is taken again."""
    torch._dynamo.reset()


@pytest.fixture
def generated_twice() -> Iterator[None]:
    """Every graph of a model runs once more with generated kernels wherever they can be, and gives the same."""
    with generated_everywhere(whole_models=True):
        yield


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    """The fake device, registered while the test runs."""
    plugin = FakeDevice()
    with kagent_core.use_plugin(plugin):
        yield plugin
