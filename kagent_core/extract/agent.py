"""ExtractorAgent: carries a request through its six stages."""

from __future__ import annotations

import time
from typing import Any

from kagent_core.config import Config
from kagent_core.device import OpenDevice
from kagent_core.errors import PluginError
from kagent_core.extract.context import ExtractionContext, ExtractionRequest, StageRecord, SuggestLaunchConfig
from kagent_core.extract.queue import TaskQueue
from kagent_core.hooks import Hooks
from kagent_core.inspect.logs import get_logger

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
    ) -> ExtractionContext:
        """Run the stages, submit the tasks to `queue` and return the context.

        Raises
        ------
        KagentError
            What a stage raises: `ValidationError`, `KernelNotFoundError`, `PackingError`, `LaunchConfigError`.
        """
        ctx = ExtractionContext(request, opened, self._config, suggest)
        for hook, field in STAGES:
            started = time.perf_counter()
            result = getattr(self._hooks.call, hook)(ctx=ctx)
            if result is None:
                raise PluginError(f"stage {hook} gave no result: a plugin's wrapper returned None in its place")
            if field is not None:
                setattr(ctx, field, result)
            elapsed = (time.perf_counter() - started) * 1e3
            ctx.records.append(StageRecord(hook.removeprefix("kagent_"), elapsed, _summary(ctx, field, result)))
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


def _summary(ctx: ExtractionContext, field: str | None, result: Any) -> str:
    if field is None:
        return str(result)
    if field == "fusion":
        fused = sum(decision.fused for decision in ctx.fusion.decisions)
        return f"{len(ctx.fusion.groups)} groups, {fused} of {len(ctx.fusion.decisions)} pairs fused"
    return f"{len(result)} {field.replace('_', ' ')}"
