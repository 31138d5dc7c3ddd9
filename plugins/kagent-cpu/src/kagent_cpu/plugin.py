"""The hooks that make the CPU a kagent device. Imports no torch until the device is opened."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kagent_core.config import Config
from kagent_core.hooks import hookimpl
from kagent_core.specs import Device, DeviceInfo

if TYPE_CHECKING:
    from kagent_core.device import ArgumentPacker, CodeGenerator, GraphOptimizer, LaunchConfigDeriver, Runtime
    from kagent_core.registry import KernelRegistry

DEVICE_TYPE = "cpu"
CONTRACT_VERSION = 1


@hookimpl
def kagent_contract_version() -> int:
    """Say which contract this plugin was written for."""
    return CONTRACT_VERSION


@hookimpl
def kagent_devices(config: Config) -> Sequence[DeviceInfo]:
    """List the one CPU device; it is always there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [
        DeviceInfo(
            device=Device(DEVICE_TYPE),
            name=_processor_name(),
            memory_nbytes=_memory_nbytes(),
            max_threads_per_block=1,
            details=(("cores", str(cores)), ("machine", platform.machine())),
        )
    ]


@hookimpl
def kagent_kernel_registry(info: DeviceInfo, config: Config) -> KernelRegistry | None:
    """Give the registry of PyTorch's own kernels."""
    if info.device.type != DEVICE_TYPE:
        return None
    from kagent_cpu.aten import aten_registry

    return aten_registry()


@hookimpl
def kagent_argument_packer(info: DeviceInfo, config: Config) -> ArgumentPacker | None:
    """Give the packer for kernels that take an operator's own arguments."""
    if info.device.type != DEVICE_TYPE:
        return None
    from kagent_cpu.packing import CpuPacker

    return CpuPacker()


@hookimpl
def kagent_launch_config_deriver(info: DeviceInfo, config: Config) -> LaunchConfigDeriver | None:
    """Give the deriver that splits work into chunks over threads."""
    if info.device.type != DEVICE_TYPE:
        return None
    from kagent_cpu.launch import ChunkDeriver

    return ChunkDeriver(config.threads)


@hookimpl
def kagent_runtime(info: DeviceInfo, config: Config) -> Runtime | None:
    """Open the CPU."""
    if info.device.type != DEVICE_TYPE:
        return None
    from kagent_cpu.generate import unit_loader
    from kagent_cpu.runtime import CpuRuntime
    from kagent_cpu.source import SourceLoader

    return CpuRuntime(config.threads, unit_loader(config), SourceLoader(config.cache_dir))


@hookimpl
def kagent_code_printer(info: DeviceInfo, config: Config) -> CodeGenerator | None:
    """Give what makes kernels in C, where there is a C compiler."""
    if info.device.type != DEVICE_TYPE or config.generated_kernels == "off":
        return None
    from kagent_cpu.generate import code_generator

    return code_generator(config)


@hookimpl
def kagent_graph_optimizer(info: DeviceInfo, config: Config) -> GraphOptimizer | None:
    """Give what packs weights for oneDNN, where torch has that and the config does not want generated kernels only."""
    import torch

    if info.device.type != DEVICE_TYPE or config.generated_kernels == "all":
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    from kagent_core.native import find_compiler
    from kagent_cpu.prepacking import Prepacking

    generates = config.generated_kernels != "off" and find_compiler() is not None
    return Prepacking(config.float32_products, generates, config.threads or torch.get_num_threads())


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the portable answer below
    return platform.processor() or platform.machine()


def _memory_nbytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0  # unknown
