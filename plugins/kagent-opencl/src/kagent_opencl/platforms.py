"""The OpenCL devices of this machine, numbered, and what keeps one from being used."""

from __future__ import annotations

import functools
from typing import Any

from kagent_core.specs import Device, DeviceInfo

DEVICE_TYPE = "opencl"

HOW_TO_GET_A_DRIVER = (
    'install one: `pip install "kagent-opencl[pocl]"` or `apt-get install pocl-opencl-icd` run OpenCL on the CPU; '
    "GPUs need their vendor's driver"
)

_CPU = 2
"""``CL_DEVICE_TYPE_CPU``."""

_PROBE = "__kernel void probe(__global int *x) { x[get_global_id(0)] = 42; }"


def list_devices() -> list[DeviceInfo]:
    """Return every OpenCL device; where there is none, one that says why."""
    try:
        import pyopencl
    except ImportError as error:
        return [_missing(f"pyopencl cannot be imported ({error}); `pip install pyopencl`")]
    try:
        platforms = pyopencl.get_platforms()
    except pyopencl.Error as error:
        return [_missing(f"no OpenCL platform was found ({_first_line(error)}); {HOW_TO_GET_A_DRIVER}")]
    found = [(platform, device) for platform in platforms for device in _devices_of(platform)]
    if not found:
        names = ", ".join(platform.name for platform in platforms) or "none"
        return [_missing(f"no platform has a device (platforms: {names}); {HOW_TO_GET_A_DRIVER}")]
    return [_info(index, platform, device) for index, (platform, device) in enumerate(found)]


def device_of(info: DeviceInfo) -> Any:
    """Return the ``pyopencl.Device`` that an info tells of."""
    import pyopencl

    devices = [device for platform in pyopencl.get_platforms() for device in _devices_of(platform)]
    return devices[info.device.index or 0]


def is_cpu(info: DeviceInfo) -> bool:
    """Whether a device is the CPU itself."""
    return bool(device_of(info).type & _CPU)


def _devices_of(platform: Any) -> list[Any]:
    import pyopencl

    try:
        return list(platform.get_devices())
    except pyopencl.Error:  # a platform without devices
        return []


def _missing(reason: str) -> DeviceInfo:
    return DeviceInfo(Device(DEVICE_TYPE, 0), "-", reason=reason)


def _info(index: int, platform: Any, device: Any) -> DeviceInfo:
    return DeviceInfo(
        Device(DEVICE_TYPE, index),
        device.name.strip(),
        reason=_why_not(device),
        memory_nbytes=device.global_mem_size,
        max_threads_per_block=device.max_work_group_size,
        shared_nbytes=device.local_mem_size,
        max_parameters=device.max_parameter_size // 8,
        automatic=not device.type & _CPU,  # the CPU has a plugin of its own, which needs no driver
        details=(("platform", f"{platform.name.strip()} {device.driver_version.strip()}"), ("version", device.version)),
    )


@functools.cache
def _why_not(device: Any) -> str | None:
    """Return why a device cannot be used: its compiler is tried once per process."""
    import pyopencl

    if not device.available:
        return "the driver says that it is not available"
    if not device.compiler_available:
        return "its driver has no compiler; kagent compiles kernels from source"
    if device.endian_little == 0:
        return "it is big-endian"
    try:
        context = pyopencl.Context([device])
        pyopencl.Program(context, _PROBE).build(cache_dir=False)  # type: ignore[arg-type]  # what turns its cache off
    except pyopencl.Error as error:
        return f"its compiler fails: {_telling_line(error)}; update the driver, or choose another device"
    return None


def _telling_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line.lower()), lines[0] if lines else type(error).__name__)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
