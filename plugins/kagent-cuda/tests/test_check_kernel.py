"""``kagent check-kernel`` finds what small samples hide: threads that are to spare and write all the same."""

from __future__ import annotations

import pytest

from kagent_core.config import load_config
from kagent_core.kernels import kernel
from kagent_core.testing.kernel_check import KernelCheck, check_kernel

NEGATIVE = """
extern "C" __global__ void negative(const float *self, float *out, long long numel) {{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    {0}
}}
"""
CHECKED = "if (i < numel) out[i] = -self[i];"
UNCHECKED = "out[i] = -self[i < numel ? i : 0];"
PROTOTYPE = "void negative(const float *self, float *out, int64_t numel)"


def checked(body: str, device: str) -> KernelCheck:
    made = kernel("aten::neg", source=NEGATIVE.format(body), prototype=PROTOTYPE, device=device)
    made.unregister()
    return check_kernel(made, load_config(), samples=2)


def test_a_kernel_with_a_bounds_check_is_right(device: str) -> None:
    found = checked(CHECKED, device)
    assert found.right
    assert not found.errors


@pytest.mark.parametrize(
    "body", [UNCHECKED, "if (i <= numel) out[i] = -self[i < numel ? i : 0];"], ids=["no check", "one too many"]
)
def test_a_kernel_that_writes_behind_its_result_is_wrong(body: str, device: str) -> None:
    found = checked(body, device)
    assert not found.right
    assert found.wrong
    assert not found.errors
