"""Segments whose launches a device starts as one: in any order that it was told is allowed."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kagent_core
from kagent_core.device import Launch, Recording, Region
from kagent_core.errors import ExecutionError
from kagent_core.execute.launch import LaunchEach
from kagent_core.execute.pool import DeviceMemory
from kagent_core.specs import Device
from kagent_core.testing.fake import FakeDevice
from kagent_core.testing.fake_runtime import FakeRuntime

from .test_streams import ELEMENTS, SHARED, build, one_by_one, programs, tensor


class Shuffled(Recording):
    """Starts what may be started next, whichever comes."""

    def __init__(self, runtime: RecordingRuntime, launches: Sequence[Launch]) -> None:
        self.runtime = runtime
        self.launches = launches
        self.args = [launch.args for launch in launches]
        self.updates: list[int] = []
        self.started = 0
        self.closed = False

    def start(self) -> None:
        if self.runtime.fault == "start":
            raise RuntimeError("the device is gone")
        self.started += 1
        done: set[int] = set()
        while len(done) < len(self.launches):
            ready = [n for n, launch in enumerate(self.launches) if n not in done and done.issuperset(launch.after)]
            number = self.runtime.random.choice(ready)
            launch = self.launches[number]
            self.runtime.launch(launch.kernel, launch.config, self.args[number])
            done.add(number)

    def update(self, position: int, args: Sequence[Any]) -> None:
        if self.runtime.fault == "update":
            raise RuntimeError("these cannot be had")
        self.updates.append(position)
        self.args[position] = tuple(args)

    def close(self) -> None:
        self.closed = True


class RecordingRuntime(FakeRuntime):
    def __init__(self, fault: str = "", seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self.fault = fault
        self.random = random.Random(seed)
        self.recordings: list[Shuffled] = []

    def record(self, launches: Sequence[Launch]) -> Recording | None:
        if self.fault == "record":
            raise RuntimeError("there is no room for it")
        if self.fault == "decline":
            return None
        self.recordings.append(Shuffled(self, launches))
        return self.recordings[-1]


def replayed(segment: Any, runtime: RecordingRuntime, moves: Sequence[bool]) -> list[list[torch.Tensor]]:
    """Run a segment once for each of `moves`, which says whether its shared buffers lie elsewhere from then on."""
    memory = DeviceMemory(runtime, Device("fake", 0), threading.RLock())
    sealed = LaunchEach(memory, segment)
    regions: dict[int, Region] = {}
    results = []
    for move in moves:
        if move or not regions:
            regions = {b: Region(runtime.allocate(ELEMENTS * 8)) for b in range(SHARED)}
        for b, region in regions.items():
            runtime.copy_in(region.buffer, 0, memoryview((torch.arange(ELEMENTS) * (b + 1)).numpy()).cast("B"))
        sealed.run(dict(regions))
        found = [torch.empty(ELEMENTS, dtype=torch.int64) for _ in regions]
        for region, out in zip(regions.values(), found, strict=True):
            runtime.copy_out(region.buffer, 0, memoryview(out.numpy()).cast("B"))
        results.append(found)
    sealed.close()
    runtime.close()
    return results


def skipping(segment: Any, position: int) -> Any:
    """The segment with nothing to launch for one task, as for an empty tensor."""
    tasks = list(segment.tasks)
    tasks[position] = dataclasses.replace(tasks[position], config=None)
    return dataclasses.replace(segment, tasks=tuple(tasks))


@settings(max_examples=300, deadline=None)
@given(programs(), st.integers(1, 3), st.integers(0, 2**31), st.lists(st.booleans(), min_size=2, max_size=5))
def test_any_program_gives_the_sequential_result(program, streams, seed, moves):
    runtime = RecordingRuntime(streams=streams, seed=seed)
    expected = one_by_one(program)
    for result in replayed(build(program), runtime, moves):
        for got, want in zip(result, expected, strict=True):
            assert torch.equal(got, want)
    [recording] = runtime.recordings
    assert recording.started == len(moves) - 1  # the first run launches each
    assert bool(recording.updates) <= any(moves[1:])
    assert recording.closed


A, B = tensor(0, 0), tensor(1, 0)
CHAIN = [(A, A, A), (B, B, B), (A, A, A), (A, B, B)]


def test_what_comes_after_what():
    runtime = RecordingRuntime()
    replayed(build(CHAIN), runtime, [False, False])
    assert [launch.after for launch in runtime.recordings[0].launches] == [(), (), (0,), (1, 2)]


def test_order_holds_across_a_task_that_launches_nothing():
    runtime = RecordingRuntime()
    replayed(skipping(build(CHAIN), 2), runtime, [False, False])
    assert [launch.after for launch in runtime.recordings[0].launches] == [(), (), (0, 1)]


def test_only_launches_whose_memory_moved_are_updated():
    runtime = RecordingRuntime()
    inner = tensor(SHARED, 0)
    program = [(A, A, inner), (inner, inner, tensor(SHARED + 1, 0)), (tensor(SHARED + 1, 0), inner, B)]
    for result in replayed(build(program), runtime, [False, False, True, False]):
        for got, want in zip(result, one_by_one(program), strict=True):
            assert torch.equal(got, want)
    assert runtime.recordings[0].updates == [0, 2]


def test_one_launch_is_not_recorded():
    runtime = RecordingRuntime()
    replayed(build([(A, A, A)]), runtime, [False, False])
    assert runtime.recordings == []


@pytest.mark.parametrize("fault", ["decline", "record", "update"])
def test_a_device_that_declines_launches_each(fault, caplog):
    runtime = RecordingRuntime(fault)
    for result in replayed(build(CHAIN), runtime, [False, False, True, False]):
        for got, want in zip(result, one_by_one(CHAIN), strict=True):
            assert torch.equal(got, want)
    if fault == "record":
        assert "launched one by one: there is no room for it" in caplog.text
    if fault == "update":
        assert runtime.recordings[0].closed
        assert "launched one by one from here on: these cannot be had" in caplog.text


def chain(x, y):
    for _ in range(3):
        x, y = torch.relu(x * y + x), y @ y
    return x @ y


def test_a_start_that_the_device_refuses():
    runtime = RecordingRuntime("start")
    with kagent_core.use_plugin(FakeDevice(runtime=runtime)):
        torch._dynamo.reset()
        program = torch.compile(chain, backend="kagent", options={"device": "fake:0"})
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        program(x, y)
        with pytest.raises(ExecutionError, match=r"recorded launches of .*: RuntimeError: the device is gone"):
            program(x, y)
        runtime.fault = ""
        torch.testing.assert_close(program(x, y), chain(x, y))
