"""Several streams: whatever overlaps, the result is what one task after the other gives."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.device import Region, Segment
from kagent_core.errors import KernelExecutionError
from kagent_core.execute.arena import plan_arena
from kagent_core.execute.launch import LaunchEach
from kagent_core.execute.pool import DeviceMemory
from kagent_core.execute.streams import StreamPlan, physical_dependencies, plan_streams
from kagent_core.extract.hazards import HazardTracker
from kagent_core.extract.stages import memory_ranges
from kagent_core.specs import (
    Access,
    BufferKind,
    BufferSpec,
    Device,
    DType,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    OpCall,
    PackedArg,
    TensorSpec,
)
from kagent_core.testing.fake import AccessError, FakeRuntime, HazardError

DEVICE = Device("fake", 0)
I64 = DType("int64", 8)
SHARED, ELEMENTS = 2, 16  # buffers that the caller owns, and their elements
SIZE = 4  # elements of every tensor


def combine(x, y, out):
    """A result that depends on the order of everything before it."""
    out.copy_(3 * x + 5 * y + 1)


COMBINE = KernelDescriptor("test::combine", "combine", combine)


def tensor(buffer, start, stride=1):
    return TensorSpec(I64, (SIZE,), (stride,), start, buffer)


places = st.builds(tensor, st.integers(0, SHARED - 1), st.integers(0, ELEMENTS - 2 * SIZE), st.integers(1, 2))


@st.composite
def programs(draw):
    """Tasks that read and write overlapping pieces of shared buffers, and make intermediates that later ones read."""
    made: list[TensorSpec] = []
    tasks: list[tuple[TensorSpec, TensorSpec, TensorSpec]] = []
    for _ in range(draw(st.integers(2, 14))):
        source = st.one_of(places, st.sampled_from(made)) if made else places
        x, y = draw(source), draw(source)
        if draw(st.booleans()):
            out = draw(places)
        else:
            out = tensor(SHARED + len(made), 0)
            made.append(out)
        tasks.append((x, y, out))
    return tasks


def build(program, streams=1):
    """Return the segment of a program, as the extractor and the executor would make it for so many streams."""
    buffers = [BufferSpec(b, ELEMENTS * 8, BufferKind.INPUT, DEVICE) for b in range(SHARED)]
    hazards, tasks = HazardTracker(), []
    for number, (x, y, out) in enumerate(program):
        if out.buffer == len(buffers):
            buffers.append(BufferSpec(out.buffer, SIZE * 8, BufferKind.INTERMEDIATE, DEVICE))
        fresh = out.buffer >= SHARED
        inputs = (x, y) if fresh else (x, y, out)
        call = OpCall(number, f"combine_{number}", "test::combine", {}, inputs, (out,), (out,) if fresh else ())
        reads, writes = memory_ranges((call,))
        args = (
            PackedArg("x", x, Access.IN),
            PackedArg("y", y, Access.IN),
            PackedArg("out", out, Access.OUT if fresh else Access.INOUT),
        )
        needed = hazards.add(number, reads, writes)
        tasks.append(KernelTask(number, COMBINE, args, reads, writes, LaunchConfig(), DEVICE, 0, needed, (call,)))
    meant = plan_streams(tasks, {}, streams).streams if streams > 1 else ()
    arena = plan_arena(tasks, buffers, frozenset(), keep_exports=True, streams=meant)
    return Segment(DEVICE, tuple(tasks), tuple(buffers), arena.offsets, arena.nbytes)


def one_by_one(program):
    """The oracle: plain tensors, one task after the other."""
    memory = [torch.arange(ELEMENTS) * (b + 1) for b in range(SHARED)]
    for x, y, out in program:
        while len(memory) <= out.buffer:
            memory.append(torch.zeros(SIZE, dtype=torch.int64))
        x_value, y_value = (memory[s.buffer].as_strided(s.shape, s.strides, s.storage_offset).clone() for s in (x, y))
        target = memory[out.buffer].as_strided(out.shape, out.strides, out.storage_offset)
        combine(x_value, y_value, target)
    return memory[:SHARED]


def on_device(segment, runtime, times=1):
    """Run a segment and return the shared buffers."""
    regions = {b: Region(runtime.allocate(ELEMENTS * 8)) for b in range(SHARED)}
    memory = DeviceMemory(runtime, Device("fake", 0), threading.RLock())
    sealed = LaunchEach(memory, segment)
    results = []
    for _ in range(times):
        for b, region in regions.items():
            runtime.copy_in(region.buffer, 0, memoryview((torch.arange(ELEMENTS) * (b + 1)).numpy()).cast("B"))
        sealed.run(dict(regions))
        results.append([])
        for region in regions.values():
            out = torch.empty(ELEMENTS, dtype=torch.int64)
            runtime.copy_out(region.buffer, 0, memoryview(out.numpy()).cast("B"))
            results[-1].append(out)
    sealed.close()
    memory.trim()
    for region in regions.values():
        runtime.free(region.buffer)
    assert runtime.live == 0
    runtime.close()
    return results


@settings(max_examples=1000, deadline=None)
@given(programs(), st.integers(1, 4), st.integers(0, 2**31))
def test_any_program_gives_the_sequential_result(program, streams, seed):
    runtime = FakeRuntime(streams=streams, delay_ms=0.2, seed=seed)
    for result in on_device(build(program, streams), runtime, times=2):
        for got, want in zip(result, one_by_one(program), strict=True):
            assert torch.equal(got, want)


def chain(length):
    return [(tensor(0, 0), tensor(0, 0), tensor(0, 0))] * length


def test_independent_chains_get_streams_of_their_own():
    program = [(tensor(b, 0), tensor(b, 0), tensor(b, 0)) for _ in range(3) for b in range(SHARED)]
    plan = plan_streams(build(program).tasks, {}, 2)
    assert plan.streams == (0, 1, 0, 1, 0, 1)
    assert plan.waits == ((),) * 6
    assert plan.recorded == frozenset()


def test_a_join_waits_for_the_other_stream_only():
    a, b, both = tensor(0, 0), tensor(1, 0), tensor(0, 8)
    plan = plan_streams(build([(a, a, a), (b, b, b), (a, b, both)]).tasks, {}, 2)
    assert plan.streams[0] != plan.streams[1]
    other = 0 if plan.streams[2] == plan.streams[1] else 1
    assert plan.waits[2] == (other,)
    assert plan.recorded == {other}


def test_buffers_that_share_arena_bytes_are_ordered():
    """Two intermediates that live one after the other lie in the same bytes: safe in one stream, a race in two."""
    a, b = tensor(0, 0), tensor(1, 0)
    t, u = tensor(SHARED, 0), tensor(SHARED + 1, 0)
    segment = build([(a, a, t), (t, t, tensor(0, 8)), (b, b, u), (u, u, tensor(1, 8))])
    assert segment.offsets[SHARED] == segment.offsets[SHARED + 1]
    assert segment.tasks[2].depends_on == ()
    assert physical_dependencies(segment.tasks, segment.offsets)[2] == (1,)


def test_chains_that_are_meant_for_two_streams_share_no_bytes():
    a, b = tensor(0, 0), tensor(1, 0)
    t, u = tensor(SHARED, 0), tensor(SHARED + 1, 0)
    segment = build([(a, a, t), (t, t, tensor(0, 8)), (b, b, u), (u, u, tensor(1, 8))], streams=2)
    assert segment.offsets[SHARED] != segment.offsets[SHARED + 1]
    assert segment.arena_nbytes == 2 * 64
    assert physical_dependencies(segment.tasks, segment.offsets) == [(), (0,), (), (2,)]
    assert plan_streams(segment.tasks, segment.offsets, 2).streams == (0, 0, 1, 1)


class PreparingRuntime(FakeRuntime):
    """Prepares launches, and notes what it prepared and what it started otherwise."""

    def __init__(self, **how):
        super().__init__(**how)
        self.prepared, self.started, self.others = [], [], 0

    def prepare_on(self, stream, kernel, config, args):
        self.prepared.append(stream)
        held = list(args)  # as they are now

        def start():
            self.started.append(stream)
            super(PreparingRuntime, self).launch_on(stream, kernel, config, held)

        return start

    def launch_on(self, stream, kernel, config, args):
        self.others += 1
        super().launch_on(stream, kernel, config, args)


def test_launches_are_prepared_on_their_streams():
    program = [(tensor(b, 0), tensor(b, 0), tensor(b, 0)) for _ in range(3) for b in range(SHARED)]
    runtime = PreparingRuntime(streams=2, delay_ms=0.2)
    for result in on_device(build(program, 2), runtime, times=3):
        for got, want in zip(result, one_by_one(program), strict=True):
            assert torch.equal(got, want)
    assert runtime.prepared == [0, 1, 0, 1, 0, 1]
    assert runtime.started == runtime.prepared * 3
    assert runtime.others == 0


def test_what_has_moved_is_prepared_again():
    segment, runtime = build([(tensor(0, 0), tensor(1, 0), tensor(1, 8))] * 2, 2), PreparingRuntime(streams=2)
    memory = DeviceMemory(runtime, Device("fake", 0), threading.RLock())
    sealed = LaunchEach(memory, segment)
    for _ in range(2):
        regions = {b: Region(runtime.allocate(ELEMENTS * 8)) for b in range(SHARED)}
        for b, region in regions.items():
            runtime.copy_in(region.buffer, 0, memoryview((torch.arange(ELEMENTS) * (b + 1)).numpy()).cast("B"))
        for _ in range(2):
            sealed.run(dict(regions))
        seen = torch.empty(ELEMENTS, dtype=torch.int64)
        runtime.copy_out(regions[1].buffer, 0, memoryview(seen.numpy()).cast("B"))
        assert seen[8:12].tolist() == [13 * n + 1 for n in range(4)]
    assert len(runtime.prepared) == 4
    sealed.close()


def test_a_missing_wait_is_caught(monkeypatch):
    """The fake device is what makes the tests above worth something: without events it must protest."""
    everyone_alone = StreamPlan((0, 1, 0, 1), ((),) * 4, frozenset())
    monkeypatch.setattr("kagent_core.execute.launch.plan_streams", lambda *args: everyone_alone)
    runtime = FakeRuntime(streams=2, delay_ms=3.0)
    with pytest.raises(KernelExecutionError, match="had finished") as caught:
        on_device(build(chain(4)), runtime, times=5)
    assert isinstance(caught.value.__cause__, HazardError)


def test_a_write_to_an_input_is_caught():
    def rude(x, y, out):
        x.add_(1)
        out.copy_(y)

    segment = build([(tensor(0, 0), tensor(1, 0), tensor(1, 8))])
    rude_kernel = dataclasses.replace(COMBINE, function=rude)
    task = dataclasses.replace(segment.tasks[0], kernel=rude_kernel)
    with pytest.raises(KernelExecutionError, match="declares as input") as caught:
        on_device(dataclasses.replace(segment, tasks=(task,)), FakeRuntime())
    assert isinstance(caught.value.__cause__, AccessError)
