"""Devices: how users name them, and what their plugins tell of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    max_block
        Most threads of one block in x, y and z.
    compute_units
        Multiprocessors or cores, each of which runs blocks of its own; 0 when unknown.
    thread_multiple
        Threads that run together (a warp, a wavefront), of which a block should have a multiple.
    runs_loops
        Whether a block's threads run one after the other, as a loop of a processor's.
    lacks
        Dtypes that its kernels cannot compute in, each with the reason; can be given as a mapping.
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
    max_block: tuple[int, int, int] = (2**31 - 1, 2**31 - 1, 2**31 - 1)
    compute_units: int = 0
    thread_multiple: int = 1
    runs_loops: bool = False
    lacks: tuple[tuple[str, str], ...] | Mapping[str, str] = ()
    emulated: bool = False
    automatic: bool = True
    plugin: str = ""
    details: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        pairs = self.lacks.items() if isinstance(self.lacks, Mapping) else self.lacks
        object.__setattr__(self, "lacks", tuple(pairs))  # frozen, and so hashable

    @property
    def available(self) -> bool:
        """Whether the device can be opened on this machine."""
        return self.reason is None
