"""The calls of cuda-python that the runtime makes, on a stand-in for it: there need be no GPU."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kagent_core.config import load_config
from kagent_core.device import PointerArg, ScalarArg
from kagent_core.errors import LaunchConfigError, PackingError
from kagent_core.prototype import parse_prototype
from kagent_core.specs import Access, Device, DeviceInfo, DType, KernelDescriptor, LaunchConfig, LocalMemory, TensorSpec
from kagent_cuda.runtime import CudaError, CudaRuntime

SOURCE = 'extern "C" __global__ void fill(char small, float *out, long long n) { if (n) out[0] = small; }'
PROTOTYPE = "void fill(int8_t small, float *out, int64_t n)"


class FakeBuffer:
    def __init__(self, nbytes: int) -> None:
        self.memory = (ctypes.c_ubyte * nbytes)()
        self.handle = ctypes.addressof(self.memory)
        self.closed: Any = None

    def close(self, stream: Any) -> None:
        self.closed = stream


class FakeCuda:
    """Device memory is host memory; launches are noted, with what the driver would have read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]] | None) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.current: list[Any] = []
        self.synchronized = 0
        self.result = 0
        self.attributes: list[tuple[Any, ...]] = []
        self.places = places
        stream = SimpleNamespace(handle="stream", sync=self._sync)
        properties = SimpleNamespace(max_shared_memory_per_block_optin=232448)
        device = SimpleNamespace(
            set_current=lambda: None,
            create_stream=lambda: stream,
            compute_capability=(9, 0),
            allocate=self._allocate,
            properties=properties,
        )
        core, driver = ModuleType("cuda.core"), ModuleType("cuda.bindings.driver")
        core.Device = lambda index: device  # type: ignore[attr-defined]
        core.ObjectCode = SimpleNamespace(from_cubin=self._from_cubin)  # type: ignore[attr-defined]
        functions = {
            "CUresult": SimpleNamespace(CUDA_SUCCESS=0),
            "CUfunction": lambda number: f"function {number}",
            "CUfunction_attribute": SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
            "cuCtxGetCurrent": lambda: (0, "context"),
            "cuCtxSetCurrent": self._set_current,
            "cuMemcpyHtoDAsync": lambda to, host, nbytes, stream: self._copy(to, host, nbytes),
            "cuMemcpyDtoHAsync": lambda host, where, nbytes, stream: self._copy(host, where, nbytes),
            "cuLaunchKernel": self._launch,
            "cuFuncSetAttribute": self._set_attribute,
            "cuGetErrorString": lambda result: (0, b"invalid argument"),
        }
        for name, function in functions.items():
            setattr(driver, name, function)
        monkeypatch.setitem(sys.modules, "cuda.core", core)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)

    def _set_current(self, context: Any) -> tuple[int]:
        self.current.append(context)
        return (0,)

    def _set_attribute(self, *args: Any) -> tuple[int]:
        self.attributes.append(args)
        return (0,)

    def _sync(self) -> None:
        self.synchronized += 1

    def _allocate(self, nbytes: int, *, stream: Any) -> FakeBuffer:
        if nbytes > 2**30:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return FakeBuffer(nbytes)

    def _from_cubin(self, binary: bytes, name: str) -> Any:
        assert binary.startswith(b"\x7fELF")
        kernel = SimpleNamespace(handle=42)
        if self.places is not None:
            kernel.arguments_info = [SimpleNamespace(offset=place[0], size=place[1]) for place in self.places]
        return SimpleNamespace(get_kernel=lambda symbol: kernel if self.places is not None else _Untold())

    def _copy(self, to: int, source: int, nbytes: int) -> tuple[int]:
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def _launch(self, function: Any, *args: Any) -> tuple[int]:
        *shape, stream, parameters, extra = args
        assert (stream, extra) == ("stream", 0)
        pointers = (ctypes.c_void_p * 3).from_address(parameters)
        read = [ctypes.string_at(place, size) for place, size in zip(pointers, (1, 8, 8), strict=True)]
        self.launches.append((function, tuple(shape), read))
        return (self.result,)


class _Untold:
    handle = 42

    @property
    def arguments_info(self) -> Any:
        raise NotImplementedError("needs a driver of CUDA 12.4")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch, [(0, 1), (8, 8), (16, 8)])


