"""A device that fails, and its memory: errors that say what and where, nothing lost, the next call right."""

from __future__ import annotations

import gc

import pytest
import torch

import kagent_core
from kagent_core import single
from kagent_core.errors import ExecutionError, KernelExecutionError
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.fake import FakeDevice, FakeRuntime

from .traced import FAKE, close, compiled, mlp, mlp_inputs, same, session, traced

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# -- failures


class Broken:
    """A relu that fails while `broken` is set."""

    def __init__(self, error):
        self.error = error
        self.broken = True
        self.kernel = KernelDescriptor("aten::relu", "breakable", self, priority=9)

    def __call__(self, x, out):
        if self.broken:
            raise self.error
        torch.clamp(x, min=0, out=out)


def users_function(x):
    y = x * 2.0
    z = torch.relu(y)  # the user's line
    return z + x


@pytest.mark.parametrize("error", [ValueError("bad thing"), RuntimeError("bad thing"), KeyError("bad thing")])
def test_a_failing_kernel_says_what_where_and_from_which_line(error):
    broken = Broken(error)
    fake = FakeDevice(kernels=[broken.kernel])
    x = torch.randn(2, 3)
    with kagent_core.use_plugin(fake):
        run = compiled(users_function, **FAKE)
        with pytest.raises(KernelExecutionError) as caught:
            run(x)
        live = fake.runtime.live
        for _ in range(3):
            with pytest.raises(type(error)):
                run(x)
        assert fake.runtime.live == live, "a failed call keeps no memory"
        broken.broken = False
        same(run(x), users_function(x))
        assert fake.runtime.live == live
    told = str(caught.value)
    assert told.startswith(f"aten::relu failed on fake:0 with {type(error).__name__}: ")
    assert "bad thing" in told
    assert "kernel: 'breakable', given f32[2, 3]" in told
    assert "aten::relu(self=f32[2, 3]) -> (f32[2, 3])" in told
    assert f"from: {__file__}:" in told
    assert "z = torch.relu(y)  # the user's line" in told
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, type(error))


def test_a_failure_leaves_the_inputs_alone():
    """What is written comes back at the end of the run; a run that fails has not changed anything."""
    broken = Broken(ValueError("no"))

    def function(x):
        x.mul_(2.0)
        return torch.relu(x)

    x = torch.randn(4)
    before = x.clone()
    with kagent_core.use_plugin(FakeDevice(kernels=[broken.kernel])):
        run = compiled(function, **FAKE)
        with pytest.raises(KernelExecutionError):
            run(x)
        same(x, before)
        broken.broken = False
        same(run(x), torch.relu(before * 2.0))
        same(x, before * 2.0)


class BrokenRuntime(FakeRuntime):
    """Fails in `load`, `synchronize` or `allocate` when told to."""

    failing = ""
    spared = 0

    def _maybe(self, what):
        if self.failing == what:
            if self.spared == 0:
                raise RuntimeError(f"the driver refused to {what}")
            self.spared -= 1

    def load(self, kernel):
        self._maybe("load")
        return super().load(kernel)

    def allocate(self, nbytes):
        self._maybe("allocate")
        return super().allocate(nbytes)

    def synchronize(self):
        self._maybe("synchronize")


@pytest.mark.parametrize("spared", [0, 1, 2])
@pytest.mark.parametrize("failing", ["load", "allocate"])
def test_a_device_that_cannot_be_prepared_leaks_nothing_and_recovers(failing, spared):
    fake = FakeDevice(runtime=BrokenRuntime())
    inputs = mlp_inputs()
    with kagent_core.use_plugin(fake):
        graph = traced(lambda *a: (mlp(*a),), *inputs, **FAKE)
        fake.runtime.failing, fake.runtime.spared = failing, spared
        with pytest.raises(RuntimeError, match=f"the driver refused to {failing}"):
            graph(inputs)
        assert fake.runtime.live == 0
        fake.runtime.failing = ""
        same(graph(inputs), mlp(*inputs))
        close(graph)
        assert fake.runtime.live == 0


def test_a_failure_to_load_names_the_operator():
    fake = FakeDevice(runtime=BrokenRuntime())
    with kagent_core.use_plugin(fake):
        fake.runtime.failing = "load"
        with pytest.raises(
            KernelExecutionError, match=r"for aten::mm .* could not be loaded on fake:0: .*the driver refused to load"
        ):
            compiled(mlp, **FAKE)(*mlp_inputs())


