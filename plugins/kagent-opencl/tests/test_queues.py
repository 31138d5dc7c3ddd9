"""Several queues: what waits for what, and results that do not depend on how many there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
import torch

import kagent_core
from kagent_core.config import Config, load_config
from kagent_core.errors import KernelExecutionError
from kagent_core.specs import Device, DeviceInfo, LaunchConfig
from kagent_opencl.platforms import list_devices
from kagent_opencl.plugin import OpenClPlugin
from kagent_opencl.queues import OrderedQueue
from kagent_opencl.runtime import OpenClRuntime

DEVICE_TYPE = "queued"
COMPLETE = cl.command_execution_status.COMPLETE
ADD = """
__kernel void add_to(__global const float *x, __global float *y, float number) {
    for (long i = get_global_id(0); i < 64; i += get_global_size(0)) y[i] = x[i] * 2 + number;
}
"""


class QueuedRuntime(OpenClRuntime):
    """As many queues as a GPU has by default, or as a test says; counts what is started in each."""

    count = 2

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.queues_of_cpu = self.count
        super().__init__(info, config)
        self.started = [0] * self.streams
        self.prepared = 0
        self.fails_at: int | None = None

    def prepare_on(
        self, stream: int, kernel: Any, config: LaunchConfig, args: Sequence[Any]
    ) -> Callable[[], object] | None:
        """Count."""
        start = super().prepare_on(stream, kernel, config, args)
        self.prepared += 1
        return None if start is None else lambda: self._counted(stream, start)

    def _counted(self, stream: int, start: Callable[[], object]) -> None:
        self.started[stream] += 1
        if sum(self.started) == self.fails_at:
            raise RuntimeError("this launch fails")
        start()


@contextmanager
def queued(count: int) -> Iterator[list[QueuedRuntime]]:
    """Use PoCL with so many queues; gives the runtimes that were opened."""
    opened: list[QueuedRuntime] = []

    def runtime(info: DeviceInfo, config: Config) -> QueuedRuntime:
        made = type("Queued", (QueuedRuntime,), {"count": count})(info, config)
        opened.append(made)
        return made  # type: ignore[no-any-return]

    class Plugin(OpenClPlugin):
        device_type = DEVICE_TYPE

        def devices(self, config: Config) -> Sequence[DeviceInfo]:
            return [replace(info, device=Device(DEVICE_TYPE, info.device.index)) for info in list_devices()]

    plugin = Plugin()
    plugin.runtime = runtime  # type: ignore[assignment]
    torch._dynamo.reset()  # what was compiled for another number of queues is no longer meant
    with kagent_core.use_plugin(plugin):
        yield opened


def chains(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three chains that know nothing of each other, then a join."""
    made = [x, y, z]
    for step in range(4):  # side by side, so that they do not take turns in the same memory
        made = [(value * 0.5 + n).tanh() + step for n, value in enumerate(made)]
    return made[0] + made[1] * made[2], made[0] - made[2]


# -- one runtime


@pytest.fixture
def info(device: str) -> DeviceInfo:
    """The device under test."""
    return next(info for info in list_devices() if str(info.device) == device)


@pytest.fixture
def opened(info: DeviceInfo) -> tuple[cl.Context, cl.Kernel, list[cl.Buffer]]:
    """A context, a kernel, and three buffers of 64 numbers."""
    from kagent_opencl.platforms import device_of

    context = cl.Context([device_of(info)])
    kernel = cl.Kernel(cl.Program(context, ADD).build(cache_dir=False), "add_to")  # type: ignore[arg-type]
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return context, kernel, [cl.Buffer(context, flags, hostbuf=np.ones(64, np.float32)) for _ in range(3)]


def launch(queue: OrderedQueue, kernel: cl.Kernel, x: cl.Buffer, y: cl.Buffer, number: float) -> None:
    kernel.set_args(x, y, np.float32(number))
    queue.launch(kernel, (8,), (1,))


@pytest.mark.parametrize("joined", ["by a launch", "by a call", "by a record"])
def test_what_waits_does_not_begin_before(opened: tuple[cl.Context, cl.Kernel, list[cl.Buffer]], joined: str) -> None:
    """The first queue is held back, by an event that nobody but this test sets."""
    context, kernel, (a, b, c) = opened
    first, second, third = (OrderedQueue(context, context.devices[0]) for _ in range(3))
    gate = cl.UserEvent(context)
    first.wait(gate)
    launch(first, kernel, a, b, 3)  # b = 5
    second.wait(first.record())
    if joined == "by a launch":
        launch(second, kernel, b, c, 1)
        last = second.record()
    elif joined == "by a call":
        kernel.set_args(b, c, np.float32(1))
        second.call(lambda: cl.enqueue_nd_range_kernel(second.queue, kernel, (8,), (1,)))
        last = second.record()
    else:  # nothing of its own between the two: what it waits for goes on
        third.wait(second.record())
        launch(third, kernel, b, c, 1)
        last = third.record()
    assert last.command_execution_status != COMPLETE
    gate.set_status(COMPLETE)
    last.wait()
    found = np.empty(64, np.float32)
    cl.enqueue_copy(third.queue, found, c)
    assert found.tolist() == [11.0] * 64
    for queue in (first, second, third):
        queue.finish()


