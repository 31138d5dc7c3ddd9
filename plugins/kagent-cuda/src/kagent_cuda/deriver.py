"""Grids and blocks for NVIDIA GPUs: of a kernel's registers and shared memory, and a table of limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kagent_core.device import LaunchConfigDeriver
from kagent_core.errors import CompilationError
from kagent_core.extract.launch_config import THREADS, blocks_of, standard_launch_config
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, OpCall
from kagent_cuda.compiler import KernelUsage, NvrtcCompiler
from kagent_cuda.devices import capability_of
from kagent_cuda.occupancy import WARP, Multiprocessor, best_block, multiprocessor, resident_blocks

log = get_logger("extract")

WAVES = 32
"""Most blocks of a generated kernel, as a multiple of those that the device runs at once. A block goes on with the
next piece of work in any case: more of them would only be started one after the other; with fewer, those that do one
piece more than others would be waited for."""

UNITS = 1
"""Multiprocessors of a device that does not tell how many it has."""

Usage = Callable[[KernelDescriptor], KernelUsage | None]
"""Says what a kernel takes of a multiprocessor; None where that is not known."""


class CudaDeriver(LaunchConfigDeriver):
    """Blocks of whole warps, as many threads at once as fit, and no more blocks than keep the device busy.

    A generated kernel does its work with any number of blocks. One that is written by hand gets what its operators
    suggest: matrix products a thread for each element in tiles of 16 x 16, reductions a block for each row, the rest a
    thread for each element; in blocks that fit its registers.

    Parameters
    ----------
    usage
        Says what a kernel takes.
    """

    def __init__(self, usage: Usage = lambda kernel: None) -> None:
        self._usage = usage

    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig | None:
        """Return the launch config; None for an empty problem."""
        unit = multiprocessor(capability_of(info))
        usage = self._usage(kernel)
        registers, shared = (usage.registers, usage.shared_nbytes) if usage else (0, 0)
        if kernel.items is None:
            return _handwritten(standard_launch_config(calls, info), unit, registers, shared, info)
        if kernel.threads is not None:
            config = blocks_of(kernel.threads, kernel.items, info)
            return None if config is None else _capped(config, unit, registers, shared, info)
        if kernel.items <= 0:
            return None
        limit = min(info.max_threads_per_block, info.max_block[0])
        most = best_block(unit, registers, shared, limit, THREADS)
        spread = _ceil_div(kernel.items, info.compute_units or UNITS)  # few items: some for each multiprocessor
        threads = max(min(_ceil_div(spread, WARP) * WARP, most), 1)
        config = LaunchConfig((min(_ceil_div(kernel.items, threads), info.max_grid[0]), 1, 1), (threads, 1, 1))
        return _capped(config, unit, registers, shared, info)


def nvrtc_usage(compiler: NvrtcCompiler) -> Usage:
    """Return what finds out by compiling a kernel, which it would be anyway: it is in the compiler's cache then.

    Parameters
    ----------
    compiler
        The device's.
    """
    known: dict[tuple[str, str], KernelUsage | None] = {}

    def usage(kernel: KernelDescriptor) -> KernelUsage | None:
        if kernel.source is None:
            return None
        key = (kernel.name, kernel.source)
        if key not in known:
            try:
                compiled = compiler.compile(kernel.source, kernel.name)
            except CompilationError as error:  # told when the kernel is loaded, with whose it is
                log.debug("what kernel '%s' takes is not known: %s", kernel.name, error)
                return None
            known[key] = compiled.usage.get(compiled.symbol)
        return known[key]

    return usage


def _capped(config: LaunchConfig, unit: Multiprocessor, registers: int, shared: int, info: DeviceInfo) -> LaunchConfig:
    """Return a launch config with no more blocks than `WAVES` times those that the device runs at once."""
    resident = max(resident_blocks(unit, config.threads_per_block, registers, shared), 1)
    most = resident * (info.compute_units or UNITS) * WAVES
    return replace(config, grid=(min(config.grid[0], most), 1, 1))


def _handwritten(
    config: LaunchConfig | None, unit: Multiprocessor, registers: int, shared: int, info: DeviceInfo
) -> LaunchConfig | None:
    """Return a launch config whose blocks have room for their registers.

    Only rows have blocks of more than 256 threads, for which there always is. A row's threads go along it in strides of
    their number, so that half of them do it as well.
    """
    if config is None or config.block[1:] != (1, 1):
        return config  # a tile's size is the kernel's own
    threads = config.block[0]
    while threads > WARP and not resident_blocks(unit, threads, registers, shared + config.shared_nbytes):
        threads = threads // 2
    return replace(config, block=(threads, 1, 1))


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