def opened(tmp_path: Path) -> CudaRuntime:
    return CudaRuntime(DeviceInfo(Device("cuda", 0), "Toy GPU"), load_config({"cache_dir": str(tmp_path)}))


def scalar(kind: str, data: bytes) -> ScalarArg:
    return ScalarArg(kind, memoryview(data), 0, bytes)


def descriptor(prototype: str = PROTOTYPE) -> KernelDescriptor:
    return KernelDescriptor("aten::fill", "fill", source=SOURCE, parameters=parse_prototype(prototype))


def arguments(buffer: FakeBuffer, byte_offset: int = 0) -> list[Any]:
    spec = TensorSpec(DType("float32", 4), (4,), (1,), 0, 0)
    out = PointerArg(buffer, byte_offset, spec, Access.OUT)
    return [
        scalar("int8_t", b"\x07"),
        out,
        LocalMemory("local float*", 64),
        scalar("int64_t", (5).to_bytes(8, "little")),
    ]


def test_copies(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    buffer = runtime.allocate(32)
    host = torch.arange(4.0)
    runtime.copy_in(buffer, 8, host.numpy().data.cast("B"))
    assert fake.synchronized == 1  # the host may reuse its memory
    back = bytearray(16)
    runtime.copy_out(buffer, 8, memoryview(back))
    assert bytes(back) == host.numpy().tobytes()
    assert fake.synchronized == 2
    runtime.copy_in(buffer, 0, memoryview(b""))
    runtime.free(buffer)
    assert buffer.closed is runtime.stream
    with pytest.raises(MemoryError, match="gave no 2147483648 bytes"):
        runtime.allocate(2**31)


def test_a_launch_reads_what_was_packed(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    assert kernel.function == "function 42"
    assert kernel.usage is not None
    assert kernel.usage.registers > 0
    buffer = runtime.allocate(64)
    config = LaunchConfig((3, 2, 1), (64, 1, 1), 64)
    start = runtime.prepare(kernel, config, arguments(buffer, 16))
    start()
    runtime.launch(kernel, config, arguments(buffer, 16))
    address = (buffer.handle + 16).to_bytes(8, "little")
    expected = ("function 42", (3, 2, 1, 64, 1, 1, 64), [b"\x07", address, (5).to_bytes(8, "little")])
    assert fake.launches == [expected, expected]
    assert fake.current[-1] == "context"


def test_a_launch_that_the_driver_refuses(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    fake.result = 1
    with pytest.raises(CudaError, match="1: invalid argument"):
        runtime.launch(kernel, LaunchConfig(), arguments(runtime.allocate(64)))


def test_parameters_are_held_against_the_compiled_kernel(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    with pytest.raises(
        PackingError, match=r"'small' .* declared as int32_t, 4 bytes, but parameter 0 was compiled with 1"
    ):
        runtime.load(descriptor(PROTOTYPE.replace("int8_t", "int32_t")))
    fake.places = [(0, 1), (4, 8), (12, 8)]
    kernel = runtime.load(descriptor())
    with pytest.raises(
        PackingError, match=r"parameter 1 .* packed with 8 bytes at offset 8, expected 8 bytes at offset 4"
    ):
        runtime.launch(kernel, LaunchConfig(), arguments(runtime.allocate(64)))


def test_a_driver_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeCuda(monkeypatch, None)
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    assert kernel.places is None
    runtime.launch(kernel, LaunchConfig(), arguments(runtime.allocate(64)))
    assert len(fake.launches) == 1


def test_much_shared_memory_is_asked_for(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    args = arguments(runtime.allocate(64))
    runtime.launch(kernel, LaunchConfig(shared_nbytes=49152), args)
    assert fake.attributes == []
    runtime.launch(kernel, LaunchConfig(shared_nbytes=65536), args)
    assert fake.attributes == [("function 42", 8, 65536)]
    with pytest.raises(
        LaunchConfigError, match="wants 1048576 bytes of dynamic shared memory, 'Toy GPU' gives a block 232448"
    ):
        runtime.launch(kernel, LaunchConfig(shared_nbytes=2**20), args)
