"""What the work-items of an OpenCL work-group do together, by device."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Any

from kagent_core.codegen.groups import SubGroups, WorkGroups

THREADS = 256
"""Work-items of a work-group: a multiple of what any device runs at once, and few enough for registers to suffice."""

SUB_GROUPS, SHUFFLE = "cl_khr_subgroups", "cl_khr_subgroup_shuffle"
"""Extensions."""

_CPU = 2
"""``CL_DEVICE_TYPE_CPU``."""

_PROBE = """{enabled}
__kernel void probe(__global int *x) {{
    int value = x[get_global_id(0)] + get_sub_group_local_id() + get_sub_group_size();
    x[get_global_id(0)] = {taken};
}}
"""


def work_groups_of(device: Any) -> WorkGroups | None:
    """Return what work-items of a device do together; None where they had better not.

    A CPU runs the work-items of a work-group one after the other, so that what they would share is quicker done by one.

    Parameters
    ----------
    device
        A ``pyopencl.Device``.
    """
    if device.type & _CPU or device.local_mem_size <= 0:
        return None
    threads = min(THREADS, 1 << max(int(device.max_work_group_size), 1).bit_length() - 1)
    if threads < 2:
        return None
    return WorkGroups(threads=threads, local_nbytes=int(device.local_mem_size), sub_groups=_sub_groups(device))


def enabled(groups: WorkGroups | None) -> str:
    """Return what a source begins with so that it may use sub-groups."""
    if groups is None or groups.sub_groups is None:
        return ""
    names = [SUB_GROUPS, *([SHUFFLE] if groups.sub_groups.shuffle else [])]
    return "".join(f"#pragma OPENCL EXTENSION {name} : enable\n" for name in names)


@functools.cache
def _sub_groups(device: Any) -> SubGroups | None:
    """Return how sub-groups are spelled on a device, where its compiler takes what its driver says that there is."""
    extensions = device.extensions.split()
    if SUB_GROUPS not in extensions:
        return None
    names = ("add", "min", "max")
    functions = MappingProxyType({name: f"sub_group_reduce_{name}({{value}})" for name in names})
    shuffle = "sub_group_shuffle({value}, {lane})" if SHUFFLE in extensions else ""
    found = SubGroups(shuffle=shuffle, reduces=functions)
    taken = [functions["add"].format(value="value"), *([shuffle.format(value="value", lane="0")] if shuffle else [])]
    source = _PROBE.format(enabled=enabled(WorkGroups(sub_groups=found)), taken=" + ".join(taken))
    return found if _compiles(device, source) else None


def _compiles(device: Any, source: str) -> bool:
    import pyopencl

    try:
        context = pyopencl.Context([device])
        pyopencl.Program(context, source).build(cache_dir=False)  # type: ignore[arg-type]  # what turns its cache off
    except pyopencl.Error:
        return False
    return True
