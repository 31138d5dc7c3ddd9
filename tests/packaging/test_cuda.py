"""A user's way to CUDA on a machine without a GPU: it installs, says what is missing, and compiles kernels."""

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

BROUGHT = ("kagent-cuda", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc")

COMPILE = """
from pathlib import Path
from kagent_cuda.compiler import NvrtcCompiler

source = 'extern "C" __global__ void twice(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }'
for architecture in ("sm_75", "sm_80", "sm_90", "sm_100"):
    compiled = NvrtcCompiler(architecture, Path("cache")).compile(source, "twice")
    assert compiled.binary.startswith(b"\x7fELF"), compiled
    assert compiled.usage["twice"].registers > 0, compiled
print("compiled")
"""

EMULATED = """
from kagent_core.config import load_config
from kagent_core.session import session_for

[report] = session_for(load_config()).reports
assert str(report.device) == "cuda:0" and not report.fallbacks, report
print("emulated")
"""


@pytest.fixture(scope="module")
def cuda(environment: Environment) -> Iterator[Environment]:
    """The environment with the plugin."""
    options = ("-qq", "--no-compile", "--constraint", CONSTRAINTS, "--find-links", environment.wheels)
    environment.pip("install", *options, "kagent-cuda")
    yield environment
    (environment.cwd / "kagent.toml").unlink(missing_ok=True)
    environment.pip("uninstall", "-qq", "--yes", *BROUGHT)


def listed(environment: Environment) -> dict[str, Any]:
    entries = json.loads(environment.kagent("devices", "--json").stdout)
    found: dict[str, Any]
    [found] = [entry for entry in entries if entry["device"] == "cuda:0"]
    return found


def test_it_brings_all_that_it_needs(cuda: Environment) -> None:
    assert set(BROUGHT) <= cuda.installed()
    cuda.pip("check")


def test_devices_says_why_there_is_none(cuda: Environment) -> None:
    entry = listed(cuda)
    assert entry["plugin"] == "kagent-cuda"
    if not entry["available"]:
        assert "NVIDIA's driver" in entry["reason"]
        assert entry["reason"] in " ".join(cuda.kagent("devices").stdout.split())


def test_nvrtc_compiles_kernels(cuda: Environment) -> None:
    assert cuda.python(COMPILE).stdout.splitlines()[-1] == "compiled"


def test_a_model_runs_on_the_emulated_device(cuda: Environment) -> None:
    config = 'device = "cuda"\nemulate = ["cuda"]\nmissing_kernel = "error"\n'
    (cuda.cwd / "kagent.toml").write_text(config, encoding="utf-8")
    assert listed(cuda)["emulated"]
    inference = MODEL + COMPARE.partition("compiled = ")[0]
    assert cuda.python(inference + EMULATED).stdout.splitlines()[-1] == "emulated"
