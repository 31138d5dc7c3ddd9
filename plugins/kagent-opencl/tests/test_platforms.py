"""Devices are listed with what they are, or why they cannot be used."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
import pytest

from kagent_opencl import platforms
from kagent_opencl.platforms import device_of, list_devices


def fake_device(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "name": " Toy GPU ",
        "available": True,
        "type": 4,
        "compiler_available": True,
        "endian_little": 1,
        "global_mem_size": 2**30,
        "max_work_group_size": 256,
        "local_mem_size": 2**15,
        "max_parameter_size": 1024,
        "driver_version": "1.0",
        "version": "OpenCL 1.2",
        "max_work_item_sizes": [256, 256, 64],
        "max_compute_units": 10,
        "extensions": "cl_khr_fp64 cl_khr_icd",
        "profile": "FULL_PROFILE",
    }
    return type("Device", (), facts | changes)()


def with_platforms(monkeypatch: pytest.MonkeyPatch, *found: Any) -> None:
    monkeypatch.setattr(cl, "get_platforms", lambda: list(found))


def platform(name: str, *devices: Any) -> Any:
    return SimpleNamespace(name=name, get_devices=lambda: devices)


def test_the_devices_of_this_machine(device: str) -> None:
    [info] = [info for info in list_devices() if str(info.device) == device]
    assert info.reason is None
    assert info.memory_nbytes > 2**20
    assert info.max_threads_per_block >= 1
    assert info.shared_nbytes > 0
    assert info.automatic is not (device_of(info).type == cl.device_type.CPU)
    assert dict(info.details)["version"].startswith("OpenCL")
    assert device_of(info).name.strip() == info.name


def test_devices_are_numbered_over_all_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    with_platforms(
        monkeypatch,
        platform("One", fake_device(available=False), fake_device(compiler_available=False)),
        platform("None"),
        platform("Two", fake_device(endian_little=0), fake_device(profile="EMBEDDED_PROFILE")),
    )
    infos = list_devices()
    assert [str(info.device) for info in infos] == ["opencl:0", "opencl:1", "opencl:2", "opencl:3"]
    assert [info.name for info in infos] == ["Toy GPU"] * 4
    assert [info.reason for info in infos] == [
        "the driver says that it is not available",
        "its driver has no compiler; kagent compiles kernels from source",
        "it is big-endian",
        "it has no 64-bit integers (embedded profile without cles_khr_int64); use another device",
    ]


def test_no_loader_and_no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise cl.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    monkeypatch.setattr(cl, "get_platforms", refuse)
    [info] = list_devices()
    assert info.reason is not None
    assert "PLATFORM_NOT_FOUND_KHR" in info.reason
    assert "apt-get install pocl-opencl-icd" in info.reason


def test_platforms_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_platforms(monkeypatch, platform("Clover"))
    [info] = list_devices()
    assert "no platform has a device (platforms: Clover)" in (info.reason or "")


def test_no_pyopencl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    [info] = list_devices()
    assert "`pip install pyopencl`" in (info.reason or "")


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise cl.RuntimeError("clBuildProgram failed: BUILD_PROGRAM_FAILURE\n\nerror: unknown target CPU 'generic'\n")

    monkeypatch.setattr(cl, "Context", lambda devices: None)
    monkeypatch.setattr(cl.Program, "build", refuse)
    monkeypatch.setattr(cl.Program, "__init__", lambda self, context, source: None)
    with_platforms(monkeypatch, platform("Old PoCL", fake_device()))
    platforms._probed.cache_clear()
    [info] = list_devices()
    platforms._probed.cache_clear()
    assert info.reason == (
        "its compiler fails: error: unknown target CPU 'generic'; update the driver, or choose another device"
    )
