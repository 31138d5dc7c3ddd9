"""Work-groups of one compiled kernel: what its driver says of them, and launch configs that keep to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyopencl as cl

from kagent_core.errors import LaunchConfigError
from kagent_core.specs import LaunchConfig


@dataclass(frozen=True, slots=True)
class WorkGroupLimits:
    """What a driver says of the work-groups of one compiled kernel.

    Attributes
    ----------
    most
        Work-items of a group.
    required
        The size that the kernel's source requires (``reqd_work_group_size``); all 0 where it requires none.
    local_nbytes
        Local memory that the kernel declares itself.
    device_local_nbytes
        What a group can have in all.
    """

    most: int
    required: tuple[int, int, int]
    local_nbytes: int
    device_local_nbytes: int


def work_group_limits(kernel: cl.Kernel, device: cl.Device) -> WorkGroupLimits:
    """Return what the driver says of a kernel."""
    asked = cl.kernel_work_group_info
    required = kernel.get_work_group_info(asked.COMPILE_WORK_GROUP_SIZE, device)
    x, y, z = map(int, required)
    most = int(kernel.get_work_group_info(asked.WORK_GROUP_SIZE, device))
    local = int(kernel.get_work_group_info(asked.LOCAL_MEM_SIZE, device))
    return WorkGroupLimits(most, (x, y, z), local, int(device.local_mem_size))


def fitting(limits: WorkGroupLimits, name: str, generated: bool, config: LaunchConfig) -> LaunchConfig:
    """Return a launch config that a kernel takes: the given one, or for a generated kernel one of smaller groups.

    Parameters
    ----------
    limits
        The kernel's.
    name
        The kernel's, for messages.
    generated
        Whether any number of work-items gives the same result.
    config
        What is to be launched.

    Raises
    ------
    LaunchConfigError
        When the kernel takes no such work-groups, or there is too little local memory for it.
    """
    what = f"kernel '{name}' is launched with work-groups of {config.block}"
    if any(limits.required) and config.block != limits.required:
        raise LaunchConfigError(
            f"{what}, its source requires {limits.required} (reqd_work_group_size)",
            hint=f"force a launch config with block={limits.required}, or take the attribute out of the source",
        )
    local_nbytes = limits.local_nbytes + config.shared_nbytes
    if local_nbytes > limits.device_local_nbytes:
        raise LaunchConfigError(
            f"kernel '{name}' takes {local_nbytes} bytes of local memory, {limits.local_nbytes} of its own and "
            f"{config.shared_nbytes} by its arguments; a work-group can have {limits.device_local_nbytes}",
            hint="derive fewer elements for its local parameters, or declare smaller arrays in its source",
        )
    if config.threads_per_block <= limits.most:
        return config
    if generated and limits.most > 0:  # its loops do everything with any number of work-items
        block = 1 << limits.most.bit_length() - 1
        return LaunchConfig((-(-math.prod(items(config)) // block), 1, 1), (block, 1, 1), config.shared_nbytes)
    raise LaunchConfigError(
        f"{what}, {config.threads_per_block} work-items; as it was compiled it takes {limits.most}",
        hint="force a launch config with a smaller block, or let the kernel use fewer registers",
    )


def items(config: LaunchConfig) -> tuple[int, int, int]:
    """Return the work-items of a launch, in each dimension."""
    (gx, gy, gz), (bx, by, bz) = config.grid, config.block
    return gx * bx, gy * by, gz * bz