def test_a_failure_that_shows_at_the_end_says_how_to_find_the_kernel():
    fake = FakeDevice(runtime=BrokenRuntime())
    inputs = mlp_inputs()
    with kagent_core.use_plugin(fake):
        run = compiled(mlp, **FAKE)
        run(*inputs)
        fake.runtime.failing = "synchronize"
        with pytest.raises(ExecutionError) as caught:
            run(*inputs)
        assert "fake:0 failed while it ran" in caught.value.message
        assert "profile = true" in caught.value.hint
        fake.runtime.failing = ""
        same(run(*inputs), mlp(*inputs))


@pytest.mark.parametrize("shape", [(3,), (0,)])
def test_a_kernel_that_allocates_its_result_needs_host_memory(shape):
    kernel = KernelDescriptor("aten::relu", "functional", lambda x: x.clamp(min=0), allocates=True, priority=9)
    fake = FakeDevice(kernels=[kernel])
    with kagent_core.use_plugin(fake):
        with pytest.raises(ExecutionError) as caught:
            compiled(lambda x: torch.relu(x), **FAKE)(torch.randn(shape))
        assert "kernel 'functional' for aten::relu allocates its results" in caught.value.message
        assert "fake:0 is not one" in caught.value.message
        assert "a parameter `out`" in caught.value.hint
        assert fake.runtime.live == 0


# -- memory


def test_memory_stays_the_same_over_many_calls(fake):
    inputs = mlp_inputs()
    run = compiled(mlp, **FAKE)
    run(*inputs)
    live = fake.runtime.live
    assert live > 0
    for _ in range(50):
        run(*inputs)
    assert fake.runtime.live == live


def test_a_plan_that_leaves_the_cache_gives_its_memory_to_the_next(fake):
    function = lambda x: (torch.relu(x) * 2.0,)
    graph = traced(function, torch.randn(3, 4), symbolic=True, **FAKE, plan_cache_size=1)
    seen = []
    for rows in (3, 5, 7, 5, 3, 7, 5, 3):
        x = torch.randn(rows, 4)
        same(graph([x]), function(x))
        assert len(graph.plans()) == 1
        seen.append(fake.runtime.live)
    assert max(seen) <= 2 * seen[0], "what one plan has left, and what the next one could not take of it"
    close(graph)
    assert fake.runtime.live == 0


def test_a_closed_plan_can_still_finish_and_keeps_nothing(fake):
    """A thread may hold a plan that another has just pushed out of the cache."""
    inputs = mlp_inputs()
    graph = traced(lambda *a: (mlp(*a),), *inputs, **FAKE)
    graph(inputs)
    (plan,) = graph.plans()
    plan.close()
    assert fake.runtime.live == 0
    same(plan.run(inputs), mlp(*inputs))
    assert fake.runtime.live == 0


def test_run_op_and_its_memory(fake):
    x = torch.randn(3, 4)
    for _ in range(5):
        same(kagent_core.run_op("aten::relu", x, device="fake:0"), torch.relu(x))
        live = fake.runtime.live
    kagent_core.run_op("aten::relu", x, device="fake:0")
    assert fake.runtime.live == live


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.parametrize("way", ["graph", "compiled", "operators"])
def test_memory_is_given_back_when_what_was_compiled_is_gone(fake, way, monkeypatch):
    monkeypatch.setattr(single, "KEPT_OPERATORS", 2)
    inputs = mlp_inputs()
    seen = []
    for rows in range(3, 9):
        if way == "graph":
            traced(lambda *a: (mlp(*a),), *inputs, **FAKE)(inputs)
        elif way == "compiled":
            torch._dynamo.reset()
            compiled(mlp, **FAKE)(*inputs)
        else:  # the operators that a session keeps are bounded
            kagent_core.run_op("aten::relu", torch.randn(rows, 4), device="fake:0")
        gc.collect()
        seen.append(fake.runtime.live)
    assert seen[-1] == seen[-2] == seen[-3] > 0


def test_what_was_closed_before_is_not_freed_again(fake):
    graph = traced(lambda *a: (mlp(*a),), *mlp_inputs(), **FAKE)
    graph(mlp_inputs())
    close(graph)
    del graph
    gc.collect()
    session(**FAKE).close_abandoned()
    session(**FAKE).close_abandoned()
    assert fake.runtime.live == 0
