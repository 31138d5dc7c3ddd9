"""A device to test on: PoCL, which `make test` installs."""

from __future__ import annotations

import pytest

from kagent_opencl.platforms import list_devices
from tests.seeding import random_numbers_of_its_own

__all__ = ["random_numbers_of_its_own"]


@pytest.fixture(scope="session")
def device() -> str:
    """Name of the first OpenCL device that works."""
    devices = list_devices()
    for info in devices:
        if info.available:
            return str(info.device)
    told = "; ".join(f"{info.device}: {info.reason}" for info in devices)
    pytest.skip(f"no OpenCL device works here, and `make test` could not install PoCL: {told}")
