"""The launch-config deriver for a device that has no wishes of its own."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.device import LaunchConfigDeriver
from kagent_core.extract.launch_config import THREADS, blocks_of, elementwise, standard_launch_config
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, OpCall

WARP = 32
"""Threads that most GPUs run together: fewer in a block would leave some of them idle."""

BLOCKS = 64
"""Blocks that a generated kernel gets, if it has so many pieces of work, before its blocks get more threads."""


class StandardDeriver(LaunchConfigDeriver):
    """What operators suggest, within the device's limits.

    A generated kernel gets a work-item for each of its independent pieces of work; or a block, where the threads of a
    block share each piece. For one that is written by hand,
    matrix products get a block per tile, reductions a block per row, and the rest a thread per element.

    Parameters
    ----------
    least_threads
        Fewest threads of a block that are worth while, where a generated kernel has few pieces of work: 1 on a device
        that runs a block's work-items one after the other, as OpenCL on a CPU does.
    """

    def __init__(self, least_threads: int = WARP) -> None:
        self._least_threads = least_threads

    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig | None:
        """Return the launch config; None for an empty problem."""
        if kernel.threads is not None and kernel.items is not None:
            return blocks_of(kernel.threads, kernel.items, info)
        if kernel.items is not None:
            threads = min(max(-(-kernel.items // BLOCKS), self._least_threads), THREADS)
            return elementwise(kernel.items, info, threads=threads)
        return standard_launch_config(calls, info)
