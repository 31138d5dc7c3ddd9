"""The extractor's default stages, one by one, and the agent that runs them in a row."""

from __future__ import annotations

import pytest

from kagent_core.config import Config
from kagent_core.device import LaunchConfigDeriver, OpenDevice
from kagent_core.errors import KernelNotFoundError, LaunchConfigError, ValidationError
from kagent_core.extract.context import ExtractionContext, ExtractionRequest
from kagent_core.extract.fusion import FusionChecker, neighbours
from kagent_core.extract.hazards import RANDOM_STATE, SIDE_EFFECTS
from kagent_core.extract.packing import CallPacker
from kagent_core.extract.stages import DefaultStages, memory_ranges
from kagent_core.registry import KernelRegistry
from kagent_core.specs import (
    Access,
    BufferKind,
    Device,
    DeviceInfo,
    FusionDecision,
    FusionGroup,
    FusionPlan,
    KernelDescriptor,
    LaunchConfig,
    MemRange,
    PackedArg,
)
from kagent_core.testing.fake import FakeRuntime

from .builders import TOY, buffer, call, relu, task, tensor

INFO = DeviceInfo(TOY, "Toy 3000", max_threads_per_block=256, shared_nbytes=1024)
STAGES = DefaultStages()


class Deriver(LaunchConfigDeriver):
    """Gives what the test says, and remembers what it was asked."""

    def __init__(self, config=LaunchConfig()):  # noqa: B008  it is frozen
        self.config = config
        self.asked = []

    def derive(self, calls, kernel, info):
        self.asked.append((calls, kernel, info))
        return self.config


class HostRuntime(FakeRuntime):
    """A runtime whose buffers are host memory."""

    host_memory = True


def opened(*signatures, deriver=None, info=INFO, runtime=None, printer=None):
    registry = KernelRegistry("toy")
    for signature in signatures or ("aten::relu", "aten::add.Tensor"):
        registry.add(KernelDescriptor(signature, f"toy_{signature}"))
    registry.freeze()
    return OpenDevice(info, registry, CallPacker(), deriver or Deriver(), runtime or FakeRuntime(), printer)


def context(*calls, buffers=None, device=TOY, config=None, suggest=None, first_task_id=0, **changes):
    if buffers is None:
        count = 1 + max((s.buffer for c in calls for s in (*c.inputs, *c.outputs)), default=-1)
        buffers = [buffer(number, 1 << 20, device=TOY) for number in range(count)]
    request = ExtractionRequest(tuple(calls), device, tuple(buffers), first_task_id)
    ctx = ExtractionContext(request, opened(**changes), config or Config(), suggest)
    ctx.fusion = FusionPlan(tuple(FusionGroup((one.id,)) for one in calls))
    return ctx


def ready(*calls, **changes):
    """A context that all stages up to the last have gone through."""
    ctx = context(*calls, **changes)
    signatures = {one.signature for one in calls}
    ctx.opened = opened(*signatures)
    ctx.kernels = STAGES.kagent_lookup_kernels(ctx)
    ctx.packed = STAGES.kagent_pack_arguments(ctx)
    ctx.launch_configs = [LaunchConfig() for _ in ctx.fusion.groups]
    return ctx


# -- validate


def test_consistent_calls_are_counted():
    ctx = context(relu(0, tensor(0, 4), tensor(1, 4)), relu(1, tensor(1, 4), tensor(2, 4)))
    assert STAGES.kagent_validate(ctx) == "2 calls are consistent"


def test_calls_of_another_device_are_refused():
    ctx = context(relu(0, tensor(0, 4), tensor(1, 4)), device=Device("toy", 1))
    with pytest.raises(ValidationError, match=r"placed on toy:1 reached the extractor of toy:0"):
        STAGES.kagent_validate(ctx)


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize(
    ("wrong", "touched"),
    [
        (tensor(0, 5), "bytes 0 to 20 of a buffer of 16"),
        (tensor(0, 2, offset=3), "bytes 12 to 20 of a buffer of 16"),
        (tensor(0, 3, strides=(2,)), "bytes 0 to 20 of a buffer of 16"),
        (tensor(0, 1, offset=-1), "bytes -4 to 0 of a buffer of 16"),
    ],
)
def test_a_tensor_outside_of_its_buffer_is_refused(where, wrong, touched):
    other = tensor(1, 1)
    source, target = (wrong, other) if where == "input" else (other, wrong)
    ctx = context(relu(0, source, target), buffers=[buffer(n, 16, device=TOY) for n in range(2)])
    with pytest.raises(ValidationError, match=rf"op_0 \(aten::relu\) touches {touched}"):
        STAGES.kagent_validate(ctx)


