"""What the scheduler is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kagent_core.config import Config
from kagent_core.specs import Device, OpCall, Program

HasKernel = Callable[[Device, OpCall], bool]
Refusals = Callable[[Device, OpCall], list[str]]
Timing = Callable[[Device, OpCall], float | None]


@dataclass(frozen=True)
class PlacementRequest:
    """A program to place.

    Attributes
    ----------
    program
        Its operators and buffers.
    target
        The device that the config asks for.
    fallback
        The device for what the target cannot do.
    config
        The session's config.
    has_kernel
        Whether a device has a kernel that takes the call.
    refusals
        Why the kernels that a device has for the call's signature do not take it, one text per kernel.
    timing
        Measured time of the call on a device, in milliseconds; None when it was never measured.
    named
        From a device's name in the config to the device, opened.
    """

    program: Program
    target: Device
    fallback: Device
    config: Config
    has_kernel: HasKernel
    refusals: Refusals
    timing: Timing
    named: Callable[[str], Device]
