"""What stages decide, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from kagent_core.specs.devices import Device


@dataclass(frozen=True, slots=True)
class Placement:
    """The scheduler's answer for one operator: where it runs and why."""

    device: Device
    reason: str


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Operators that run as one kernel, by their ids.

    Attributes
    ----------
    calls
        Those that are this group's own: every operator is in exactly one group.
    recomputed
        Operators of other groups whose results this kernel computes again for itself rather than read them.
    inner
        Buffers of results that stay inside the kernel: it neither reads nor writes memory for them.
    """

    calls: tuple[int, ...]
    recomputed: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Everything that the kernel computes, in the program's order where something is recomputed."""
        return tuple(sorted(self.calls + self.recomputed)) if self.recomputed else self.calls


@dataclass(frozen=True, slots=True)
class FusionDecision:
    """Why a pair of neighbouring operators did or did not fuse."""

    producer: int
    consumer: int
    fused: bool
    reason: str


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Result of the fusion analysis: every operator is in exactly one group."""

    groups: tuple[FusionGroup, ...] = ()
    decisions: tuple[FusionDecision, ...] = ()