@pytest.mark.parametrize("fits", [tensor(0, 4), tensor(0, 2, strides=(3,)), tensor(0, 1, offset=3), tensor(0, 0, 9)])
def test_a_tensor_may_fill_its_buffer(fits):
    ctx = context(relu(0, fits, tensor(1, 4)), buffers=[buffer(n, 16, device=TOY) for n in range(2)])
    assert STAGES.kagent_validate(ctx) == "1 calls are consistent"


def test_sizes_and_strides_must_have_one_rank():
    wrong = tensor(0, 2, 2, strides=(1,))
    with pytest.raises(ValidationError, match="2 sizes and 1 strides"):
        STAGES.kagent_validate(
            context(relu(0, tensor(1, 2), wrong), buffers=[buffer(n, 99, device=TOY) for n in (0, 1)])
        )


@pytest.mark.parametrize("elsewhere", [None, Device("toy", 1)])
def test_a_buffer_in_other_memory_is_refused(elsewhere):
    buffers = [buffer(0, 16, BufferKind.INPUT, elsewhere), buffer(1, 16, device=TOY)]
    where = elsewhere or "host memory"
    with pytest.raises(ValidationError, match=rf"placed on toy:0, but reads f32\[4\] in {where}"):
        STAGES.kagent_validate(context(relu(0, tensor(0, 4), tensor(1, 4)), buffers=buffers))


def test_a_device_in_host_memory_reads_host_buffers_but_no_other_devices():
    one = relu(0, tensor(0, 4), tensor(1, 4))
    buffers = [buffer(0, 16, BufferKind.INPUT), buffer(1, 16)]
    ctx = context(one, buffers=buffers, runtime=HostRuntime())
    assert STAGES.kagent_validate(ctx) == "1 calls are consistent"
    buffers[0] = buffer(0, 16, device=Device("cuda", 0))
    with pytest.raises(ValidationError, match="in cuda:0"):
        STAGES.kagent_validate(context(one, buffers=buffers, runtime=HostRuntime()))


# -- analyze fusion


def chain():
    """0 makes b1, 1 makes b2 of it, 2 adds b1 and b2."""
    first, second = relu(0, tensor(0, 4), tensor(1, 4)), relu(1, tensor(1, 4), tensor(2, 4))
    add = call(2, "aten::add.Tensor", {"self": tensor(1, 4), "other": tensor(2, 4)}, [tensor(3, 4)])
    return first, second, add


@pytest.mark.parametrize(
    ("config", "printer", "reason"),
    [
        (Config(fusion=False), None, "fusion is switched off by config (fusion = false)"),
        (Config(fusion=False), object(), "fusion is switched off by config (fusion = false)"),
    ],
)
def test_every_neighbouring_pair_has_a_reason(config, printer, reason):
    plan = FusionChecker(config).analyze(chain(), opened(printer=printer))
    assert plan.groups == (FusionGroup((0,)), FusionGroup((1,)), FusionGroup((2,)))
    assert plan.decisions == tuple(
        FusionDecision(producer, consumer, False, reason) for producer, consumer in ((0, 1), (0, 2), (1, 2))
    )


def test_the_fusion_stage_asks_the_checker_with_its_context():
    ctx = context(*chain(), config=Config(fusion=False))
    assert STAGES.kagent_analyze_fusion(ctx) == FusionChecker(ctx.config).analyze(ctx.request.calls, ctx.opened)


def test_neighbours_are_the_last_writer_and_its_readers():
    write = call(3, "aten::copy_", {"self": tensor(1, 4), "src": tensor(3, 4)}, [], written=[tensor(1, 4)])
    last = relu(4, tensor(1, 4), tensor(4, 4))
    assert list(neighbours([*chain(), write, last])) == [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3), (3, 4)]


