"""How the CPU splits a kernel's work: chunks of elements over threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kagent_core.device import LaunchConfigDeriver
from kagent_core.extract.launch_config import elementwise
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, OpCall
from kagent_cpu.source import is_source

GRAIN = 32768
"""Elements below which ATen does not split work (``at::internal::GRAIN_SIZE``)."""


class ChunkDeriver(LaunchConfigDeriver):
    """One block per chunk, one thread per block: as many chunks as threads have `GRAIN` elements to do.

    A kernel of C text that somebody wrote is called once, whatever it has to do: one block.

    Parameters
    ----------
    threads
        Most threads; None for what torch is set to.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig:
        """Return the launch config. Never None: ATen's kernels take empty tensors, and may have work to do."""
        if is_source(kernel):
            return LaunchConfig()
        specs = [spec for call in calls for spec in (*call.inputs, *call.outputs)]
        elements = max((spec.numel for spec in specs), default=0)
        threads = self._threads or torch.get_num_threads()
        config = elementwise(max(elements, 1), info, threads=1, elements_per_thread=GRAIN, max_blocks=threads)
        assert config is not None, "there is at least one element"
        return config
