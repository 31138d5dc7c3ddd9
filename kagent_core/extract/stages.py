"""The core's own defaults of the extractor's stages. They are a plugin like any other, and run last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kagent_core.device import CONTRACT_VERSION
from kagent_core.errors import LaunchConfigError, ValidationError
from kagent_core.extract.context import ExtractionContext
from kagent_core.extract.fusion import FusionChecker
from kagent_core.extract.hazards import RANDOM_STATE, SIDE_EFFECTS, HazardTracker, TransitiveReduction
from kagent_core.hooks import hookimpl
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import (
    DeviceInfo,
    FusionPlan,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    MemRange,
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
        return FusionChecker(ctx.config).analyze(ctx.request.calls, ctx.opened)

    @hookimpl(trylast=True)
    def kagent_lookup_kernels(self, ctx: ExtractionContext) -> list[KernelDescriptor]:
        """Find each group's kernel by exact signature."""
        debug = log.isEnabledFor(10)
        kernels: list[KernelDescriptor] = []
        for calls in ctx.group_calls():
            kernel = ctx.opened.registry.find(calls[0])
            if debug:
                log.debug("%s: looked up %s on %s, found '%s'", calls[0].name, calls[0].signature, ctx.request.device, kernel.name)
            kernels.append(kernel)
        return kernels

    @hookimpl(trylast=True)
    def kagent_pack_arguments(self, ctx: ExtractionContext) -> list[tuple[PackedArg, ...]]:
        """Ask the device's packer."""
        debug = log.isEnabledFor(10)
        packed: list[tuple[PackedArg, ...]] = []
        for calls, kernel in zip(ctx.group_calls(), ctx.kernels, strict=True):
            args = ctx.opened.packer.pack(calls[0], kernel)
            if debug:
                log.debug("%s: packed %s", calls[0].name, ", ".join(f"{a.name}={_short(a.value)}" for a in args))
            packed.append(args)
        return packed

    @hookimpl(trylast=True)
    def kagent_derive_launch_configs(self, ctx: ExtractionContext) -> list[LaunchConfig | None]:
        """Take the tuned launch config where there is one, else ask the device's deriver."""
        configs: list[LaunchConfig | None] = []
        for calls, kernel in zip(ctx.group_calls(), ctx.kernels, strict=True):
            suggested = ctx.suggest(kernel, calls) if ctx.suggest is not None else None
            derived = suggested or ctx.opened.deriver.derive(calls, kernel, ctx.opened.info)
            if derived is not None:
                _check_limits(derived, kernel, ctx.opened.info)
            configs.append(derived)
        return configs

    @hookimpl(trylast=True)
    def kagent_assemble(self, ctx: ExtractionContext) -> list[KernelTask]:
        """Put the pieces of each group together and find its dependencies."""
        hazards, reduction = HazardTracker(), TransitiveReduction()
        tasks: list[KernelTask] = []
        parts = zip(ctx.group_calls(), ctx.kernels, ctx.packed, ctx.launch_configs, strict=True)
        for number, (calls, kernel, args, config) in enumerate(parts, ctx.request.first_task_id):
            reads, writes = memory_ranges(calls)
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


def memory_ranges(calls: Sequence[OpCall]) -> tuple[tuple[MemRange, ...], tuple[MemRange, ...]]:
    """Return the ranges that a group reads and writes. What it makes and uses inside itself is only written."""
    reads: dict[MemRange, None] = {}
    writes: dict[MemRange, None] = {}
    for call in calls:
        for spec in call.inputs:
            span = spec.range
            if span not in writes:
                reads.setdefault(span)
        for spec in call.outputs:
            writes.setdefault(spec.range)
        if call.random:
            reads.setdefault(RANDOM_STATE)
            writes.setdefault(RANDOM_STATE)
        if not call.outputs:
            reads.setdefault(SIDE_EFFECTS)
            writes.setdefault(SIDE_EFFECTS)
    return tuple(reads), tuple(writes)


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


def _check_limits(config: LaunchConfig, kernel: KernelDescriptor, info: DeviceInfo) -> None:
    if min(*config.grid, *config.block) < 1:
        raise LaunchConfigError(f"kernel '{kernel.name}' got the launch config {config}: every extent must be at least 1")
    if config.threads_per_block > info.max_threads_per_block:
        raise LaunchConfigError(
            f"kernel '{kernel.name}' got the launch config {config}: {config.threads_per_block} threads per block, "
            f"{info.device} takes {info.max_threads_per_block}"
        )
    if info.shared_nbytes and config.shared_nbytes > info.shared_nbytes:
        raise LaunchConfigError(
            f"kernel '{kernel.name}' got the launch config {config}: {info.device} has {info.shared_nbytes} bytes of "
            "shared memory per block"
        )


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_short(item) for item in value)}]"
    return str(value)
