"""The OpenCL devices of this machine, numbered, and what keeps one from being used."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kagent_core.specs import Device, DeviceInfo

DEVICE_TYPE = "opencl"

HOW_TO_GET_A_DRIVER = (
    'install one: `pip install "kagent-opencl[pocl]"` or `apt-get install pocl-opencl-icd` run OpenCL on the CPU; '
    "GPUs need their vendor's driver"
)

_CPU = 2
"""``CL_DEVICE_TYPE_CPU``."""

_FLOAT64 = "float64 (cl_khr_fp64)"

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


def _devices_of(platform: Any) -> list[Any]:
    import pyopencl

    try:
        return list(platform.get_devices())
    except pyopencl.Error:  # a platform without devices
        return []


def _missing(reason: str) -> DeviceInfo:
    return DeviceInfo(Device(DEVICE_TYPE, 0), "-", reason=reason)


def _info(index: int, platform: Any, device: Any) -> DeviceInfo:
    name = Device(DEVICE_TYPE, index)
    reason, multiple = _probed(device)
    lacks = _lacking(name, device)
    x, y, z = device.max_work_item_sizes[:3]
    return DeviceInfo(
        name,
        device.name.strip(),
        reason=reason,
        memory_nbytes=device.global_mem_size,
        max_threads_per_block=device.max_work_group_size,
        shared_nbytes=device.local_mem_size,
        max_parameters=device.max_parameter_size // 8,
        max_block=(x, y, z),
        compute_units=device.max_compute_units,
        thread_multiple=multiple,
        runs_loops=bool(device.type & _CPU),
        lacks=lacks,
        automatic=not device.type & _CPU,  # the CPU has a plugin of its own, which needs no driver
        details=(
            ("platform", f"{platform.name.strip()} {device.driver_version.strip()}"),
            ("driver", device.driver_version.strip()),  # what was measured with another one is not believed
            ("version", device.version),
            *(("lacks", _FLOAT64) for _ in lacks),
        ),
    )


def _lacking(name: Device, device: Any) -> Mapping[str, str]:
    """Return the dtypes that a device cannot compute in. Of halves it needs nothing: they are float32 in kernels."""
    has = "cl_khr_fp64" in device.extensions.split()
    return {} if has else {"float64": f"{name} has no {_FLOAT64}"}


@functools.cache
def _probed(device: Any) -> tuple[str | None, int]:
    """Return why a device cannot be used, or None, and how many work-items it runs together.

    Its compiler is tried once per process.
    """
    if not device.available:
        return "the driver says that it is not available", 1
    if not device.compiler_available:
        return "its driver has no compiler; kagent compiles kernels from source", 1
    if device.endian_little == 0:
        return "it is big-endian", 1
    if device.profile == "EMBEDDED_PROFILE" and "cles_khr_int64" not in device.extensions.split():
        return "it has no 64-bit integers (embedded profile without cles_khr_int64); use another device", 1
    return _compiled_probe(device)


def _compiled_probe(device: Any) -> tuple[str | None, int]:
    import pyopencl as cl

    try:
        program = cl.Program(cl.Context([device]), _PROBE)
        program.build(cache_dir=False)  # type: ignore[arg-type]  # what turns its cache off
        kernel = cl.Kernel(program, "probe")
        multiple = kernel.get_work_group_info(cl.kernel_work_group_info.PREFERRED_WORK_GROUP_SIZE_MULTIPLE, device)
    except cl.Error as error:
        return f"its compiler fails: {_telling_line(error)}; update the driver, or choose another device", 1
    return None, max(int(multiple), 1)


def _telling_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line.lower()), lines[0] if lines else type(error).__name__)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
