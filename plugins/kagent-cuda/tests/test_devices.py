"""Devices are listed with what they are, or why they cannot be used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.errors import KagentError
from kagent_cuda.devices import list_devices


class Driver(ModuleType):
    """What the listing asks cuda-bindings for."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NO_DEVICE=100)

    def __init__(self, init: int = 0, version: int = 13000, count: int = 1) -> None:
        super().__init__("cuda.bindings.driver")
        self.answers = {
            "cuInit": (init,),
            "cuDriverGetVersion": (0, version),
            "cuDeviceGetCount": (0, count),
            "cuDeviceGet": (0, 0),
            "cuDeviceTotalMem": (0, 2**34),
        }

    def __getattr__(self, name: str) -> Any:
        answer = self.answers[name]
        return lambda *args: answer


class Core(ModuleType):
    """What it asks cuda-core for."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        super().__init__("cuda.core")
        self.capabilities = capabilities

    def Device(self, index: int) -> Any:
        if index >= len(self.capabilities):
            raise RuntimeError("lost")
        facts = SimpleNamespace(
            max_threads_per_block=1024,
            max_shared_memory_per_block=49152,
            max_block_dim_x=1024,
            max_block_dim_y=1024,
            max_block_dim_z=64,
            max_grid_dim_x=2**31 - 1,
            max_grid_dim_y=65535,
            max_grid_dim_z=65535,
            multiprocessor_count=132,
            warp_size=32,
        )
        return SimpleNamespace(name="Toy GPU", properties=facts, compute_capability=self.capabilities[index])


def with_cuda(monkeypatch: pytest.MonkeyPatch, driver: object, core: object) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setitem(sys.modules, "cuda.core", core)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, Driver(count=3), Core((9, 0), (7, 0)))
    first, second, third = list_devices()
    assert (str(first.device), first.name, first.reason) == ("cuda:0", "Toy GPU", None)
    assert first.memory_nbytes == 2**34
    assert (first.max_threads_per_block, first.max_block, first.compute_units) == (1024, (1024, 1024, 64), 132)
    assert dict(first.details)["architecture"] == "sm_90"
    assert dict(first.details)["driver"] == "CUDA 13.0"
    assert dict(first.details)["note"].startswith("this torch was built without CUDA")
    assert second.reason == "its compute capability is 7.0, expected 7.5 or newer"
    assert "lost" in (third.reason or "")


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(init=100), "finds no device; is there a GPU"),
        (Driver(count=0), "finds no device; is there a GPU"),
        (Driver(init=999), r"does not start \(999\); `nvidia-smi`"),
        (Driver(version=11080), r"is for CUDA 11\.8, expected 12\.0 or newer; update it"),
        (None, "`pip install cuda-core cuda-bindings`"),
    ],
)
def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch, driver: object, reason: str) -> None:
    with_cuda(monkeypatch, driver, Core((9, 0)))
    [info] = list_devices()
    assert not info.available
    assert re.search(reason, info.reason or "")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    def refuse(flags: int) -> None:
        raise RuntimeError('"cuda" is an NVIDIA driver library')

    driver.answers.pop("cuInit")
    driver.cuInit = refuse  # type: ignore[attr-defined]
    with_cuda(monkeypatch, driver, Core())
    [info] = list_devices()
    assert info.reason is not None
    assert "driver was not found" in info.reason


def test_an_emulated_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, Driver(count=1), Core((9, 0)))
    assert [(str(info.device), info.emulated) for info in list_devices(emulate=True)] == [
        ("cuda:0", False),
        ("cuda:1", True),
    ]
    with_cuda(monkeypatch, Driver(count=0), Core())
    [info] = list_devices(emulate=True)
    assert (str(info.device), info.emulated, info.automatic) == ("cuda:0", True, False)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    [info] = [info for info in list_devices(emulate=True) if info.emulated]
    assert "no-such-compiler was not found; install one, such as g++" in (info.reason or "")


def test_the_command_line_names_it(device: str) -> None:
    command = [sys.executable, "-m", "kagent_core.cli", "devices", "--json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    [mine] = [one for one in listed if one["device"] == device]
    assert mine["emulated"]
    assert mine["reason"] is None
    assert mine["plugin"] == "kagent-cuda"


def test_it_is_never_picked_silently(cache_dir: Path) -> None:
    if list_devices()[0].available:
        pytest.skip("there is a real device")
    with pytest.raises(KagentError, match=r"driver was not found|finds no device"):
        kagent_core.run_op("aten::relu", torch.randn(3), device="cuda:0", cache_dir=str(cache_dir))
