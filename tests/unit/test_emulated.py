"""The emulated drivers work, and catch what a plugin does wrong."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from kagent_core.errors import CompilationError
from kagent_core.testing.emulated import GUARD, POISON, Driver, DriverError, Library, Tensor

ADD = """
/* KERNEL void add(never this) { */
KERNEL void add(const float *x, float *y, long n, int times) {
    for (long i = item_number(); i < n; i += item_count()) y[i] += times * x[i];
}
"""


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path, memory_nbytes=4096)


def floats(*values: float) -> memoryview:
    return memoryview(struct.pack(f"<{len(values)}f", *values))


def read(device: Driver | Library, address: int, count: int) -> tuple[float, ...]:
    data = bytearray(4 * count)
    device.read(address, memoryview(data))
    return struct.unpack(f"<{count}f", data)


def pointer(address: int) -> bytes:
    return struct.pack("<Q", address)


@pytest.mark.parametrize("items", [1, 2, 3, 100])
def test_a_kernel_runs_with_any_number_of_items(driver: Driver, items: int) -> None:
    x, y = driver.alloc(12), driver.alloc(12)
    driver.write(x, floats(1, 2, 3))
    driver.write(y, floats(10, 20, 30))
    function = driver.compile(ADD, "add")
    driver.start(function, items, [pointer(x), pointer(y), struct.pack("<q", 3), struct.pack("<i", 2)])
    assert read(driver, y, 3) == (12, 24, 36)


def test_a_kernel_runs_when_somebody_waits(driver: Driver) -> None:
    x = driver.alloc(8)
    driver.write(x, floats(1, 1))
    args = [pointer(x), pointer(x), struct.pack("<q", 2), struct.pack("<i", 1)]
    driver.start(driver.compile(ADD, "add"), 1, args)
    assert struct.unpack("<2f", ctypes.string_at(x, 8)) == (1, 1)
    args.clear()  # the bytes were copied
    driver.wait()
    assert struct.unpack("<2f", ctypes.string_at(x, 8)) == (2, 2)


def test_new_memory_is_poisoned_and_aligned(driver: Driver) -> None:
    address = driver.alloc(5)
    data = bytearray(5)
    driver.read(address, memoryview(data))
    assert data == bytes([POISON]) * 5
    assert address % GUARD == 0


def test_memory_ends(driver: Driver) -> None:
    first = driver.alloc(4000)
    with pytest.raises(MemoryError, match="97 bytes wanted, 96 of 4096 are left"):
        driver.alloc(97)
    driver.free(first)
    assert driver.alloc(4096)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((8, 8, 8), r"takes 4 arguments of \(8, 8, 8, 4\) bytes, 3 of \(8, 8, 8\) bytes came"),
        ((8, 8, 8, 8), r"4 of \(8, 8, 8, 8\) bytes came"),
    ],
)
def test_arguments_have_the_sizes_that_the_kernel_declares(driver: Driver, args: tuple[int, ...], told: str) -> None:
    with pytest.raises(DriverError, match=told):
        driver.start(driver.compile(ADD, "add"), 1, [bytes(size) for size in args])


@pytest.mark.parametrize("place", [2, -1])
def test_a_kernel_that_writes_beside_its_memory_is_named(driver: Driver, place: int) -> None:
    source = f"KERNEL void stray(float *y) {{ y[{place}] = 1; }}"
    y = driver.alloc(8)
    driver.start(driver.compile(source, "stray"), 1, [pointer(y)])
    with pytest.raises(DriverError, match="kernel 'stray' wrote beside an allocation of 8 bytes"):
        driver.wait()


def test_memory_is_not_freed_under_a_kernel(driver: Driver) -> None:
    x, y = driver.alloc(8), driver.alloc(8)
    args = [pointer(x + 4), pointer(y), struct.pack("<q", 1), struct.pack("<i", 1)]
    driver.start(driver.compile(ADD, "add"), 1, args)
    with pytest.raises(DriverError, match="free of memory that kernel 'add' is yet to use"):
        driver.free(x)
    driver.wait()
    driver.free(x)
    with pytest.raises(DriverError, match="not allocated"):
        driver.free(x)


def test_copies_stay_within_an_allocation(driver: Driver) -> None:
    address = driver.alloc(8)
    with pytest.raises(DriverError, match="write of 9 bytes"):
        driver.write(address, memoryview(bytes(9)))
    with pytest.raises(DriverError, match="read of 8 bytes"):
        driver.read(address + 1, memoryview(bytearray(8)))


def test_sources_that_cannot_be_compiled(driver: Driver) -> None:
    with pytest.raises(DriverError, match=r"no kernel 'sub': expected 'KERNEL void sub\(\.\.\.\) \{'"):
        driver.compile(ADD, "sub")
    with pytest.raises(CompilationError, match="undeclared"):
        driver.compile("KERNEL void bad(float *y) { y[0] = nothing; }", "bad")


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "gcc or clang was not found; install a C compiler" in (Driver.missing() or "")


def test_a_librarys_kernels() -> None:
    library = Library(4096)
    x, y, out = (library.alloc(16) for _ in range(3))
    library.write(x, floats(1, -2, 3, -4))
    library.write(y, floats(1, 1, 2, 2))
    a, b, c = (Tensor(address, "float32", (2, 2), (2, 1)) for address in (x, y, out))
    library.add(a, b, c, 10)
    assert read(library, out, 4) == (11, 8, 23, 16)
    library.matmul(a, b, c, alpha=2.0, bias=a, beta=0.5)
    assert read(library, out, 4) == (-5.5, -7, -8.5, -12)
    library.copy(Tensor(x, "float32", (2, 2), (1, 2)), c)
    library.relu(c, c)
    library.multiply(c, 3.0, c)
    assert read(library, out, 4) == (3, 9, 0, 0)


def test_a_library_takes_what_it_has_kernels_for() -> None:
    library = Library(4096)
    x = Tensor(library.alloc(16), "float32", (2, 2), (1, 2))
    with pytest.raises(DriverError, match=r"relu takes contiguous tensors, strides \(1, 2\) came"):
        library.relu(x, x)
    y = Tensor(x.address, "int32", (2, 2), (2, 1))
    with pytest.raises(DriverError, match="add takes float32, int32 came"):
        library.add(y, y, y)
