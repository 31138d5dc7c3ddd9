"""How many work-items a kernel is launched with: on a CPU otherwise than on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.device import LaunchConfigDeriver
from kagent_core.extract.launch_config import THREADS, blocks_of, elementwise, standard_launch_config
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, OpCall

GROUPS_PER_CORE = 32
"""Work-groups of a generated kernel for each core of a CPU, before groups get more work-items: enough that cores which
finish early find more to do."""

GROUPS_PER_UNIT = 32
"""Most work-groups of a generated kernel for each compute unit of a GPU: more of them would wait for the first ones."""

UNITS = 2
"""Compute units of a device that does not tell how many it has."""

GPU_MULTIPLE = 32
"""Work-items that a GPU runs together, where it does not tell."""


class OpenClDeriver(LaunchConfigDeriver):
    """Work-groups as devices like them, of what their `DeviceInfo` tells.

    A generated kernel does all its work with any number of work-items. On a CPU, whose cores run the work-items of a
    group one after the other, it gets one for each piece of work, in few groups, so that each core has neighbouring
    pieces. On a GPU it gets groups of a multiple of what runs together, and no more groups than keep the device busy.
    A kernel that is written by hand gets what its operators suggest, within the device's limits.
    """

    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig | None:
        """Return the launch config; None for an empty problem."""
        if kernel.items is None:
            return standard_launch_config(calls, info)
        if kernel.threads is not None:
            return blocks_of(kernel.threads, kernel.items, info)
        return on_cpu(kernel.items, info) if info.runs_loops else on_gpu(kernel.items, info)


def on_cpu(items: int, info: DeviceInfo) -> LaunchConfig | None:
    """Return a launch config with a work-item for each piece of work, or None where there is none.

    Examples
    --------
    >>> from kagent_core.specs import Device
    >>> cpu = DeviceInfo(Device("opencl", 0), "CPU", max_threads_per_block=4096, compute_units=2, runs_loops=True)
    >>> print(on_cpu(3, cpu), on_cpu(6400, cpu), sep=", ")
    grid (3, 1, 1) x block (1, 1, 1), grid (64, 1, 1) x block (100, 1, 1)
    """
    groups = GROUPS_PER_CORE * (info.compute_units or UNITS)
    return elementwise(items, info, threads=min(_ceil_div(items, groups), THREADS))


def on_gpu(items: int, info: DeviceInfo) -> LaunchConfig | None:
    """Return a launch config of groups of a multiple of what runs together, or None where there is nothing to do.

    Examples
    --------
    >>> from kagent_core.specs import Device
    >>> gpu = DeviceInfo(
    ...     Device("opencl", 0), "GPU", max_threads_per_block=256, compute_units=4, thread_multiple=64
    ... )
    >>> print(on_gpu(3, gpu), on_gpu(300, gpu), on_gpu(10**6, gpu), sep=", ")
    grid (1, 1, 1) x block (64, 1, 1), grid (3, 1, 1) x block (128, 1, 1), grid (128, 1, 1) x block (256, 1, 1)
    """
    if items <= 0:
        return None
    units = info.compute_units or UNITS
    multiple = info.thread_multiple if info.thread_multiple > 1 else GPU_MULTIPLE
    most = max(min(THREADS, info.max_threads_per_block, info.max_block[0]), 1)
    most -= most % multiple if most > multiple else 0
    threads = min(_ceil_div(_ceil_div(items, units), multiple) * multiple, most)
    groups = min(_ceil_div(items, threads), units * GROUPS_PER_UNIT, info.max_grid[0])
    return LaunchConfig((groups, 1, 1), (threads, 1, 1))


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
