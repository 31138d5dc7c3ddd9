"""The plugin: which NVIDIA GPUs there are. Imports cuda-python when they are listed, and torch not even then."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.config import Config
from kagent_core.device import ArgumentPacker, CodeGenerator, LaunchConfigDeriver, Runtime
from kagent_core.device_plugin import DevicePlugin
from kagent_core.hooks import hookimpl
from kagent_core.registry import KernelRegistry
from kagent_core.specs import DeviceInfo


def _open(info: DeviceInfo, config: Config) -> Runtime:
    if info.emulated:
        from kagent_cuda.emulated.runtime import EmulatedRuntime

        return EmulatedRuntime(info, config)
    from kagent_cuda.runtime import CudaRuntime

    return CudaRuntime(info, config)


def _has_torch(info: DeviceInfo) -> bool:
    """Whether torch can use a device itself."""
    from kagent_cuda.torch_cuda import torch_cuda

    return not info.emulated and torch_cuda(info.device.index or 0) is not None


class CudaPlugin(DevicePlugin):
    """CUDA, through cuda-python."""

    device_type = "cuda"
    contract_version = 1
    runtime = staticmethod(_open)
    language = "kagent_cuda.language:CudaLanguage"

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        """List every device, with the reason where one cannot be used; an emulated one where the config wants it."""
        from kagent_cuda.devices import list_devices

        return list_devices(emulate=self.device_type in config.emulate)

    @hookimpl
    def kagent_kernel_registry(self, info: DeviceInfo, config: Config) -> KernelRegistry | None:
        """Give torch's own kernels, where torch has CUDA; else none."""
        if info.device.type != self.device_type:
            return None
        if not _has_torch(info):
            return KernelRegistry(self.device_type)
        from kagent_cuda.library import library_kernel

        return KernelRegistry(self.device_type, resolver=library_kernel)

    @hookimpl
    def kagent_code_printer(self, info: DeviceInfo, config: Config) -> CodeGenerator | None:
        """Give the code generator; what torch has kernels for, these do, unless the config wants none of them."""
        if info.device.type != self.device_type or config.generated_kernels == "off":
            return None
        from kagent_core.codegen.devices import work_item_generator
        from kagent_cuda.language import CudaLanguage
        from kagent_cuda.library import SIGNATURES

        theirs = SIGNATURES if _has_torch(info) and config.generated_kernels != "all" else ()
        return work_item_generator(CudaLanguage.of(info), config, theirs)

    def packer(self, info: DeviceInfo, config: Config) -> ArgumentPacker:
        """Return the packer, which knows how many bytes of parameters a launch can pass."""
        from kagent_cuda.packer import CudaPacker

        return CudaPacker()

    def deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver:
        """Return the deriver, which knows what a compiled kernel takes; of the emulated device, no kernel is."""
        from kagent_cuda.compiler import NvrtcCompiler
        from kagent_cuda.deriver import CudaDeriver, nvrtc_usage
        from kagent_cuda.devices import capability_of

        capability = capability_of(info)
        if capability is None:
            return CudaDeriver()
        return CudaDeriver(nvrtc_usage(NvrtcCompiler(f"sm_{capability[0]}{capability[1]}", config.cache_dir)))


plugin = CudaPlugin()
