"""A device whose kernels are written as for a GPU, run by PoCL: its blocks' threads share memory and wait at barriers.

Its devices are those of `kagent_opencl`, under the type ``gpulike``. What a GPU would do at once, PoCL does one after
the other, with all that a barrier promises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import kagent_core
from kagent_core.codegen.groups import SubGroups, WorkGroups
from kagent_core.config import Config
from kagent_core.device import LaunchConfigDeriver
from kagent_core.extract.deriver import StandardDeriver
from kagent_core.specs import Device, DeviceInfo
from kagent_opencl.language import OpenClLanguage
from kagent_opencl.platforms import list_devices
from kagent_opencl.plugin import OpenClPlugin

DEVICE_TYPE = "gpulike"

LANES = 16
"""Threads of an imitated sub-group."""

_SHUFFLE = """
#define SHUFFLED(value, lane) ({ \\
    __typeof__((value) + 0) shuffled; \\
    __local __typeof__((value) + 0) *exchanged = (__local __typeof__((value) + 0) *)exchange; \\
    exchanged[get_local_id(0)] = (value); \\
    barrier(CLK_LOCAL_MEM_FENCE); \\
    shuffled = exchanged[get_local_id(0) / LANES * LANES + (lane)]; \\
    barrier(CLK_LOCAL_MEM_FENCE); \\
    shuffled; })
#define REDUCED(value, taken) ({ \\
    __typeof__((value) + 0) reduced; \\
    __local __typeof__((value) + 0) *exchanged = (__local __typeof__((value) + 0) *)exchange; \\
    exchanged[get_local_id(0)] = (value); \\
    barrier(CLK_LOCAL_MEM_FENCE); \\
    reduced = exchanged[get_local_id(0) / LANES * LANES]; \\
    for (int other = 1; other < LANES; other++) { \\
        __typeof__((value) + 0) next_one = exchanged[get_local_id(0) / LANES * LANES + other]; \\
        reduced = taken; \\
    } \\
    barrier(CLK_LOCAL_MEM_FENCE); \\
    reduced; })
"""

SHUFFLES = SubGroups(LANES, str(LANES), f"(i32)(get_local_id(0) % {LANES})", "SHUFFLED({value}, {lane})")
"""Sub-groups whose size is known when a kernel is written."""

UNKNOWN_SHUFFLES = replace(SHUFFLES, lanes=None)
"""Sub-groups whose size is known when a kernel runs."""

FUNCTIONS = replace(
    UNKNOWN_SHUFFLES,
    shuffle="",
    reduces={
        "add": "REDUCED({value}, reduced + next_one)",
        "max": "REDUCED({value}, max(reduced, next_one))",
        "min": "REDUCED({value}, min(reduced, next_one))",
    },
)
"""Sub-groups with nothing but functions that reduce."""


class GpuLikeLanguage(OpenClLanguage):
    """OpenCL C as for a GPU."""

    work_groups = WorkGroups(threads=64)
    """What its blocks do together."""

    narrow_indices = True

    @classmethod
    def of(cls, info: DeviceInfo) -> Self:
        """Return the language, whatever PoCL says of itself."""
        language = cls()
        language.groups = cls.work_groups
        if cls.work_groups.sub_groups is not None:
            language.prelude += f"#define LANES {LANES}\n{_SHUFFLE}"
        return language

    def thread(self) -> str:
        """Declare what imitated sub-groups exchange values through."""
        assert self.groups is not None
        exchange = f"__local long exchange[{self.groups.threads}]; " if self.groups.sub_groups is not None else ""
        return exchange + super().thread()


class GpuLikePlugin(OpenClPlugin):
    """PoCL, taken for a GPU.

    Parameters
    ----------
    groups
        What its blocks do together.
    spelled
        Attributes of its language that are not those of `GpuLikeLanguage`.
    """

    device_type = DEVICE_TYPE

    def __init__(self, groups: WorkGroups | None = None, **spelled: Any) -> None:
        if groups is not None:
            spelled["work_groups"] = groups
        self.language = type("GpuLikeLanguage", (GpuLikeLanguage,), spelled)  # type: ignore[assignment]

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        """List the OpenCL devices under another type."""
        return [replace(info, device=Device(DEVICE_TYPE, info.device.index)) for info in list_devices()]

    def deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver:
        """Return the standard deriver."""
        return StandardDeriver()


@contextmanager
def gpu_like(groups: WorkGroups | None = None, **spelled: Any) -> Iterator[str]:
    """Use such a device, whose name this gives, inside the ``with`` block."""
    with kagent_core.use_plugin(GpuLikePlugin(groups, **spelled)):
        yield f"{DEVICE_TYPE}:0"
