"""The hooks of the CPU plugin."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kagent_core.config import Config
from kagent_core.specs import Device, DeviceInfo
from kagent_cpu import plugin

PROVIDERS = (
    plugin.kagent_kernel_registry,
    plugin.kagent_argument_packer,
    plugin.kagent_launch_config_deriver,
    plugin.kagent_runtime,
)


def test_there_is_one_device_and_it_is_always_there() -> None:
    (info,) = plugin.kagent_devices(Config())
    assert info.device == Device("cpu")
    assert info.available
    assert info.name
    assert info.memory_nbytes > 1 << 20
    assert int(dict(info.details)["cores"]) >= 1


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.__name__)
def test_a_provider_answers_for_its_own_device_only(provider) -> None:
    assert provider(DeviceInfo(Device("cuda", 0), "some GPU"), Config()) is None
    assert provider(DeviceInfo(Device("cpu"), "some processor"), Config()) is not None


def test_listing_devices_imports_no_torch() -> None:
    program = (
        "import sys; from kagent_cpu import plugin; from kagent_core.config import Config;"
        "plugin.kagent_devices(Config()); sys.exit('torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAGENT_")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
