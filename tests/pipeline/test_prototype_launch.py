"""Kernels that declare their parameters, from PyTorch's call to the launch on the fake device."""

from __future__ import annotations

import ctypes

import pytest
import torch

import kagent_core
from kagent_core.errors import PackingError
from kagent_core.prototype import parse_prototype
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.fake import FakeDevice, FakeRuntime

PROTOTYPE = """
__kernel void scaled_add(__global const float* self, __global const float* other, __global float* out,
                         int n, float alpha)
"""


def scaled_add(x, y, out, n, alpha):
    assert n == out.numel()
    torch.add(x, y, alpha=alpha, out=out)


def kernel(function=scaled_add, prototype=PROTOTYPE):
    parameters = parse_prototype(prototype, "scaled_add", derived={"n": "out.numel()"})
    return KernelDescriptor("aten::add.Tensor", "scaled_add", function, parameters=parameters, priority=1)


def test_values_come_in_their_types():
    seen = []

    def spy(x, y, out, n, alpha):
        seen.append((n, alpha))
        scaled_add(x, y, out, n, alpha)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with kagent_core.use_plugin(FakeDevice(kernels=[kernel(spy)])):
        got = kagent_core.run_op("aten::add.Tensor", x, y, alpha=0.1, device="fake:0")
        torch.testing.assert_close(got, torch.add(x, y, alpha=0.1))
        kagent_core.run_op("aten::add.Tensor", x, y, device="fake:0")  # alpha from the operator's schema
    assert seen == [(12, torch.tensor(0.1).item()), (12, 1.0)]


def test_scalars_outlive_a_slow_launch():
    """The values are read when the kernel runs, long after the call that packed them has returned to launching."""
    runtime = FakeRuntime(streams=2, delay_ms=5)
    with kagent_core.use_plugin(FakeDevice(kernels=[kernel()], runtime=runtime)):

        def function(x, y):
            return [torch.add(x, y, alpha=float(k)) for k in range(6)]

        compiled = kagent_core.compile(function, device="fake:0")
        x, y = torch.randn(8), torch.randn(8)
        for _ in range(3):
            for got, want in zip(compiled(x, y), function(x, y), strict=True):
                torch.testing.assert_close(got, want)


def test_scalar_storage_that_is_reused_too_early_is_seen():
    """What the test above would look like if it failed: the storage changes before the kernel has run."""
    runtime = FakeRuntime(delay_ms=20)
    with kagent_core.use_plugin(FakeDevice(kernels=[kernel()], runtime=runtime)):
        original = FakeRuntime.launch_on

        def reuse(self, stream, kernel, config, args):
            original(self, stream, kernel, config, args)
            scalar = args[-1]
            ctypes.memset(scalar.address, 0, scalar.data.nbytes)

        runtime.launch_on = reuse.__get__(runtime)
        x, y = torch.randn(8), torch.randn(8)
        got = kagent_core.run_op("aten::add.Tensor", x, y, alpha=2.0, device="fake:0")
        assert not torch.allclose(got, torch.add(x, y, alpha=2.0))
        torch.testing.assert_close(got, x)


def test_a_value_that_does_not_fit_is_an_error_before_any_launch():
    runtime = FakeRuntime()
    narrow = kernel(prototype=PROTOTYPE.replace("float alpha", "unsigned char alpha"))
    with kagent_core.use_plugin(FakeDevice(kernels=[narrow], runtime=runtime)):
        with pytest.raises(PackingError, match="alpha") as caught:
            kagent_core.run_op("aten::add.Tensor", torch.ones(2), torch.ones(2), alpha=300, device="fake:0")
        assert "300" in str(caught.value)
        assert "scaled_add" in str(caught.value)
    assert runtime.launches == []
