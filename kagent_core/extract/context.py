"""What the extractor is asked for, and the state that its stages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kagent_core.config import Config
from kagent_core.device import OpenDevice
from kagent_core.extract.launch_choice import ForcedLaunchConfig, LaunchChoice
from kagent_core.specs import (
    BufferSpec,
    Device,
    FusionPlan,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    OpCall,
    PackedArg,
)

SuggestLaunchConfig = Callable[[KernelDescriptor, Sequence[OpCall]], LaunchConfig | None]
"""Given a kernel and the calls that it computes, the best launch config known, if any."""


@dataclass(frozen=True)
class ExtractionRequest:
    """Operators already placed on one device, handed to the ExtractorAgent.

    Attributes
    ----------
    calls
        In a valid order. Every tensor of theirs refers to `buffers`.
    device
        Where they were placed.
    buffers
        Every buffer of the program, by id.
    first_task_id
        Number of the first task to make, so that ids are unique in a plan.
    program
        Name of the program, for logs and dumps.
    exports
        Buffers that are read after the last of the calls; None when that is not known, and then all of them may be.
    """

    calls: tuple[OpCall, ...]
    device: Device
    buffers: tuple[BufferSpec, ...]
    first_task_id: int = 0
    program: str = "program"
    exports: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What one stage did and how long it took, in milliseconds."""

    stage: str
    elapsed_ms: float
    summary: str


@dataclass
class ExtractionContext:
    """State of one extraction. Each stage reads what the earlier ones left and returns its own part.

    Attributes
    ----------
    request
        What was asked for.
    opened
        The device, with its registry, packer and deriver.
    config
        The session's config.
    suggest
        The ProfilerAgent's table of tuned launch configs.
    forced
        Launch configs that the program forces, beside those in the config, by kernel name or signature.
    fusion
        Result of the fusion analysis.
    kernels
        One per fusion group.
    packed
        Packed arguments, one tuple per group.
    launch_configs
        One per group; None where there is nothing to launch.
    launch_choices
        One per group: where its launch config came from. Empty where a plugin chose the launch configs.
    tasks
        The result.
    records
        One per stage that has run.
    scratch
        For stages to leave things for later stages of the same plugin.
    """

    request: ExtractionRequest
    opened: OpenDevice
    config: Config
    suggest: SuggestLaunchConfig | None = None
    forced: Mapping[str, ForcedLaunchConfig] = field(default_factory=dict)
    fusion: FusionPlan = field(default_factory=FusionPlan)
    kernels: Sequence[KernelDescriptor] = ()
    packed: Sequence[tuple[PackedArg, ...]] = ()
    launch_configs: Sequence[LaunchConfig | None] = ()
    launch_choices: Sequence[LaunchChoice] = ()
    tasks: Sequence[KernelTask] = ()
    records: list[StageRecord] = field(default_factory=list)
    scratch: dict[str, Any] = field(default_factory=dict)

    def group_calls(self) -> list[tuple[OpCall, ...]]:
        """The calls that the kernel of each fusion group computes, in order."""
        by_id = {call.id: call for call in self.request.calls}
        return [tuple(by_id[number] for number in group.members) for group in self.fusion.groups]
