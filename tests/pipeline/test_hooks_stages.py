"""Plugins that replace, wrap or decline the agents' stages, or fail in them."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import kagent_core
from kagent_core import hookimpl
from kagent_core.errors import PluginError
from kagent_core.extract.stages import DefaultStages
from kagent_core.schedule.stages import DefaultPlacement
from kagent_core.specs import (
    Device,
    FusionDecision,
    FusionGroup,
    FusionPlan,
    KernelDescriptor,
    LaunchConfig,
    Placement,
)

from .traced import CPU, FAKE, compiled, same

STAGES = {
    "kagent_place": "request",
    "kagent_validate": "ctx",
    "kagent_analyze_fusion": "ctx",
    "kagent_lookup_kernels": "ctx",
    "kagent_pack_arguments": "ctx",
    "kagent_derive_launch_configs": "ctx",
    "kagent_assemble": "ctx",
}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def implement(hook, function, *, wrapper=False):
    """A plugin that implements one stage."""
    parameter = STAGES[hook]
    if wrapper:
        if parameter == "ctx":
            implementation = lambda ctx: (yield from function(ctx))
        else:
            implementation = lambda request: (yield from function(request))
    elif parameter == "ctx":
        implementation = lambda ctx: function(ctx)
    else:
        implementation = lambda request: function(request)
    plugin = type("Plugin", (), {})()
    setattr(plugin, hook, hookimpl(implementation, wrapper=wrapper))
    return plugin


class Watch:
    """Wraps every stage, and keeps what it was given and what came."""

    def __init__(self):
        self.seen = []

    def _wrap(self, hook, given):
        result = yield
        self.seen.append((hook, given, result))
        return result

    @hookimpl(wrapper=True)
    def kagent_place(self, request):
        return (yield from self._wrap("kagent_place", request))

    @hookimpl(wrapper=True)
    def kagent_validate(self, ctx):
        return (yield from self._wrap("kagent_validate", ctx))

    @hookimpl(wrapper=True)
    def kagent_analyze_fusion(self, ctx):
        return (yield from self._wrap("kagent_analyze_fusion", ctx))

    @hookimpl(wrapper=True)
    def kagent_lookup_kernels(self, ctx):
        return (yield from self._wrap("kagent_lookup_kernels", ctx))

    @hookimpl(wrapper=True)
    def kagent_pack_arguments(self, ctx):
        return (yield from self._wrap("kagent_pack_arguments", ctx))

    @hookimpl(wrapper=True)
    def kagent_derive_launch_configs(self, ctx):
        return (yield from self._wrap("kagent_derive_launch_configs", ctx))

    @hookimpl(wrapper=True)
    def kagent_assemble(self, ctx):
        return (yield from self._wrap("kagent_assemble", ctx))

    def hooks(self):
        return [hook for hook, _, _ in self.seen]

    def result(self, hook):
        (found,) = (result for seen, _, result in self.seen if seen == hook)
        return found

    def context(self):
        return self.seen[-1][1]


def function(x):
    return torch.relu(x) + x * 2.0


X = torch.tensor([-1.0, 2.0, 3.0])


# -- when stages are called


def test_every_stage_is_called_once_per_request_in_order(fake):
    watch = Watch()
    with kagent_core.use_plugin(watch):
        same(compiled(function, **FAKE)(X), function(X))
    assert watch.hooks() == list(STAGES)


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_no_hook_is_called_in_a_replay(fake, device):
    watch = Watch()
    with kagent_core.use_plugin(watch):
        run = compiled(function, **device)
        run(X)
        built = list(watch.hooks())
        assert built
        for scale in range(5):
            same(run(X * scale), function(X * scale))
        assert watch.hooks() == built


def test_a_stage_is_called_once_per_segment(fake):
    watch = Watch()
    with kagent_core.use_plugin(watch):
        compiled(lambda x: torch.relu(torch.sin(torch.relu(x))), **FAKE)(X)
    assert watch.hooks().count("kagent_place") == 1
    assert [str(ctx.request.device) for hook, ctx, _ in watch.seen if hook == "kagent_assemble"] == [
        "fake:0",
        "cpu",
        "fake:0",
    ]


def test_the_context_has_a_record_per_stage(fake):
    watch = Watch()
    with kagent_core.use_plugin(watch):
        compiled(function, **FAKE)(X)
    records = watch.context().records
    assert [record.stage for record in records] == [hook.removeprefix("kagent_") for hook in list(STAGES)[1:]]
    assert records[0].summary == "3 calls are consistent"
    assert records[1].summary == "3 groups, 0 of 2 pairs fused"
    assert [record.summary for record in records[2:]] == ["3 kernels", "3 packed", "3 launch configs", "3 tasks"]
    assert all(record.elapsed_ms >= 0 for record in records)


# -- replacing a stage


def replaced(hook, stage, function=function):
    """Run a function with one stage replaced; return what it gave, and what a watcher saw."""
    watch = Watch()
    with kagent_core.use_plugin(implement(hook, stage)), kagent_core.use_plugin(watch):
        return compiled(function, **FAKE)(X), watch


def test_place(fake):
    everything_on_cpu = lambda request: [Placement(Device("cpu"), "mine")] * len(request.program.calls)
    got, watch = replaced("kagent_place", everything_on_cpu)
    same(got, function(X))
    assert fake.runtime.launches == []
    assert str(watch.context().request.device) == "cpu"


def test_validate(fake):
    got, watch = replaced("kagent_validate", lambda ctx: "looked at by mine")
    same(got, function(X))
    assert watch.context().records[0].summary == "looked at by mine"


def test_analyze_fusion(fake):
    def backwards_where_free(ctx):
        relu, times, add = (call.id for call in ctx.request.calls)
        return FusionPlan(
            (FusionGroup((times,)), FusionGroup((relu,)), FusionGroup((add,))),
            (FusionDecision(relu, add, False, "mine"),),
        )

    got, watch = replaced("kagent_analyze_fusion", backwards_where_free)
    same(got, function(X))
    assert fake.runtime.launches == ["fake__mul", "fake__relu", "fake__add"]
    assert watch.context().fusion.decisions[0].reason == "mine"


def test_a_group_of_several_calls_is_one_task(fake):
    """A plugin with a fused kernel replaces three stages: the group, its kernel and its arguments."""

    def relu_plus_double(x, out):
        torch.add(x.clamp(min=0), x, alpha=2, out=out)

    class Fused:
        @hookimpl
        def kagent_analyze_fusion(self, ctx):
            return FusionPlan((FusionGroup(tuple(call.id for call in ctx.request.calls)),))

        @hookimpl
        def kagent_lookup_kernels(self, ctx):
            return [KernelDescriptor("mine::fused", "relu_plus_double", relu_plus_double)]

        @hookimpl
        def kagent_pack_arguments(self, ctx):
            first, _, last = ctx.request.calls
            packer = ctx.opened.packer
            return [(packer.pack(first, ctx.kernels[0])[0], packer.pack(last, ctx.kernels[0])[-1])]

    watch = Watch()
    with kagent_core.use_plugin(Fused()), kagent_core.use_plugin(watch):
        run = compiled(function, **FAKE)
        for scale in (1, -2):
            same(run(X * scale), function(X * scale))
    assert fake.runtime.launches == ["relu_plus_double"] * 2
    (task,) = watch.context().tasks
    assert task.name == "relu+mul+add"


def test_lookup_kernels(fake):
    def tripled(x, y, out):
        torch.mul(x, 3.0, out=out)

    mine = KernelDescriptor("aten::mul.Tensor", "tripled", tripled)

    def stage(ctx):
        found = DefaultStages().kagent_lookup_kernels(ctx)
        return [mine if kernel.signature == mine.signature else kernel for kernel in found]

    got, _ = replaced("kagent_lookup_kernels", stage)
    same(got, torch.relu(X) + X * 3.0)
    assert "tripled" in fake.runtime.launches


def test_pack_arguments(fake):
    def other_factor(ctx):
        return [
            tuple(replace(arg, value=5.0) if arg.value == 2.0 else arg for arg in args)
            for args in DefaultStages().kagent_pack_arguments(ctx)
        ]

    got, _ = replaced("kagent_pack_arguments", other_factor)
    same(got, torch.relu(X) + X * 5.0)


def test_derive_launch_configs(fake):
    seven = LaunchConfig(block=(7, 1, 1))
    got, watch = replaced("kagent_derive_launch_configs", lambda ctx: [seven for _ in ctx.fusion.groups])
    same(got, function(X))
    assert [task.config for task in watch.context().tasks] == [seven] * 3


def test_assemble(fake):
    def reversed_priorities(ctx):
        tasks = DefaultStages().kagent_assemble(ctx)
        return [replace(task, priority=task.id) for task in tasks]

    got, _ = replaced("kagent_assemble", reversed_priorities)
    same(got, function(X))
    assert fake.runtime.launches == ["fake__mul", "fake__relu", "fake__add"]


@pytest.mark.parametrize("hook", STAGES)
def test_only_the_replacement_is_called(fake, hook, monkeypatch):
    default = DefaultPlacement if hook == "kagent_place" else DefaultStages
    original, calls = getattr(default, hook), []
    in_its_place = {
        "request": lambda self, request: calls.append("default"),
        "ctx": lambda self, ctx: calls.append("default"),
    }
    monkeypatch.setattr(default, hook, hookimpl(in_its_place[STAGES[hook]], trylast=True))

    def stage(given):
        calls.append("mine")
        return original(default(), given)

    same(replaced(hook, stage)[0], function(X))
    assert calls == ["mine"]


@pytest.mark.parametrize("hook", STAGES)
def test_none_declines(fake, hook):
    asked = []
    got, watch = replaced(hook, lambda given: asked.append(given))
    same(got, function(X))
    assert len(asked) == 1
    assert watch.result(hook) is not None
    assert watch.hooks() == list(STAGES)


def test_the_plugin_registered_last_is_asked_first(fake):
    first, second = (implement("kagent_validate", lambda ctx, name=name: name) for name in ("first", "second"))
    watch = Watch()
    with kagent_core.use_plugin(first), kagent_core.use_plugin(second), kagent_core.use_plugin(watch):
        compiled(function, **FAKE)(X)
    assert watch.result("kagent_validate") == "second"


# -- wrapping a stage


def test_a_wrapper_changes_the_result(fake):
    def with_a_note(ctx):
        return f"{(yield)}, and I looked, too"

    watch = Watch()
    with kagent_core.use_plugin(implement("kagent_validate", with_a_note, wrapper=True)), kagent_core.use_plugin(watch):
        compiled(function, **FAKE)(X)
    assert watch.context().records[0].summary == "3 calls are consistent, and I looked, too"


def run_with(plugin):
    torch._dynamo.reset()  # what Dynamo has of the function was compiled with other plugins
    with kagent_core.use_plugin(plugin):
        return compiled(function, **FAKE)(X)


@pytest.mark.parametrize("hook", [hook for hook in STAGES if hook != "kagent_place"])
def test_a_wrapper_that_loses_the_result_is_named(fake, hook):
    def loses(ctx):
        yield

    with pytest.raises(PluginError, match=f"stage {hook} gave no result"):
        run_with(implement(hook, loses, wrapper=True))
    assert fake.runtime.live == 0


def test_a_placement_that_is_lost_or_incomplete_is_an_error(fake):
    def loses(request):
        yield

    with pytest.raises(PluginError, match="the placement stage returned none placements for 3 calls"):
        run_with(implement("kagent_place", loses, wrapper=True))
    with pytest.raises(PluginError, match="the placement stage returned 1 placements for 3 calls"):
        run_with(implement("kagent_place", lambda request: [Placement(Device("cpu"), "")]))


# -- results that do not fit


@pytest.mark.parametrize("hook", ["kagent_lookup_kernels", "kagent_pack_arguments", "kagent_derive_launch_configs"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_stage_gives_one_result_per_group(fake, hook, change):
    def stage(ctx):
        found = list(getattr(DefaultStages(), hook)(ctx))
        return found[:change] if change < 0 else [*found, found[0]]

    with pytest.raises(PluginError, match=f"stage {hook} gave {3 + change} results for 3 groups"):
        run_with(implement(hook, stage))
    assert fake.runtime.live == 0


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (((0,), (1,)), "left out add"),
        (((0,), (1,), (2,), (0,)), "has relu twice"),
        (((0, 1), (1, 2)), "has mul twice"),
        (((0,), (1,), (2,), (7,)), "has 7, which is none of the request's calls"),
    ],
)
def test_every_call_is_in_exactly_one_group(fake, groups, told):
    plan = FusionPlan(tuple(FusionGroup(group) for group in groups))
    with pytest.raises(PluginError, match=f"stage kagent_analyze_fusion {told}"):
        run_with(implement("kagent_analyze_fusion", lambda ctx: plan))


# -- plugins that fail


@pytest.mark.parametrize("hook", STAGES)
def test_what_a_stage_raises_reaches_the_caller_and_the_next_call_works(fake, hook):
    broken = [True]

    def stage(given):
        if broken:
            raise ZeroDivisionError(f"{hook} is broken")

    with kagent_core.use_plugin(implement(hook, stage)):
        run = compiled(function, **FAKE)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match=f"{hook} is broken"):
                run(X)
            assert fake.runtime.live == 0
        broken.clear()
        same(run(X), function(X))


def test_outside_of_its_block_a_plugin_is_gone(fake):
    def stage(ctx):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_with(implement("kagent_validate", stage))
    torch._dynamo.reset()
    same(compiled(function, **FAKE)(X), function(X))


def test_debug_tells_signatures_kernels_and_packed_arguments(caplog):
    with caplog.at_level(logging.DEBUG, logger="kagent"):
        kagent_core.run_op("aten::mm", torch.ones(2, 3), torch.ones(3, 2), device="cpu")
    assert "looked up aten::mm on cpu, found 'aten::mm.out'" in caplog.text
    assert "packed self=f32[2, 3], mat2=f32[3, 2], out=f32[2, 2]" in caplog.text
