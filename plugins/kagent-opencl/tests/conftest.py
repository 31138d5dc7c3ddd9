"""What the tests need: an OpenCL device. Without one they fail, since a driver for CPUs can be installed anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kagent_core
from kagent_core.config import load_config
from kagent_opencl.plugin import plugin


@pytest.fixture(autouse=True, scope="session")
def device() -> Iterator[str]:
    """Name a device that can be used."""
    infos = plugin.devices(load_config())
    usable = [str(info.device) for info in infos if info.reason is None]
    if not usable:
        pytest.fail("; ".join(str(info.reason) for info in infos))
    with kagent_core.use_plugin(plugin):
        yield usable[0]
