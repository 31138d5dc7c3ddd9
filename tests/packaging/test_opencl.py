"""A user's way to OpenCL: install the plugin with its driver, write two lines of config, and run a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import CONSTRAINTS, Environment
from .test_install import COMPARE, MODEL

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.slow,
    pytest.mark.xdist_group("packaging"),
    pytest.mark.timeout(900),  # the first test waits for the environment, and torch is a large download
]

CONFIG = """
device = "{device}"
missing_kernel = "error"
"""

USED = """
from kagent_core.config import load_config
from kagent_core.session import session_for

reports = session_for(load_config()).reports
assert len(reports) == 3, reports
assert all(str(report.device) == "{device}" and not report.fallbacks for report in reports), reports
"""


@pytest.fixture(scope="module")
def opencl(environment: Environment) -> Iterator[Environment]:
    """The environment with the plugin and PyPI's PoCL."""
    options = ("-qq", "--no-compile", "--constraint", CONSTRAINTS, "--find-links", environment.wheels)
    environment.pip("install", *options, "kagent-opencl[pocl]")
    yield environment
    (environment.cwd / "kagent.toml").unlink(missing_ok=True)
    environment.pip("uninstall", "-qq", "--yes", "kagent-opencl", "pyopencl", "pocl-binary-distribution")


def devices(environment: Environment) -> list[dict[str, Any]]:
    listed = json.loads(environment.kagent("devices", "--json").stdout)
    return [entry for entry in listed if entry["device"].startswith("opencl:")]


def test_the_extra_brings_a_driver(opencl: Environment) -> None:
    assert {"kagent-opencl", "pyopencl", "pocl-binary-distribution"} <= opencl.installed()
    opencl.pip("check")
    listed = devices(opencl)
    assert any(" 3.0" in entry["details"]["platform"] for entry in listed), "PyPI's PoCL is not there"
    for entry in listed:
        if not entry["available"]:  # PyPI's PoCL knows the processors of its time
            assert "its compiler fails" in entry["reason"]


def test_two_lines_of_config_run_a_model(opencl: Environment) -> None:
    device = next(entry["device"] for entry in devices(opencl) if entry["available"])
    (opencl.cwd / "kagent.toml").write_text(CONFIG.format(device=device), encoding="utf-8")
    told = opencl.python(MODEL + COMPARE.replace("kagent_cpu", "kagent_opencl") + USED.format(device=device)).stdout
    assert "used ['kagent_core', 'kagent_opencl']" in told
