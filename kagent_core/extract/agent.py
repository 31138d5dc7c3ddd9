"""ExtractorAgent: carries a request through its six stages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kagent_core.config import Config
from kagent_core.device import OpenDevice
from kagent_core.errors import PluginError
from kagent_core.extract.context import ExtractionContext, ExtractionRequest, StageRecord, SuggestLaunchConfig
from kagent_core.extract.launch_choice import ForcedLaunchConfig
from kagent_core.extract.queue import TaskQueue
from kagent_core.hooks import Hooks
from kagent_core.inspect.dump import dump_into_directory
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import FusionPlan

log = get_logger("extract")

STAGES = (
    ("kagent_validate", None),
    ("kagent_analyze_fusion", "fusion"),
    ("kagent_lookup_kernels", "kernels"),
    ("kagent_pack_arguments", "packed"),
    ("kagent_derive_launch_configs", "launch_configs"),
    ("kagent_assemble", "tasks"),
)
"""Hook of each stage, and the field of the ExtractionContext that takes its result."""


class ExtractorAgent:
    """Turns placed operators into KernelTasks and only packs: it allocates no device memory and runs nothing.

    Parameters
    ----------
    hooks
        The stages, with the plugins that replace or wrap them.
    config
        The session's config.
    """

    def __init__(self, hooks: Hooks, config: Config) -> None:
        self._hooks = hooks
        self._config = config

    def extract(
        self,
        request: ExtractionRequest,
        opened: OpenDevice,
        queue: TaskQueue,
        suggest: SuggestLaunchConfig | None = None,
        forced: Mapping[str, ForcedLaunchConfig] | None = None,
    ) -> ExtractionContext:
        """Run the stages, submit the tasks to `queue` and return the context.

        Raises
        ------
        KagentError
            What a stage raises: `ValidationError`, `KernelNotFoundError`, `PackingError`, `LaunchConfigError`.
        PluginError
            When what a plugin's stage returned does not fit the request.
        """
        ctx = ExtractionContext(request, opened, self._config, suggest, forced or {})
        try:
            self._run_stages(ctx)
        finally:  # a dump helps most where a stage failed
            if self._config.dump is not None:
                dump_into_directory(ctx, self._config.dump)
        queue.submit(ctx.tasks)
        log.info(
            "%s: %d calls became %d tasks on %s in %.1f ms",
            request.program,
            len(request.calls),
            len(ctx.tasks),
            request.device,
            sum(record.elapsed_ms for record in ctx.records),
        )
        return ctx

    def _run_stages(self, ctx: ExtractionContext) -> None:
        for hook, field in STAGES:
            started = time.perf_counter()
            result = getattr(self._hooks.call, hook)(ctx=ctx)
            if result is None:
                raise PluginError(f"stage {hook} gave no result: a plugin's wrapper returned None in its place")
            if field is not None:
                _check_fits(hook, field, result, ctx)
                setattr(ctx, field, result)
            elapsed = (time.perf_counter() - started) * 1e3
            ctx.records.append(StageRecord(hook.removeprefix("kagent_"), elapsed, _summary(ctx, field, result)))


def _check_fits(hook: str, field: str, result: Any, ctx: ExtractionContext) -> None:
    """A plugin's stage must not lose a call: the program would go on without it."""
    if field == "fusion":
        _check_groups(hook, result, ctx)
    elif field != "tasks" and len(result) != len(ctx.fusion.groups):
        raise PluginError(f"stage {hook} gave {len(result)} results for {len(ctx.fusion.groups)} groups")


def _check_groups(hook: str, plan: FusionPlan, ctx: ExtractionContext) -> None:
    names = {call.id: call.name for call in ctx.request.calls}
    seen: set[int] = set()
    for number in (number for group in plan.groups for number in group.calls):
        if number not in names:
            raise PluginError(f"stage {hook} has {number}, which is none of the request's calls, in a group")
        if number in seen:
            raise PluginError(f"stage {hook} has {names[number]} twice in its groups")
        seen.add(number)
    if len(seen) < len(names):
        missing = ", ".join(name for number, name in names.items() if number not in seen)
        raise PluginError(f"stage {hook} left out {missing}: every call is in exactly one group")


def _summary(ctx: ExtractionContext, field: str | None, result: Any) -> str:
    if field is None:
        return str(result)
    if field == "fusion":
        fused = sum(decision.fused for decision in ctx.fusion.decisions)
        return f"{len(ctx.fusion.groups)} groups, {fused} of {len(ctx.fusion.decisions)} pairs fused"
    told = f"{len(result)} {field.replace('_', ' ')}"
    if field == "launch_configs":
        sources = Counter(choice.source for choice in ctx.launch_choices)
        told += "".join(f", {sources[source]} {source}" for source in ("suggested", "forced") if sources[source])
        for kernel, choice in zip(ctx.kernels, ctx.launch_choices, strict=False):  # no choices where a plugin chose
            if choice.refused:
                told += f"; suggestion refused for {kernel.name}: {choice.refused}"
    return told
