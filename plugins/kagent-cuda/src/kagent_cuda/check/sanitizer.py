"""Hand-written kernels and those whose threads work together, where mistakes with memory and barriers are caught.

On a GPU that is ``compute-sanitizer``, which comes with CUDA's toolkit; the emulated device looks for itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kagent_core.errors import KagentError
from kagent_core.kernels import override
from kagent_core.layout import CONTIGUOUS
from kagent_cuda.check.sections import Row, Tell
from kagent_cuda.check.setting import Setting

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 86
"""Exit code of the tool where it found something."""

SHOWN_LINES = 6

SOFTMAX = r"""
// One block to a row: each thread takes every blockDim.x-th element, warps shuffle, and meet in shared memory.
__device__ float reduce(float value, bool largest, float *partial) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    for (int far = 16; far > 0; far /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, value, far);
        value = largest ? fmaxf(value, other) : value + other;
    }
    __syncthreads();
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = partial[0];
    for (int other = 1; other < warps; other++)
        value = largest ? fmaxf(value, partial[other]) : value + partial[other];
    return value;
}

extern "C" __global__ void check_softmax(const float *self, float *out, long long rows, long long length) {
    __shared__ float partial[32];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const float *in = self + row * length;
        float most = in[0], sum = 0;
        for (long long i = threadIdx.x; i < length; i += blockDim.x) most = fmaxf(most, in[i]);
        most = reduce(most, true, partial);
        for (long long i = threadIdx.x; i < length; i += blockDim.x) sum += expf(in[i] - most);
        sum = reduce(sum, false, partial);
        for (long long i = threadIdx.x; i < length; i += blockDim.x) out[row * length + i] = expf(in[i] - most) / sum;
    }
}
"""
PROTOTYPE = "void check_softmax(const float *self, float *out, int64_t rows, int64_t length)"
HAND_WRITTEN: dict[str, Any] = {
    "source": SOFTMAX,
    "prototype": PROTOTYPE,
    "derived": {"rows": "self.shape[0]", "length": "self.shape[1]"},
    "ignore": {"dim", "half_to_float"},
    "dtypes": {"float32"},
    "layout": CONTIGUOUS,
}

Case = tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]


def check_sanitized(setting: Setting, tell: Tell) -> None:
    """Run the kernels under each of the sanitizer's tools."""
    if setting.emulated:
        for name, wrong in run_kernels(setting):
            tell(Row(f"{name}, emulated", {}, wrong))
        return
    tool = find_sanitizer()
    if tool is None:
        tell(Row("compute-sanitizer", {"state": "not found; it comes with CUDA's toolkit"}))
        return
    for checked in TOOLS:
        tell(_run_tool(setting, tool, checked))


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer; None where there is none."""
    for root in (None, *(os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")), "/usr/local/cuda"):
        folders = None if root is None else os.pathsep.join((f"{root}/bin", f"{root}/compute-sanitizer"))
        found = shutil.which("compute-sanitizer", path=folders)
        if found is not None:
            return found
    return None


def _run_tool(setting: Setting, tool: str, checked: str) -> Row:
    command = [tool, "--tool", checked, "--error-exitcode", str(FOUND), "--print-limit", "3", sys.executable]
    inner = ["-m", "kagent_cuda.check", "--kernels-only", "--device", setting.device, "--cache", str(setting.cache_dir)]
    done = subprocess.run([*command, *inner], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return Row(f"compute-sanitizer {checked}", {"state": "found nothing"})
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return Row(
        f"compute-sanitizer {checked}",
        {"state": "found something" if done.returncode == FOUND else f"ended with {done.returncode}"},
        "\n    ".join(lines[-SHOWN_LINES:]),
    )


def run_kernels(setting: Setting) -> list[tuple[str, str | None]]:
    """Run every kernel on tensors in host memory, so that kagent's kernels alone are looked at.

    Returns
    -------
    list of tuple
        Names, each with what is wrong, or None.
    """
    on_host = replace(setting, cuda_tensors=False)
    torch.manual_seed(0)
    told = []
    for name, function, args in cases(setting.tiny):
        if name == "hand-written softmax":
            with override("aten::_softmax", device=setting.device, **HAND_WRITTEN):
                told.append((name, _run(on_host, function, args)))
        else:
            told.append((name, _run(on_host, function, args)))
    return told


def _run(setting: Setting, function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> str | None:
    try:
        torch.testing.assert_close(setting.compile(function)(*args), function(*args), rtol=1e-4, atol=1e-4)
    except (AssertionError, RuntimeError, KagentError) as error:
        return " ".join(str(error).split())
    return None


def cases(tiny: bool) -> tuple[Case, ...]:
    """Return functions and arguments whose kernels' threads work together: rows too long for one thread, and tiles."""
    rows, length, size = (2, 600, 20) if tiny else (5, 5003, 70)
    wide, square = torch.randn(rows, length), torch.randn(size, size)
    heads = torch.randn(1, 2, size, 16)
    every: tuple[Case, ...] = (
        ("hand-written softmax", lambda x: torch.softmax(x, -1), (wide,)),
        ("softmax", lambda x: torch.softmax(x * 2, -1), (wide,)),
        ("product", torch.mm, (square, square)),
        ("layer norm", lambda x: functional.layer_norm(x, x.shape[-1:]), (wide,)),
        ("sum of columns", lambda x: x.sum(0), (wide.t().contiguous(),)),
        ("sum of all", lambda x: x.sum(), (wide,)),
        ("cumulative sum", lambda x: x.cumsum(-1), (wide,)),
        ("sort", lambda x: torch.sort(x, -1)[0], (wide,)),
        ("attention", lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True), (heads,)),
    )
    return every[:3] if tiny else every


def main(setting: Setting) -> int:
    """Run the kernels in this process, for the sanitizer to watch; return the exit code."""
    Path(setting.cache_dir).mkdir(parents=True, exist_ok=True)
    wrong = [f"{name}: {told}" for name, told in run_kernels(setting) if told is not None]
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    return 1 if wrong else 0
