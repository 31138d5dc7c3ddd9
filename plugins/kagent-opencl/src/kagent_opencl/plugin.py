"""The plugin: which OpenCL devices there are. Imports pyopencl when they are listed, and torch not even then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kagent_core.config import Config
from kagent_core.device import ArgumentPacker, LaunchConfigDeriver
from kagent_core.device_plugin import DevicePlugin
from kagent_core.specs import DeviceInfo, KernelDescriptor


class OpenClPlugin(DevicePlugin):
    """OpenCL, through pyopencl."""

    device_type = "opencl"
    contract_version = 1
    runtime = "kagent_opencl.runtime:OpenClRuntime"
    language = "kagent_opencl.language:OpenClLanguage"

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        """List every device of every platform, with the reason where one cannot be used."""
        from kagent_opencl.platforms import list_devices

        return list_devices()

    def kernels(self, info: DeviceInfo, config: Config) -> Iterable[KernelDescriptor]:
        """Return CLBlast's products, of which tuning decides where they are taken."""
        from kagent_opencl.clblast import clblast_kernels

        return clblast_kernels(info, config)

    def packer(self, info: DeviceInfo, config: Config) -> ArgumentPacker:
        """Return the packer of prototypes, which knows what the device has no type for."""
        from kagent_opencl.packer import OpenClPacker

        return OpenClPacker(dict(info.lacks))

    def deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver:
        """Return the deriver, which tells CPUs from GPUs."""
        from kagent_opencl.deriver import OpenClDeriver

        return OpenClDeriver()


plugin = OpenClPlugin()
