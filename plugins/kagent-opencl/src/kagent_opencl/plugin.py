"""The plugin: which OpenCL devices there are. Imports pyopencl when they are listed, and torch not even then."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.config import Config
from kagent_core.device import LaunchConfigDeriver
from kagent_core.device_plugin import DevicePlugin
from kagent_core.specs import DeviceInfo


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

    def deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver:
        """Return the standard deriver; a CPU runs the work-items of a block one after the other."""
        from kagent_core.extract.deriver import WARP, StandardDeriver
        from kagent_opencl.platforms import is_cpu

        return StandardDeriver(least_threads=1 if is_cpu(info) else WARP)


plugin = OpenClPlugin()
