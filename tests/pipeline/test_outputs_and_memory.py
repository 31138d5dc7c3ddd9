"""Identity of outputs, memory of plans that are gone, and inputs in one growing buffer."""

from __future__ import annotations

import gc

import pytest
import torch

import kagent_core
from kagent_core.layout import CONTIGUOUS
from kagent_core.specs import KernelDescriptor
from kagent_core.testing import FakeDevice, FakeRuntime
from kagent_cpu.replay import CpuSegment


def compiled(function, **options):
    return kagent_core.compile(function, device="cpu", **options)


def several(x):
    y = x + 1
    return y, y.detach(), y.view_as(y), y[:], y


def test_outputs_are_as_many_tensors_as_in_eager():
    got, want = compiled(several)(torch.ones(3)), several(torch.ones(3))
    same = [[a is b for b in got] for a in got]
    assert same == [[a is b for b in want] for a in want]
    got[1].requires_grad_()
    assert not got[0].requires_grad
    got[2].unsqueeze_(0)
    assert got[0].shape == (3,)
    got[0].zero_()  # one memory, as in eager
    assert all(torch.equal(t.reshape(3), torch.zeros(3)) for t in got)


def write_one(x, y):
    x.add_(1)
    return y * 2


@pytest.mark.parametrize(
    "inputs",
    [
        lambda n: ((base := torch.arange(float(n)))[0:4], base[2:6]),
        lambda n: ((flat := torch.arange(float(n)).view(2, -1).view(-1))[0:4], flat[2:6]),
        lambda n: ((base := torch.arange(float(n)))[0:4], base[5:9]),
    ],
    ids=["overlapping", "on a view of a matrix", "apart"],
)
def test_slices_of_a_growing_buffer(inputs):
    run = compiled(write_one)
    with torch.no_grad():
        for size in (10, 20, 10, 30):
            mine, theirs = inputs(size), inputs(size)
            torch.testing.assert_close(run(*mine), write_one(*theirs))
            torch.testing.assert_close(mine, theirs)


def live_segments():
    return sum(type(thing) is CpuSegment for thing in gc.get_objects())


@pytest.mark.usefixtures("only_new_garbage")
def test_an_evicted_plan_is_gone_at_once():
    gc.collect()
    before = live_segments()
    run = compiled(lambda x: (x * 2).exp().sum(), dynamic=True, plan_cache_size=2)
    gc.disable()
    try:
        with torch.no_grad():
            for size in range(3, 20):
                run(torch.ones(size))
        assert live_segments() - before <= 2
    finally:
        gc.enable()


def test_many_sets_of_shapes_are_told_once(caplog):
    run = compiled(lambda x: x.exp() + 1, dynamic=True, plan_cache_size=2)
    with torch.no_grad():
        for size in range(3, 12):
            run(torch.ones(size))
    assert caplog.text.count("more than 2 sets of shapes") == 1


@pytest.mark.usefixtures("only_new_garbage")
def test_device_memory_of_a_graph_that_is_gone():
    runtime = FakeRuntime()
    with kagent_core.use_plugin(FakeDevice(runtime=runtime)):
        run = kagent_core.compile(lambda x: torch.relu(x) + 1, device="fake:0")
        run(torch.ones(4))
        assert runtime.live > 0
        del run
        torch._dynamo.reset()
        gc.collect()
    assert runtime.live == 0


def test_in_place_on_a_sparse_tensor_for_a_device_of_its_own_memory():
    x = torch.eye(3).to_sparse()
    with kagent_core.use_plugin(FakeDevice()):
        kagent_core.run_op("aten::mul_.Tensor", x, torch.tensor(2.0), device="fake:0")
    assert torch.equal(x.to_dense(), 2 * torch.eye(3))


def test_overlapping_arguments_given_by_name():
    x = torch.arange(6.0)
    with kagent_core.use_plugin(FakeDevice()), pytest.raises(RuntimeError, match="single memory location"):
        kagent_core.run_op("aten::copy_", src=x[:-1], self=x[1:], device="fake:0")


def test_the_reason_of_a_fallback_is_why_the_kernel_refused(caplog):
    def double(x, out):
        torch.mul(x, 2, out=out)

    kernel = KernelDescriptor("aten::exp", "mine", double, layout=CONTIGUOUS, dtypes=frozenset({"float32"}))
    with kagent_core.use_plugin(FakeDevice(kernels=[kernel])):
        kagent_core.run_op("aten::exp", torch.ones(2, dtype=torch.float64), device="fake:0")
        assert "aten::exp: 'mine' takes float32, not float64" in caplog.text
        kagent_core.run_op("aten::exp", torch.ones(2, 3).t(), device="fake:0")
        assert "'mine' takes contiguous tensors" in caplog.text
        assert "a kernel for aten::clone of any strides would let kagent compact its tensors" in caplog.text


@pytest.mark.parametrize("shape", [(0, 3), (3, 0, 2)])
def test_views_with_an_offset_of_what_has_no_elements(shape):
    def function(x):
        y = torch.relu(x)  # on the device
        return torch.sin(y[..., 1:]) + 1, torch.sin(y), y.narrow(0, y.shape[0], 0)  # read by the fallback

    with kagent_core.use_plugin(FakeDevice()):
        run = kagent_core.compile(function, device="fake:0")
        for got, want in zip(run(torch.empty(shape)), function(torch.empty(shape)), strict=True):
            assert got.shape == want.shape


def test_an_empty_view_that_is_widened_by_as_strided():
    def function(x):
        return torch.relu(x.as_strided((3,), (1,), 2))

    base = torch.randn(8)
    with kagent_core.use_plugin(FakeDevice()):
        run = kagent_core.compile(function, device="fake:0")
        torch.testing.assert_close(run(base[4:4]), function(base[4:4]))
