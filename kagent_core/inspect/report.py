"""What became of a captured program, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fallback:
    """One operator that does not run on the device that was asked for.

    Attributes
    ----------
    signature
        The operator.
    device
        Where it runs instead.
    reason
        Why.
    """

    signature: str
    device: str
    reason: str


@dataclass(frozen=True)
class PlanReport:
    """One execution plan.

    Attributes
    ----------
    program
        Name of the captured graph.
    device
        The device that was asked for.
    tasks
        Kernel launches per call.
    fallbacks
        Operators that run elsewhere.
    transfers
        Copies between host and device memory per call.
    compactions, compacted_nbytes
        Copies per call that kernels' layouts need, and their bytes.
    arena_nbytes
        Memory for intermediates, in bytes, over all devices.
    build_ms
        Time from the captured graph to the plan, in milliseconds.
    in_place
        Tensors on a torch device that are used and returned where they lie.
    not_recorded
        Why launches are started one by one, where the device would start them as one; one reason for each segment.
    float32_products
        What the config asks for: the type that products of float32 tensors with constant weights are computed in.
    """

    program: str
    device: str
    tasks: int
    fallbacks: tuple[Fallback, ...]
    transfers: int
    compactions: int
    compacted_nbytes: int
    arena_nbytes: int
    build_ms: float
    in_place: int = 0
    not_recorded: tuple[str, ...] = ()
    float32_products: str = "float32"