def test_queues_do_not_wait_for_what_they_need_not(opened: tuple[cl.Context, cl.Kernel, list[cl.Buffer]]) -> None:
    context, kernel, (a, b, c) = opened
    held, free = (OrderedQueue(context, context.devices[0]) for _ in range(2))
    gate = cl.UserEvent(context)
    held.wait(gate)
    launch(held, kernel, a, b, 3)
    launch(free, kernel, a, c, 4)
    free.record().wait()
    assert held.record().command_execution_status != COMPLETE
    gate.set_status(COMPLETE)
    held.finish()


def test_a_queue_that_was_finished_waits_for_nothing(opened: tuple[cl.Context, cl.Kernel, list[cl.Buffer]]) -> None:
    """After a failure, events that no launch has taken up must not hold up the next plan."""
    context, kernel, (a, b, _) = opened
    queue, gate = OrderedQueue(context, context.devices[0]), cl.UserEvent(context)
    queue.wait(gate)
    queue.finish()
    launch(queue, kernel, a, b, 0)
    queue.record().wait()
    gate.set_status(COMPLETE)


def test_a_processor_has_one_queue_and_other_devices_several(
    info: DeviceInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({"cache_dir": str(tmp_path)})
    assert OpenClRuntime(info, config).streams == 1
    monkeypatch.setattr("kagent_opencl.runtime.is_cpu", lambda device: False)
    runtime = OpenClRuntime(info, config)
    assert runtime.streams == len(runtime.queues) == OpenClRuntime.queues_of_others > 1
    assert not runtime.imports_host


# -- whole plans


@pytest.mark.parametrize("count", [2, 3])
def test_a_hundred_runs(count: int) -> None:
    with queued(count) as opened:
        compiled = kagent_core.compile(chains, device=f"{DEVICE_TYPE}:0", fusion=False)
        for number in range(100):
            args = [torch.linspace(-1, 1, 5000) + number * n for n in (1, 2, 3)]
            for got, want in zip(compiled(*args), chains(*args), strict=True):
                torch.testing.assert_close(got, want)
        [runtime] = opened
        assert len(runtime.started) == count
        assert all(runtime.started)
        assert runtime.prepared <= sum(runtime.started)


def program(seed: int) -> Callable[..., list[torch.Tensor]]:
    """Return random steps on four tensors: some make new ones, some write into what others read."""
    drawn = random.Random(seed)
    steps = [(drawn.randrange(4), drawn.randrange(4), drawn.randrange(4), drawn.random() < 0.5) for _ in range(24)]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(tensors)
        for x, y, out, in_place in steps:
            made = values[x] * 0.5 + values[y].roll(1)
            if in_place:
                values[out].copy_(made)
            else:
                values[out] = made
        return values

    return run


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_hazards_keep_their_order(seed: int, count: int) -> None:
    """Writes after reads and writes after writes, in the caller's memory and where intermediates take turns."""
    function = program(seed)
    with queued(count) as opened:
        compiled = kagent_core.compile(function, device=f"{DEVICE_TYPE}:0", fusion=False)
        for _ in range(5):
            mine = [torch.arange(3000.0) * (n + 1) for n in range(4)]
            theirs = [tensor.clone() for tensor in mine]
            for got, want in zip(compiled(*mine), function(*theirs), strict=True):
                assert torch.equal(got, want)
            for got, want in zip(mine, theirs, strict=True):
                assert torch.equal(got, want)
        assert sum(started > 0 for started in opened[0].started) > 1


def test_a_model_that_is_trained() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
    )
    x = torch.randn(10, 24)
    with queued(2):
        compiled = kagent_core.compile(model, device=f"{DEVICE_TYPE}:0")
        found = []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("nth", [1, 5, 11])
def test_a_launch_that_fails_leaves_nothing_behind(nth: int) -> None:
    args = [torch.linspace(-1, 1, 5000) + n for n in (1, 2, 3)]
    with queued(3) as opened:
        compiled = kagent_core.compile(chains, device=f"{DEVICE_TYPE}:0", fusion=False)
        compiled(*args)
        [runtime] = opened
        for _ in range(3):
            runtime.fails_at = sum(runtime.started) + nth
            with pytest.raises(KernelExecutionError, match="this launch fails"):
                compiled(*args)
            runtime.fails_at = None
            for got, want in zip(compiled(*args), chains(*args), strict=True):
                torch.testing.assert_close(got, want)


def test_task_by_task() -> None:
    args = [torch.linspace(-1, 1, 500) + n for n in (1, 2, 3)]
    with queued(2):
        compiled = kagent_core.compile(chains, device=f"{DEVICE_TYPE}:0", fusion=False, profile=True)
        for _ in range(3):
            for got, want in zip(compiled(*args), chains(*args), strict=True):
                torch.testing.assert_close(got, want)
