"""The launch-config deriver for a device that has no wishes of its own."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.device import LaunchConfigDeriver
from kagent_core.extract.launch_config import elementwise, standard_launch_config
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, OpCall


class StandardDeriver(LaunchConfigDeriver):
    """What operators suggest, within the device's limits.

    A generated kernel gets a work-item for each of its independent pieces of work. For one that is written by hand,
    matrix products get a block per tile, reductions a block per row, and the rest a thread per element.
    """

    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig | None:
        """Return the launch config; None for an empty problem."""
        if kernel.items is not None:
            return elementwise(kernel.items, info)
        return standard_launch_config(calls, info)
