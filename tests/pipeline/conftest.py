"""Fixtures of the pipeline's tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.plugin_template import render
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


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The plugins that the template makes, as they are rendered: ``toy`` has a language, ``npu`` a set of kernels."""
    plugins: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, shape in (("toy", "language"), ("npu", "kernels")):
            folder = tmp_path_factory.mktemp("rendered") / f"kagent-{name}"
            render(name, folder, {"shape": shape}, ask=False)
            patch.syspath_prepend(folder / "src")
            plugins[name] = importlib.import_module(f"kagent_{name}.plugin").plugin
        yield plugins


@pytest.fixture
def toy(rendered: dict[str, Any]) -> Iterator[Any]:
    """The template's device with a C-like language, registered while the test runs: ``toy:0``."""
    with kagent_core.use_plugin(rendered["toy"], "toy-plugin"):
        yield rendered["toy"]


@pytest.fixture
def npu(rendered: dict[str, Any]) -> Iterator[Any]:
    """The template's device with a fixed set of kernels, registered while the test runs: ``npu:0``."""
    with kagent_core.use_plugin(rendered["npu"], "npu-plugin"):
        yield rendered["npu"]
