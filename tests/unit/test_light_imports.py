"""Importing kagent, and loading every plugin, must be cheap: no torch, no driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "cuda", "pyopencl", "numpy", "transformers", "sympy")


def heavy_after(statements: str) -> str:
    script = f"import sys\n{statements}\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "statements",
    [
        "import kagent_core",
        "import kagent_core.errors, kagent_core.config, kagent_core.specs, kagent_core.layout, kagent_core.runs",
        "import kagent_core.hookspecs, kagent_core.plugins, kagent_core.device, kagent_core.registry",
        "import kagent_core.prototype",
        "import kagent_core.testing",
        "import kagent_cpu.plugin",
        "from kagent_core import hookimpl, load_config; load_config()",
        "import kagent_cuda.plugin",
        "import kagent_opencl.plugin",
        # OpenCL devices can only be listed by pyopencl, NVIDIA's by cuda-python
        """from kagent_core.plugins import PluginManager; from kagent_core.config import load_config
config = load_config({"plugins_block": ["cuda", "opencl"]})
assert any(info.available for info in PluginManager(config).devices())""",
    ],
)
def test_nothing_heavy_is_imported(statements):
    assert heavy_after(statements) == "[]"


def test_the_check_would_notice():
    assert heavy_after("import kagent_core.session") != "[]"
