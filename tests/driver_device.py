"""A device that compiles kernels, on the emulated accelerator's driver."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.config import Config
from kagent_core.device import Runtime
from kagent_core.device_plugin import DevicePlugin
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig
from kagent_core.testing.emulated import Driver


class DriverLanguage(WorkItemLanguage):
    """The driver's C."""

    kernel_qualifiers = "KERNEL void"
    global_space = ""
    item = "item_number()"
    item_count = "item_count()"


class DriverRuntime(Runtime):
    """What a plugin's author would write around the driver."""

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.driver = Driver(config.cache_dir)

    def allocate(self, nbytes: int) -> int:
        return self.driver.alloc(nbytes)

    def free(self, buffer: int) -> None:
        self.driver.free(buffer)

    def copy_in(self, buffer: int, byte_offset: int, data: memoryview) -> None:
        self.driver.write(buffer + byte_offset, data)

    def copy_out(self, buffer: int, byte_offset: int, data: memoryview) -> None:
        self.driver.read(buffer + byte_offset, data)

    def load(self, kernel: KernelDescriptor) -> Any:
        assert kernel.source is not None
        return self.driver.compile(kernel.source, kernel.name)

    def launch(self, kernel: Any, config: LaunchConfig, args: Sequence[Any]) -> None:
        packed = [
            struct.pack("<Q", arg.buffer + arg.byte_offset) if hasattr(arg, "spec") else bytes(arg.data) for arg in args
        ]
        self.driver.start(kernel, config.threads_per_block * config.grid[0], packed)


class DriverDevice(DevicePlugin):
    """One device, whose blocks have up to 256 threads."""

    device_type = "driver"
    contract_version = 1
    runtime = DriverRuntime
    language = DriverLanguage

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        return [DeviceInfo(Device("driver", 0), "Driver", max_threads_per_block=256)]
