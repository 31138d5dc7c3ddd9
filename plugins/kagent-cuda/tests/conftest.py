"""The emulated device: it needs a C++ compiler, which `make test` wants anyway."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kagent_core.specs import LaunchConfig
from kagent_cuda.devices import emulated_device, list_devices
from kagent_cuda.emulated.kernels import Machine
from kagent_cuda.emulated.launches import Region, run_kernel
from kagent_cuda.emulated.memory import Allocation, Memory
from tests.seeding import random_numbers_of_its_own

__all__ = ["random_numbers_of_its_own"]


class Emulator:
    """Kernels on raw parameters, as a driver takes them."""

    def __init__(self, cache_dir: Path) -> None:
        self.machine = Machine(cache_dir)
        self.memory = Memory(2**30)
        self.info = emulated_device(0)

    def floats(self, values: Sequence[float]) -> Allocation:
        """Return device memory with some float32."""
        allocation = self.memory.allocate(4 * len(values))
        self.memory.write(allocation, 0, memoryview(struct.pack(f"<{len(values)}f", *values)))
        return allocation

    def empty(self, nbytes: int) -> Allocation:
        """Return poisoned device memory."""
        return self.memory.allocate(nbytes)

    def read(self, allocation: Allocation, code: str = "f") -> list[float]:
        """Return what device memory holds."""
        data = bytearray(allocation.nbytes)
        self.memory.read(allocation, 0, memoryview(data))
        return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))

    def run(
        self,
        source: str,
        *args: Allocation | ctypes._SimpleCData[Any] | bytes,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        shared: int = 0,
        regions: Sequence[Region] | None = None,
    ) -> None:
        """Run the kernel `k` of a source."""
        kernel = self.machine.compile(source, "k")
        config = LaunchConfig(grid, block, shared)
        run_kernel(self.machine, self.memory, self.info, kernel, config, packed(*args), regions)


def packed(*args: object) -> bytes:
    """Return a parameter block: pointers and numbers, each aligned to its size."""
    data = bytearray()
    for arg in args:
        value = struct.pack("<Q", arg.address) if isinstance(arg, Allocation) else bytes(arg)  # type: ignore[call-overload]
        data += bytes(-len(data) % len(value)) + value
    return bytes(data)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def emulator(cache_dir: Path) -> Emulator:
    return Emulator(cache_dir)


@pytest.fixture
def device(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the emulated device, which the environment asks for."""
    monkeypatch.setenv("KAGENT_EMULATE", "cuda")
    monkeypatch.setenv("KAGENT_CACHE_DIR", str(cache_dir))
    [info] = [info for info in list_devices(emulate=True) if info.emulated]
    return str(info.device)
