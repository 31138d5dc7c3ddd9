"""The NVIDIA GPUs of this machine, numbered as CUDA numbers them, and what keeps one from being used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from kagent_core.specs import Device, DeviceInfo

DEVICE_TYPE = "cuda"

LEAST_CAPABILITY = (7, 5)
"""Compute capability of the oldest devices that NVRTC 13 compiles for."""

LEAST_DRIVER = 12000
"""The oldest driver whose API cuda-core uses, as CUDA numbers its versions."""

MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_REGISTERS = 255
WARP = 32
SHARED_NBYTES = 48 * 1024
PARAMETER_NBYTES = 4096
"""Bytes of parameters that any device takes for one kernel."""

EMULATED_MEMORY = 2**33
EMULATED_UNITS = 2
"""Multiprocessors of the emulated device: its blocks run one after the other, so that many of them help nobody."""


def list_devices(emulate: bool = False) -> list[DeviceInfo]:
    """Return every NVIDIA GPU; where there is none, one that says why.

    Parameters
    ----------
    emulate
        Whether an emulated device is listed too. It takes the first number behind those of devices that work.
    """
    found = _real_devices()
    if not emulate:
        return found
    usable = [info for info in found if info.available]
    missing = next((info.reason for info in found if info.reason), None)
    return [*(found if usable else []), emulated_device(len(found) if usable else 0, missing)]


def emulated_device(index: int, instead_of: str | None = None) -> DeviceInfo:
    """Return the emulated device: the limits that every NVIDIA GPU has.

    Parameters
    ----------
    index
        Its number.
    instead_of
        Why there is no real one.
    """
    from kagent_cuda.emulated.toolchain import why_missing

    return DeviceInfo(
        Device(DEVICE_TYPE, index),
        "NVIDIA GPU (emulated on the host)",
        reason=why_missing(),
        memory_nbytes=EMULATED_MEMORY,
        max_threads_per_block=MAX_THREADS,
        shared_nbytes=SHARED_NBYTES,
        max_parameters=PARAMETER_NBYTES // 8,
        max_registers=MAX_REGISTERS,
        max_grid=MAX_GRID,
        max_block=MAX_BLOCK,
        compute_units=EMULATED_UNITS,
        thread_multiple=WARP,
        emulated=True,
        automatic=False,
        details=(("no GPU", instead_of.split(";")[0]),) if instead_of else (),
    )


def capability_of(info: DeviceInfo) -> tuple[int, int] | None:
    """Return the compute capability of a listed device; None of an emulated one, which has that of no GPU.

    Examples
    --------
    >>> capability_of(DeviceInfo(Device("cuda", 0), "H200", details=(("architecture", "sm_90"),)))
    (9, 0)
    """
    architecture = dict(info.details).get("architecture")
    if architecture is None:
        return None
    number = int(architecture.removeprefix("sm_"))
    return number // 10, number % 10


def _real_devices() -> list[DeviceInfo]:
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        reason, count = _counted(driver)
        if reason is not None:
            return [_missing(reason)]
        core = importlib.import_module("cuda.core")
    except ImportError as error:
        return [_missing(f"cuda-python cannot be imported ({error}); `pip install cuda-core cuda-bindings`")]
    return [_info(core, index, driver) for index in range(count)]


def _counted(driver: Any) -> tuple[str | None, int]:
    """Return why there is no device, or None, and how many there are."""
    try:
        [result] = driver.cuInit(0)
    except RuntimeError:  # cuda-python finds no libcuda
        return "NVIDIA's driver was not found (libcuda); install it, from https://www.nvidia.com/drivers", 0
    success = driver.CUresult.CUDA_SUCCESS
    if result == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return "NVIDIA's driver finds no device; is there a GPU, and does CUDA_VISIBLE_DEVICES hide it?", 0
    if result != success:
        return f"NVIDIA's driver does not start ({_name(result)}); `nvidia-smi` may say more", 0
    result, version = driver.cuDriverGetVersion()
    if result == success and version < LEAST_DRIVER:
        told = (
            f"NVIDIA's driver is for CUDA {spelled_version(version)}, expected {spelled_version(LEAST_DRIVER)} or newer"
        )
        return f"{told}; update it", 0
    result, count = driver.cuDeviceGetCount()
    if result != success or count == 0:
        return "NVIDIA's driver finds no device; is there a GPU, and does CUDA_VISIBLE_DEVICES hide it?", 0
    return None, count


def _missing(reason: str) -> DeviceInfo:
    return DeviceInfo(Device(DEVICE_TYPE, 0), "-", reason=reason)


def _info(core: Any, index: int, driver: Any) -> DeviceInfo:
    name = Device(DEVICE_TYPE, index)
    try:
        device = core.Device(index)
        facts, capability = device.properties, tuple(device.compute_capability)
        total = driver.cuDeviceTotalMem(driver.cuDeviceGet(index)[1])[1]
    except Exception as error:  # noqa: BLE001  a device that is lost must not hide the others
        return DeviceInfo(name, "-", reason=f"its driver does not tell of it: {type(error).__name__}: {error}")
    architecture = f"sm_{capability[0]}{capability[1]}"
    _, version = driver.cuDriverGetVersion()
    return DeviceInfo(
        name,
        device.name,
        reason=_why_not(capability),
        memory_nbytes=int(total),
        max_threads_per_block=facts.max_threads_per_block,
        shared_nbytes=facts.max_shared_memory_per_block,
        max_parameters=PARAMETER_NBYTES // 8,
        max_registers=MAX_REGISTERS,
        max_grid=(facts.max_grid_dim_x, facts.max_grid_dim_y, facts.max_grid_dim_z),
        max_block=(facts.max_block_dim_x, facts.max_block_dim_y, facts.max_block_dim_z),
        compute_units=facts.multiprocessor_count,
        thread_multiple=facts.warp_size,
        details=(
            ("architecture", architecture),
            ("driver", f"CUDA {spelled_version(version)}"),
            *(("note", note) for note in _notes()),
        ),
    )


def _why_not(capability: tuple[int, ...]) -> str | None:
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"its compute capability is {'.'.join(map(str, capability))}, expected {least} or newer"
    return None


def _notes() -> list[str]:
    """Return what a user should know, of a torch that is imported already: listing devices imports none."""
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is not None:
        return []
    return ["this torch was built without CUDA: tensors are copied to the device, and kagent's own kernels run there"]


def spelled_version(version: int) -> str:
    """Return a CUDA version as people write it.

    Examples
    --------
    >>> spelled_version(12080), spelled_version(13000)
    ('12.8', '13.0')
    """
    return f"{version // 1000}.{version % 1000 // 10}"


def _name(result: Any) -> str:
    return str(getattr(result, "name", result))
