"""The plugin: which NVIDIA GPUs there are. Imports cuda-python when they are listed, and torch not even then."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.config import Config
from kagent_core.device import ArgumentPacker, LaunchConfigDeriver, Runtime
from kagent_core.device_plugin import DevicePlugin
from kagent_core.specs import DeviceInfo


def _open(info: DeviceInfo, config: Config) -> Runtime:
    if info.emulated:
        from kagent_cuda.emulated.runtime import EmulatedRuntime

        return EmulatedRuntime(info, config)
    from kagent_cuda.runtime import CudaRuntime

    return CudaRuntime(info, config)


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
