"""Calls from many threads: right results, no lost memory, and one thread's failure is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry

import kagent_core
from kagent_core import hookimpl
from kagent_core.backend import kagent
from kagent_core.errors import KernelExecutionError
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.fake import FakeDevice

from .traced import CPU, FAKE, close, compiled, same, traced

THREADS = 8
SECONDS = 60
"""Far more than anything here takes; only a deadlock waits so long."""


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    plugin = FakeDevice()
    with kagent_core.use_plugin(plugin):
        yield plugin


def together(action: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Start an action in every thread at one moment; return the results, or raise what one raised."""
    start = threading.Barrier(threads)

    def run(number: int) -> Any:
        start.wait(SECONDS)
        return action(number)

    with ThreadPoolExecutor(threads) as pool:
        return [future.result(SECONDS) for future in [pool.submit(run, number) for number in range(threads)]]


def network(x, w):
    y = torch.relu(x @ w)
    return (y + x) * 2.0


def numbered(number: int, call: int, rows: int = 16) -> torch.Tensor:
    """An input that no other thread and no other call has."""
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(1000 * number + call))


# -- one compiled function


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_threads_share_a_compiled_function(fake, device):
    w = torch.randn(16, 16)
    run = compiled(network, **device)
    run(numbered(0, 0), w)

    def calls(number):
        for call in range(20):
            x = numbered(number, call)
            same(run(x, w), network(x, w))

    together(calls)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_the_first_calls_come_at_once(fake, device):
    """All threads find the function not compiled, or the plan not built, yet."""
    w = torch.randn(16, 16)
    run = compiled(network, **device)

    def first_call(number):
        x = numbered(number, 0)
        same(run(x, w), network(x, w))

    together(first_call)


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_plans_come_and_go_under_the_threads(fake, device):
    """More shapes than plans are kept: threads run plans that others push out of the cache."""
    w = torch.randn(16, 16)
    example = numbered(0, 0, rows=9)  # with another size than the weight, so that it has a symbol of its own
    graph = traced(lambda x, w: (network(x, w),), example, w, symbolic=True, **device, plan_cache_size=2)

    def calls(number):
        for call in range(12):
            x = numbered(number, call, rows=3 + (number + call) % 5)
            same(graph([x, w]), network(x, w))

    together(calls)
    assert len(graph.plans()) == 2
    close(graph)
    assert fake.runtime.live == 0


def test_memory_of_a_device_does_not_grow_with_the_calls(fake):
    w = torch.randn(16, 16)
    graph = traced(lambda x, w: (network(x, w),), numbered(0, 0), w, **FAKE)
    graph([numbered(0, 0), w])
    of_one = fake.runtime.live

    together(lambda number: [graph([numbered(number, call), w]) for call in range(10)])
    assert fake.runtime.live <= of_one * THREADS  # at most one instance for each call at the same time
    assert fake.runtime.live % of_one == 0
    close(graph)
    assert fake.runtime.live == 0


def test_results_of_one_thread_are_not_written_by_another():
    w = torch.randn(16, 16)
    run = compiled(network, **CPU)
    run(numbered(0, 0), w)
    kept = together(lambda number: [run(numbered(number, call), w) for call in range(10)])
    for number, results in enumerate(kept):
        for call, got in enumerate(results):
            same(got, network(numbered(number, call), w))


def test_inputs_written_by_each_thread():
    def accumulate(total, x):
        total.add_(x * 2.0)
        return total.amax()

    run = compiled(accumulate, **CPU)
    run(torch.zeros(16, 16), numbered(0, 0))

    def calls(number):
        total, expected = torch.zeros(16, 16), torch.zeros(16, 16)
        for call in range(20):
            x = numbered(number, call)
            same(run(total, x), accumulate(expected, x))
        same(total, expected)

    together(calls)


def test_training_in_many_threads():
    w = torch.randn(16, 16)
    run = compiled(network, **CPU)

    def gradients(function, number):
        x = numbered(number, 0).requires_grad_()
        mine = w.clone().requires_grad_()
        return torch.autograd.grad(function(x, mine).square().sum(), (x, mine))

    gradients(run, 0)

    def calls(number):
        for _ in range(5):
            for one, other in zip(gradients(run, number), gradients(network, number), strict=True):
                torch.testing.assert_close(one, other)

    together(calls)


