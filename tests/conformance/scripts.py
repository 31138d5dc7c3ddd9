"""Running the scripts that the conformance kit prints."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch


def run_alone(script: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, after some lines that stand for the user's environment."""
    return subprocess.run(
        [sys.executable, "-c", f"{before}\n{script}"], capture_output=True, text=True, check=False, timeout=240
    )


def run_here(script: str) -> dict[str, Any]:
    """Run a script in this process, with the kernels that are active here; return its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    # scripts set these for good, which other tests of the process must not see
    with torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        exec(compile(script, "<script>", "exec"), names)
    return names
