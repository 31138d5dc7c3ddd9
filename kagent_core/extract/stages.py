"""The core's own defaults of the extractor's stages. They are a plugin like any other, and run last."""

from __future__ import annotations

from typing import Any

from kagent_core.device import CONTRACT_VERSION
from kagent_core.errors import ValidationError
from kagent_core.extract.context import ExtractionContext
from kagent_core.extract.fused_call import fused_call
from kagent_core.extract.fusion import FusionChecker
from kagent_core.extract.fusion.lookup import look_up_kernels
from kagent_core.extract.hazards import HazardTracker, TransitiveReduction
from kagent_core.extract.launch_choice import ForcedLaunchConfig, LaunchChoice, choose_launch_config, with_local_memory
from kagent_core.extract.ranges import memory_ranges
from kagent_core.hooks import hookimpl
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import (
    FusionPlan,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    OpCall,
    PackedArg,
    TensorSpec,
)

log = get_logger("extract")


class DefaultStages:
    """Validate, analyze fusion, look up kernels, pack arguments, derive launch configs, assemble."""

    @hookimpl
    def kagent_contract_version(self) -> int:
        """The core's stages are always of the core's version."""
        return CONTRACT_VERSION

    @hookimpl(trylast=True)
    def kagent_validate(self, ctx: ExtractionContext) -> str:
        """Check device, buffers and specs of every call."""
        request, opened = ctx.request, ctx.opened
        if request.device != opened.device:
            raise ValidationError(f"calls placed on {request.device} reached the extractor of {opened.device}")
        for call in request.calls:
            for spec in (*call.inputs, *call.outputs):
                _check_spec(call, spec, ctx)
        return f"{len(request.calls)} calls are consistent"

    @hookimpl(trylast=True)
    def kagent_analyze_fusion(self, ctx: ExtractionContext) -> FusionPlan:
        """Ask the FusionChecker."""
        plan = FusionChecker(ctx.config).analyze(ctx.request.calls, ctx.opened, ctx.request.exports)
        if log.isEnabledFor(10):
            names = {call.id: call.name for call in ctx.request.calls}
            for decision in plan.decisions:
                verb = "fused" if decision.fused else "not fused"
                log.debug("%s, %s: %s: %s", names[decision.producer], names[decision.consumer], verb, decision.reason)
        return plan

    @hookimpl(trylast=True)
    def kagent_lookup_kernels(self, ctx: ExtractionContext) -> list[KernelDescriptor]:
        """Find each group's kernel by exact signature. A group that there is none for falls apart."""
        preferred = ctx.config.generated_kernels != "off"
        ctx.fusion, kernels = look_up_kernels(ctx.fusion, ctx.request.calls, ctx.opened, preferred)
        if log.isEnabledFor(10):
            for calls, kernel in zip(ctx.group_calls(), kernels, strict=True):
                names, signatures = "+".join(c.name for c in calls), "+".join(c.signature for c in calls)
                log.debug("%s: looked up %s on %s, found '%s'", names, signatures, ctx.request.device, kernel.name)
        return kernels

    @hookimpl(trylast=True)
    def kagent_pack_arguments(self, ctx: ExtractionContext) -> list[tuple[PackedArg, ...]]:
        """Ask the device's packer."""
        debug = log.isEnabledFor(10)
        packed: list[tuple[PackedArg, ...]] = []
        for group, calls, kernel in zip(ctx.fusion.groups, ctx.group_calls(), ctx.kernels, strict=True):
            call = calls[0] if len(calls) == 1 else fused_call(calls, group.inner)
            if kernel.packed is not None:
                args = kernel.packed
            elif len(calls) == 1:
                args = ctx.opened.packer.pack(call, kernel)
            else:
                args = ctx.opened.packer.pack_group(calls, call, kernel)
            if debug:
                log.debug("%s: packed %s", call.name, ", ".join(f"{a.name}={_short(a.value)}" for a in args))
            packed.append(args)
        return packed

    @hookimpl(trylast=True)
    def kagent_derive_launch_configs(self, ctx: ExtractionContext) -> list[LaunchConfig | None]:
        """Take what the user forces, or what was tuned, or else what the device derives."""
        named = {name: ForcedLaunchConfig(name, config) for name, config in ctx.config.launch_configs.items()}
        forced = {**named, **ctx.forced}
        choices: list[LaunchChoice] = []
        for calls, kernel, args in zip(ctx.group_calls(), ctx.kernels, ctx.packed, strict=True):
            suggested = ctx.suggest(kernel, calls) if ctx.suggest is not None else None
            choice = choose_launch_config(calls, kernel, ctx.opened.info, ctx.opened.deriver, suggested, forced)
            choices.append(with_local_memory(choice, args, kernel, ctx.opened.info))
        ctx.launch_choices = choices
        return [choice.config for choice in choices]

    @hookimpl(trylast=True)
    def kagent_assemble(self, ctx: ExtractionContext) -> list[KernelTask]:
        """Put the pieces of each group together and find its dependencies."""
        hazards, reduction = HazardTracker(), TransitiveReduction()
        tasks: list[KernelTask] = []
        parts = zip(ctx.fusion.groups, ctx.group_calls(), ctx.kernels, ctx.packed, ctx.launch_configs, strict=True)
        for number, (group, calls, kernel, args, config) in enumerate(parts, ctx.request.first_task_id):
            reads, writes = memory_ranges(calls, group.inner)
            tasks.append(
                KernelTask(
                    id=number,
                    kernel=kernel,
                    args=args,
                    reads=reads,
                    writes=writes,
                    config=config,
                    device=ctx.request.device,
                    priority=0,
                    depends_on=reduction.reduce(number, hazards.add(number, reads, writes)),
                    calls=calls,
                )
            )
        return tasks


def _check_spec(call: OpCall, spec: TensorSpec, ctx: ExtractionContext) -> None:
    if len(spec.shape) != len(spec.strides):
        raise ValidationError(
            f"{call.name} ({call.signature}) has a tensor with {len(spec.shape)} sizes and {len(spec.strides)} strides"
        )
    buffer = ctx.request.buffers[spec.buffer]
    home = ctx.request.device
    if buffer.device != home and not (buffer.device is None and ctx.opened.runtime.host_memory):
        where = buffer.device or "host memory"
        raise ValidationError(f"{call.name} ({call.signature}) is placed on {home}, but reads {spec} in {where}")
    span = spec.range
    if span.nbytes and (span.offset < 0 or span.end > buffer.nbytes):
        raise ValidationError(
            f"{call.name} ({call.signature}) touches bytes {span.offset} to {span.end} of a buffer of {buffer.nbytes}: "
            f"{spec} with strides {spec.strides} and offset {spec.storage_offset}"
        )


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_short(item) for item in value)}]"
    return str(value)