class Meeting:
    """A relu that waits until as many threads as `parties` are in it."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self.open = False

    @hookimpl(wrapper=True)
    def kagent_lookup_kernels(self, ctx):
        kernels = yield
        mine = KernelDescriptor("aten::relu", "meeting", self.relu, allocates=True)
        return [mine if kernel.signature == mine.signature else kernel for kernel in kernels]

    def relu(self, x):
        if self.open:
            self.barrier.wait(SECONDS)
        return x.clamp(min=0)


def test_calls_of_one_plan_do_run_at_the_same_time():
    """No lock is held while a plan runs in host memory: two threads meet inside the kernel."""
    w = torch.randn(16, 16)
    meeting = Meeting(parties=3)
    with kagent_core.use_plugin(meeting):
        run = compiled(network, **CPU)
        run(numbered(0, 0), w)
        meeting.open = True

        def call(number):
            x = numbered(number, 0)
            same(run(x, w), network(x, w))

        together(call, threads=3)


# -- different functions at once


def made(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose code no other one has, as seen by Dynamo."""
    namespace: dict[str, Any] = {"torch": torch}
    source = f"def function(x):\n    return (torch.relu(x * {number}.0) + {number + 1}.0).sum(0, keepdim=True) * x\n"
    exec(compile(source, f"<function {number}>", "exec"), namespace)
    return namespace["function"]


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_different_functions_are_compiled_at_once(fake, device):
    functions = [made(number) for number in range(THREADS)]
    compiled_functions = [compiled(function, **device) for function in functions]

    def calls(number):
        for call in range(5):
            x = numbered(number, call)
            same(compiled_functions[number](x), functions[number](x))

    together(calls)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == THREADS


def test_different_functions_are_trained_at_once():
    """The first call of each compiles a forward and a backward graph."""
    functions = [made(number) for number in range(THREADS)]
    compiled_functions = [compiled(function, **CPU) for function in functions]

    def calls(number):
        for call in range(3):
            x = numbered(number, call).requires_grad_()
            expected = torch.autograd.grad(functions[number](x).square().sum(), x)
            actual = torch.autograd.grad(compiled_functions[number](x).square().sum(), x)
            same(actual, expected)

    together(calls)


def test_the_short_way_in_does_not_depend_on_the_backends_name(monkeypatch):
    """torch registers a backend when its name is first looked up, and fails when two threads do so at once."""
    meeting = threading.Barrier(2)

    class Slow:
        def load(self):
            meeting.wait(SECONDS)
            return kagent

    monkeypatch.delitem(registry._COMPILER_FNS, "kagent", raising=False)
    monkeypatch.setitem(registry._BACKENDS, "kagent", Slow())

    def call(number):
        x = numbered(number, 0)
        same(kagent_core.compile(made(number), device="cpu")(x), made(number)(x))

    together(call, threads=2)


# -- single operators


@pytest.mark.parametrize("device", ["cpu", "fake:0"])
def test_run_op_from_many_threads(fake, device):
    operators = [
        ("aten::relu", torch.relu, 1),
        ("aten::mul.Tensor", torch.mul, 2),
        ("aten::mm", torch.mm, 2),
        ("aten::add.Tensor", torch.add, 2),
    ]

    def calls(number):
        for call in range(20):
            signature, eager, count = operators[(number + call) % len(operators)]
            rows = 16 if signature == "aten::mm" else 3 + call % 3
            args = [numbered(number, call + 100 * i, rows=rows) for i in range(count)]
            same(kagent_core.run_op(signature, *args, device=device), eager(*args))

    together(calls)


# -- failures


class Picky:
    """Refuses tensors with a number above 100 in them."""

    def kernel(self, device: dict[str, str]) -> KernelDescriptor:
        allocates = device == CPU
        function = self.returning if allocates else self.filling
        return KernelDescriptor("aten::relu", "picky", function, allocates=allocates)

    def returning(self, x):
        if x.max() > 100:
            raise ValueError("too much")
        return x.clamp(min=0)

    def filling(self, x, out):
        out.copy_(self.returning(x))


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_a_failing_thread_disturbs_no_other(fake, device):
    mine = Picky().kernel(device)

    class Override:
        @hookimpl(wrapper=True)
        def kagent_lookup_kernels(self, ctx):
            kernels = yield
            return [mine if kernel.signature == mine.signature else kernel for kernel in kernels]

    w = torch.eye(16)
    with kagent_core.use_plugin(Override()):
        run = compiled(network, **device, fusion=False)  # the kernel is one operator's
        run(numbered(0, 0), w)

        def calls(number):
            failures = 0
            for call in range(20):
                x = numbered(number, call)
                if number % 2 and call % 2:
                    with pytest.raises(KernelExecutionError, match="too much"):
                        run(x + 1000.0, w)
                    failures += 1
                else:
                    same(run(x, w), network(x, w))
            return failures

        assert sum(together(calls)) == THREADS // 2 * 10