def test_calls_that_share_only_an_input_are_no_neighbours():
    assert list(neighbours([relu(0, tensor(0, 4), tensor(1, 4)), relu(1, tensor(0, 4), tensor(2, 4))])) == []


# -- look up kernels, pack arguments


def test_a_kernel_per_group_by_exact_signature():
    kernels = STAGES.kagent_lookup_kernels(context(*chain()))
    assert [kernel.name for kernel in kernels] == ["toy_aten::relu", "toy_aten::relu", "toy_aten::add.Tensor"]


def test_a_missing_kernel_says_what_came():
    missing = call(0, "aten::neg", {"self": tensor(0, 4)}, [tensor(1, 4)])
    with pytest.raises(KernelNotFoundError, match=r"no kernel for aten::neg on 'toy' takes what came: f32\[4\]"):
        STAGES.kagent_lookup_kernels(context(missing))


def test_arguments_are_packed_per_group():
    ctx = context(*chain())
    ctx.kernels = STAGES.kagent_lookup_kernels(ctx)
    packed = STAGES.kagent_pack_arguments(ctx)
    assert [[arg.name for arg in args] for args in packed] == [["self", "out"]] * 2 + [["self", "other", "out"]]
    assert packed[0] == (
        PackedArg("self", tensor(0, 4), Access.IN),
        PackedArg("out", tensor(1, 4), Access.OUT, keyword=True),
    )


# -- derive launch configs


def derive(*, config=LaunchConfig(), suggest=None, info=INFO):  # noqa: B008
    deriver = Deriver(config)
    ctx = context(relu(0, tensor(0, 4), tensor(1, 4)), deriver=deriver, suggest=suggest, info=info)
    ctx.kernels = STAGES.kagent_lookup_kernels(ctx)
    ctx.packed = STAGES.kagent_pack_arguments(ctx)
    return STAGES.kagent_derive_launch_configs(ctx), deriver, ctx


def test_the_device_derives_where_nothing_is_suggested():
    wide = LaunchConfig((4, 1, 1), (256, 1, 1), 1024)
    configs, deriver, ctx = derive(config=wide, suggest=lambda kernel, calls: None)
    assert configs == [wide]
    assert deriver.asked == [(ctx.request.calls, ctx.kernels[0], INFO)]


def test_a_suggestion_comes_first():
    tuned = LaunchConfig(block=(8, 8, 1))
    asked = []
    configs, deriver, ctx = derive(suggest=lambda kernel, calls: asked.append((kernel, calls)) or tuned)
    assert configs == [tuned]
    assert deriver.asked == []
    assert asked == [(ctx.kernels[0], ctx.request.calls)]


def test_nothing_to_launch_is_none():
    assert derive(config=None)[0] == [None]


LIMITS = [
    (LaunchConfig(grid=(0, 1, 1)), "every extent must be at least 1"),
    (LaunchConfig(block=(1, 1, -2)), "every extent must be at least 1"),
    (LaunchConfig(block=(16, 16, 2)), "512 threads per block, toy:0 takes 256"),
    (LaunchConfig(shared_nbytes=1025), "toy:0 has 1024 bytes of shared memory per block"),
]


@pytest.mark.parametrize(("config", "reason"), LIMITS)
@pytest.mark.parametrize("suggested", [False, True])
def test_a_launch_config_beyond_the_devices_limits_is_refused(config, reason, suggested):
    suggest = (lambda kernel, calls: config) if suggested else None
    with pytest.raises(LaunchConfigError) as caught:
        derive(config=config, suggest=suggest)
    assert str(caught.value).startswith(f"kernel 'toy_aten::relu' got the launch config {config}: ")
    assert reason in str(caught.value)


def test_the_limits_themselves_are_allowed():
    most = LaunchConfig((1, 1, 1), (16, 16, 1), 1024)
    assert derive(config=most)[0] == [most]


# -- assemble


def test_a_task_reads_its_inputs_and_writes_its_results():
    tasks = STAGES.kagent_assemble(ready(*chain(), first_task_id=10))
    assert [one.id for one in tasks] == [10, 11, 12]
    assert [one.depends_on for one in tasks] == [(), (10,), (11,)]  # 10 is implied
    assert tasks[2].reads == (MemRange(1, 0, 16), MemRange(2, 0, 16))
    assert tasks[2].writes == (MemRange(3, 0, 16),)
    assert {one.device for one in tasks} == {TOY}
    assert tasks[2].name == "op_2"


