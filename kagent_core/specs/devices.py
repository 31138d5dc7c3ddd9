"""Devices: how users name them, and what their plugins tell of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kagent_core.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Device:
    """A place where kernels run: ``cuda:0``, ``opencl:1``, or ``cpu`` for a type that has one device only.

    Examples
    --------
    >>> Device.parse("opencl:1")
    Device(type='opencl', index=1)
    >>> str(Device("cpu"))
    'cpu'
    """

    type: str
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read ``type`` or ``type:index``; anything else is a `DeviceError`."""
        match = re.fullmatch(r"([a-z][a-z0-9_]*)(?::(\d+))?", text)
        if match is None:
            raise DeviceError(
                f"'{text}' is not a device name",
                hint="write the device's type, or type:index, such as 'cpu' or 'opencl:0'",
            )
        return cls(match[1], None if match[2] is None else int(match[2]))

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a plugin tells about one of its devices, whether or not it can be used here.

    Attributes
    ----------
    device
        How users name it.
    name
        The hardware's own name.
    reason
        None when the device can be opened, else why not and what would help.
    memory_nbytes
        Memory that kernels can use, in bytes; 0 when unknown.
    max_threads_per_block
        Most threads (work-items) in one block (work-group).
    shared_nbytes
        Shared (local) memory that one block can have, in bytes.
    max_parameters
        Most parameters that one kernel can take.
    max_registers
        32-bit registers that one thread can have; 0 when unknown.
    max_grid
        Most blocks of one launch in x, y and z.
    emulated
        True when no such hardware is involved.
    automatic
        Whether ``device = "auto"`` may choose it. An emulated device is never chosen so.
    plugin
        The distribution that brings the device; filled in by the core.
    details
        Anything else worth printing, such as a driver's version.
    """

    device: Device
    name: str
    reason: str | None = None
    memory_nbytes: int = 0
    max_threads_per_block: int = 1
    shared_nbytes: int = 0
    max_parameters: int = 128
    max_registers: int = 0
    max_grid: tuple[int, int, int] = (2**31 - 1, 2**31 - 1, 2**31 - 1)
    emulated: bool = False
    automatic: bool = True
    plugin: str = ""
    details: tuple[tuple[str, str], ...] = ()

    @property
    def available(self) -> bool:
        """Whether the device can be opened on this machine."""
        return self.reason is None