def test_a_task_has_its_own_kernel_arguments_and_config():
    ctx = ready(*chain())
    ctx.launch_configs = [LaunchConfig(), None, LaunchConfig(block=(2, 1, 1))]
    tasks = STAGES.kagent_assemble(ctx)
    assert [one.kernel for one in tasks] == list(ctx.kernels)
    assert [one.args for one in tasks] == list(ctx.packed)
    assert [one.config for one in tasks] == ctx.launch_configs
    assert [one.calls for one in tasks] == [(one,) for one in ctx.request.calls]


def test_a_tensor_written_in_place_is_read_and_written():
    target, source = tensor(0, 4), tensor(1, 4)
    write = call(0, "aten::copy_", {"self": target, "src": source}, [target], written=[target])
    before, after = relu(1, tensor(0, 4), tensor(2, 4)), relu(2, tensor(0, 2, offset=1), tensor(3, 2))
    again = call(3, "aten::copy_", {"self": tensor(0, 1), "src": tensor(1, 1)}, [], written=[tensor(0, 1)])
    tasks = STAGES.kagent_assemble(ready(write, before, after, again))
    assert tasks[0].reads == (target.range, source.range)
    assert tasks[0].writes == (target.range,)
    assert [one.depends_on for one in tasks] == [(), (0,), (0,), (1,)]  # 2 reads other bytes than 3 writes


def test_draws_keep_their_order():
    draws = [call(n, "aten::bernoulli", {"self": tensor(0, 4)}, [tensor(n + 1, 4)], random=True) for n in range(2)]
    tasks = STAGES.kagent_assemble(ready(*draws, relu(2, tensor(0, 4), tensor(3, 4))))
    assert [one.depends_on for one in tasks] == [(), (0,), ()]
    assert RANDOM_STATE in tasks[0].reads
    assert RANDOM_STATE in tasks[0].writes
    assert RANDOM_STATE not in tasks[2].reads + tasks[2].writes


def test_calls_without_results_keep_their_order():
    checks = [call(n, "aten::_assert_async", {"self": tensor(0, 1)}) for n in range(2)]
    tasks = STAGES.kagent_assemble(ready(*checks))
    assert [one.depends_on for one in tasks] == [(), (0,)]
    assert SIDE_EFFECTS in tasks[0].reads
    assert SIDE_EFFECTS in tasks[0].writes


def test_what_a_group_makes_and_uses_inside_is_only_written():
    first, second, add = chain()
    reads, writes = memory_ranges([first, second, add])
    assert reads == (MemRange(0, 0, 16),)
    assert writes == (MemRange(1, 0, 16), MemRange(2, 0, 16), MemRange(3, 0, 16))


def test_a_range_is_listed_once():
    twice = call(0, "aten::add.Tensor", {"self": tensor(0, 4), "other": tensor(0, 4)}, [tensor(1, 4)])
    assert memory_ranges([twice]) == ((MemRange(0, 0, 16),), (MemRange(1, 0, 16),))


def test_a_strided_tensor_touches_its_elements_only():
    every_other = tensor(0, 3, strides=(2,), offset=1)
    assert memory_ranges([relu(0, every_other, tensor(1, 3))])[0] == (
        MemRange(0, 4, 4),
        MemRange(0, 12, 4),
        MemRange(0, 20, 4),
    )


def test_interleaved_tensors_are_no_hazard():
    fill = [
        call(n, "aten::copy_", {"self": target, "src": tensor(1, 4)}, [], written=[target])
        for n, target in enumerate(tensor(0, 4, strides=(2,), offset=offset) for offset in (0, 1))
    ]
    odds_again = relu(2, tensor(0, 3, strides=(2,), offset=3), tensor(2, 3))
    assert [one.depends_on for one in STAGES.kagent_assemble(ready(*fill, odds_again))] == [(), (), (1,)]


def test_a_group_is_named_after_all_its_calls():
    assert task(0, calls=chain()).name == "op_0+op_1+op_2"
