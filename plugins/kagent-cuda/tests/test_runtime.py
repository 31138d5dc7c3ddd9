"""The calls of cuda-python that the runtime makes, on a stand-in for it: there need be no GPU."""

from __future__ import annotations

import ctypes
import itertools
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda.bindings.nvrtc  # it imports the driver's module, which the stand-in takes the place of
import pytest
import torch

from kagent_core.config import load_config
from kagent_core.device import Launch, PointerArg, ScalarArg
from kagent_core.errors import LaunchConfigError, PackingError
from kagent_core.prototype import parse_prototype
from kagent_core.specs import Access, Device, DeviceInfo, DType, KernelDescriptor, LaunchConfig, LocalMemory, TensorSpec
from kagent_cuda.plugin import CudaPlugin
from kagent_cuda.runtime import CudaError, CudaRuntime
from kagent_cuda.streams import Streams
from kagent_cuda.torch_cuda import torch_cuda

assert cuda.bindings.nvrtc

SOURCE = 'extern "C" __global__ void fill(char small, float *out, long long n) { if (n) out[0] = small; }'
PROTOTYPE = "void fill(int8_t small, float *out, int64_t n)"


class FakeBuffer:
    def __init__(self, nbytes: int) -> None:
        self.memory = (ctypes.c_ubyte * nbytes)()
        self.handle = ctypes.addressof(self.memory)
        self.closed: Any = None

    def close(self, stream: Any) -> None:
        self.closed = stream


class FakeStream:
    """Notes what it is told, in the order of all streams."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda = cuda
        self.handle = number

    def sync(self) -> None:
        self.cuda.synchronized += 1
        self.cuda.log.append(("sync", self.handle))

    def record(self, event: Any = None) -> Any:
        event = event or SimpleNamespace(number=next(self.cuda.numbers))
        self.cuda.log.append(("record", self.handle, event.number))
        return event

    def wait(self, event: Any) -> None:
        self.cuda.log.append(("wait", self.handle, event.number))


class FakeGraph:
    """A graph and what was made of it."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda = cuda
        self.handle = number
        self.nodes: list[tuple[Any, ...]] = []
        self.edges: list[list[int]] = []
        self.closed = False

    def add(self, after: list[int], count: int, node: Any) -> tuple[int, int]:
        assert count == len(after)
        self.nodes.append(_seen(node))
        self.edges.append(after)
        return 0, len(self.nodes) - 1

    def set(self, node: int, parameters: Any) -> tuple[int]:
        self.nodes[node] = _seen(parameters)
        return (0,)

    def instantiate(self) -> FakeGraph:
        return self

    def upload(self, stream: FakeStream) -> None:
        self.cuda.log.append(("upload", stream.handle))

    def launch(self, stream: FakeStream) -> None:
        self.cuda.log.append(("graph", stream.handle))

    def close(self) -> None:
        self.closed = True


def _seen(node: Any) -> tuple[Any, ...]:
    """What a driver reads of a node when it is given it."""
    grid = (node.gridDimX, node.gridDimY, node.gridDimZ)
    block = (node.blockDimX, node.blockDimY, node.blockDimZ)
    return node.func, (*grid, *block, node.sharedMemBytes), read_parameters(node.kernelParams)


def read_parameters(address: int) -> list[bytes]:
    pointers = (ctypes.c_void_p * 3).from_address(address)
    return [ctypes.string_at(place, size) for place, size in zip(pointers, (1, 8, 8), strict=True)]


class FakeCuda:
    """Device memory is host memory; launches are noted, with what the driver would have read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]] | None) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.current: list[Any] = []
        self.synchronized = 0
        self.numbers = itertools.count()
        self.streams: list[FakeStream] = []
        self.pinned: Any = (ctypes.c_ubyte * 1)()
        self.copied_from: list[int | None] = []
        self.result = 0
        self.attributes: list[tuple[Any, ...]] = []
        self.places = places
        self.log: list[tuple[Any, ...]] = []
        self.graphs: list[FakeGraph] = []
        properties = SimpleNamespace(max_shared_memory_per_block_optin=232448)
        device = SimpleNamespace(
            set_current=lambda: None,
            create_stream=self._create_stream,
            compute_capability=(9, 0),
            allocate=self._allocate,
            properties=properties,
        )
        core, driver = ModuleType("cuda.core"), ModuleType("cuda.bindings.driver")
        core.Device = lambda index: device  # type: ignore[attr-defined]
        core.ObjectCode = SimpleNamespace(from_cubin=self._from_cubin)  # type: ignore[attr-defined]
        functions = {
            "CUresult": SimpleNamespace(CUDA_SUCCESS=0),
            "CUkernel": lambda number: number,
            "cuKernelGetFunction": lambda number: (0, f"function {number}"),
            "CUgraph": lambda number: self.graphs[number],
            "CUgraphExec": lambda number: self.graphs[number],
            "CUDA_KERNEL_NODE_PARAMS": lambda: SimpleNamespace(),
            "cuGraphAddKernelNode": lambda graph, after, count, node: graph.add(after, count, node),
            "cuGraphExecKernelNodeSetParams": lambda graph, node, parameters: graph.set(node, parameters),
            "cuMemAllocHost": self._pinned,
            "cuMemFreeHost": lambda address: self.log.append(("freed", address)) or (0,),
            "CUfunction_attribute": SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
            "cuCtxGetCurrent": lambda: (0, "context"),
            "cuCtxSetCurrent": self._set_current,
            "cuMemcpyHtoDAsync": lambda to, host, nbytes, stream: self._copy_in(to, host, nbytes, stream),
            "cuMemcpyDtoHAsync": lambda host, where, nbytes, stream: self._copy(host, where, nbytes),
            "cuLaunchKernel": self._launch,
            "cuFuncSetAttribute": self._set_attribute,
            "cuGetErrorString": lambda result: (0, b"invalid argument"),
        }
        for name, function in functions.items():
            setattr(driver, name, function)
        graphs = ModuleType("cuda.core.graph")
        graphs.GraphDefinition = self._graph  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.core", core)
        monkeypatch.setitem(sys.modules, "cuda.core.graph", graphs)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)

    def _create_stream(self) -> FakeStream:
        stream = FakeStream(self, len(self.streams))
        self.streams.append(stream)
        return stream

    def _graph(self) -> FakeGraph:
        if self.result:
            raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED")
        self.graphs.append(FakeGraph(self, len(self.graphs)))
        return self.graphs[-1]

    def _pinned(self, nbytes: int) -> tuple[int, int]:
        self.pinned = (ctypes.c_ubyte * nbytes)()
        return 0, ctypes.addressof(self.pinned)

    def _copy_in(self, to: int, host: int, nbytes: int, stream: Any) -> tuple[int]:
        begin = ctypes.addressof(self.pinned)
        self.copied_from.append(host - begin if begin <= host < begin + len(self.pinned) else None)
        return self._copy(to, host, nbytes)

    def _set_current(self, context: Any) -> tuple[int]:
        self.current.append(context)
        return (0,)

    def _set_attribute(self, *args: Any) -> tuple[int]:
        self.attributes.append(args)
        return (0,)

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
        assert extra == 0
        self.log.append(("launch", stream))
        self.launches.append((function, tuple(shape), read_parameters(parameters)))
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
    assert fake.copied_from == [0]  # from pinned memory, so that the host may reuse its own
    assert fake.synchronized == 0
    back = bytearray(16)
    runtime.copy_out(buffer, 8, memoryview(back))
    assert bytes(back) == host.numpy().tobytes()
    assert fake.synchronized == 1
    runtime.copy_in(buffer, 0, memoryview(b""))
    runtime.free(buffer)
    assert buffer.closed is fake.streams[0]
    with pytest.raises(MemoryError, match="gave no 2147483648 bytes"):
        runtime.allocate(2**31)
    runtime.close()
    assert fake.log[-1] == ("freed", ctypes.addressof(fake.pinned))


def test_pinned_memory_is_not_written_before_the_device_has_read_it(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    buffer = runtime.allocate(4 << 20)
    part = bytes(1000 << 10)
    for _ in range(3):
        runtime.copy_in(buffer, 0, memoryview(b"abc"))
        runtime.copy_in(buffer, 0, memoryview(part))
    assert all(place is not None for place in fake.copied_from)
    begins = [place for place in fake.copied_from if place is not None]
    assert begins == sorted(set(begins))
    assert begins[2] >= begins[1] + len(part)
    runtime.copy_in(buffer, 0, memoryview(part))
    runtime.copy_in(buffer, 0, memoryview(part))  # there is no room left
    assert fake.copied_from[-1] is None
    assert fake.synchronized == 1
    runtime.copy_in(buffer, 0, memoryview(part))
    assert fake.copied_from[-1] == 0
    runtime.copy_in(buffer, 0, memoryview(bytes(2 << 20)))  # more than is worth copying twice
    assert fake.copied_from[-1] is None
    assert fake.synchronized == 2


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
    assert kernel.places == ((0, 1), (8, 8), (16, 8))  # the binary does
    runtime.launch(kernel, LaunchConfig(), arguments(runtime.allocate(64)))
    assert len(fake.launches) == 1
    with pytest.raises(PackingError, match="parameter 0 was compiled with 1"):
        runtime.load(descriptor(PROTOTYPE.replace("int8_t", "int32_t")))


def test_much_shared_memory_is_asked_for(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    args = arguments(runtime.allocate(64))
    runtime.launch(kernel, LaunchConfig(shared_nbytes=49152), args)
    assert fake.attributes == []
    runtime.launch(kernel, LaunchConfig(shared_nbytes=65536), args)
    runtime.launch(kernel, LaunchConfig(shared_nbytes=57344), args)
    assert fake.attributes == [("function 42", 8, 65536)]  # what is prepared with more still starts
    with pytest.raises(
        LaunchConfigError, match="wants 1048576 bytes of dynamic shared memory, 'Toy GPU' gives a block 232448"
    ):
        runtime.launch(kernel, LaunchConfig(shared_nbytes=2**20), args)


# -- streams


def test_streams_begin_and_end_where_memory_is(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    assert runtime.streams == len(fake.streams) > 1
    kernel = runtime.load(descriptor())
    args = arguments(runtime.allocate(64))
    fake.log.clear()
    runtime.launch_on(0, kernel, LaunchConfig(), args)
    runtime.launch_on(1, kernel, LaunchConfig(), args)
    start = runtime.prepare_on(2, kernel, LaunchConfig(), args)
    runtime.launch_on(1, kernel, LaunchConfig(), args)
    event = runtime.record_event(1)
    runtime.wait_event(2, event)
    start()
    runtime.synchronize()
    assert fake.log == [
        ("launch", 0),
        ("record", 0, 0),
        ("wait", 1, 0),  # what came before is there
        ("launch", 1),
        ("launch", 1),
        ("record", 1, 1),
        ("record", 0, 2),
        ("wait", 2, 2),
        ("wait", 2, 1),
        ("launch", 2),
        ("record", 1, 3),
        ("wait", 0, 3),
        ("record", 2, 4),
        ("wait", 0, 4),
        ("sync", 0),
    ]


def test_events_are_used_again(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    args = arguments(runtime.allocate(64))
    for _ in range(5):
        runtime.launch_on(1, kernel, LaunchConfig(), args)
        runtime.wait_event(0, runtime.record_event(1))
        runtime.synchronize()
    assert next(fake.numbers) == 3


def test_copies_come_after_what_was_launched_on_any_stream(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    buffer = runtime.allocate(64)
    for copy in (
        lambda: runtime.copy_in(buffer, 0, memoryview(b"a")),
        lambda: runtime.copy_out(buffer, 0, memoryview(bytearray(1))),
        lambda: runtime.free(buffer),
    ):
        runtime.launch_on(3, kernel, LaunchConfig(), arguments(buffer))
        fake.log.clear()
        copy()
        assert fake.log[0][:2] == ("record", 3)
        assert fake.log[1] == ("wait", 0, fake.log[0][2])


# -- graphs


def test_a_graph_of_launches(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    buffer = runtime.allocate(256)
    config = LaunchConfig((3, 2, 1), (64, 1, 1), 64)
    launches = [
        Launch(kernel, config, arguments(buffer)),
        Launch(kernel, LaunchConfig(), arguments(buffer, 16)),
        Launch(kernel, config, arguments(buffer, 32), (0, 1)),
    ]
    recording = runtime.record(launches)
    assert recording is not None
    [graph] = fake.graphs
    assert fake.launches == []
    assert graph.edges == [[], [], [0, 1]]
    five = (5).to_bytes(8, "little")
    addresses = [(buffer.handle + offset).to_bytes(8, "little") for offset in (0, 16, 32)]
    assert graph.nodes == [
        ("function 42", (3, 2, 1, 64, 1, 1, 64), [b"\x07", addresses[0], five]),
        ("function 42", (1, 1, 1, 1, 1, 1, 0), [b"\x07", addresses[1], five]),
        ("function 42", (3, 2, 1, 64, 1, 1, 64), [b"\x07", addresses[2], five]),
    ]
    fake.log.clear()
    recording.start()
    recording.start()
    assert fake.log == [("graph", 0), ("graph", 0)]
    other = runtime.allocate(256)
    recording.update(1, arguments(other, 8))
    assert graph.nodes[1][2][1] == (other.handle + 8).to_bytes(8, "little")
    assert graph.nodes[0][2][1] == addresses[0]
    recording.close()
    assert graph.closed


def test_somebody_elses_stream_is_first_for_a_while(fake: FakeCuda) -> None:
    streams = Streams(SimpleNamespace(create_stream=fake._create_stream), 2)
    theirs = {number: FakeStream(fake, number) for number in (50, 60)}
    streams.borrow(50, theirs.__getitem__)
    assert streams.first is theirs[50]
    assert fake.log == [("record", 0, 0), ("wait", 50, 0)]
    assert streams.give_back()
    for _ in range(3):  # the same stream again, and nothing in between: nobody waits for anybody
        fake.log.clear()
        streams.borrow(50, theirs.__getitem__)
        assert streams.on(0) is theirs[50]
        assert streams.give_back()
        assert fake.log == [("record", 50, 1)]
    fake.log.clear()
    streams.borrow(60, theirs.__getitem__)  # another one comes after what the first one had left
    assert fake.log == [("wait", 60, 1)]
    streams.on(1)
    assert streams.give_back()
    assert fake.log[1:] == [("record", 60, 0), ("wait", 1, 0), ("record", 1, 2), ("wait", 60, 2), ("record", 60, 1)]
    fake.log.clear()
    assert streams.first is fake.streams[0]
    assert fake.log == [("wait", 0, 1)]
    fake.log.clear()
    streams.borrow(60, theirs.__getitem__)  # our own has been used since
    assert [entry[:2] for entry in fake.log] == [("record", 0), ("wait", 60)]
    streams.synchronize()
    assert fake.log[-1] == ("sync", 60)
    assert streams.first is fake.streams[0]
    assert not streams.give_back()  # who waited need not be waited for


def test_events_are_used_again_without_anybody_waiting(fake: FakeCuda) -> None:
    """Nobody synchronizes any more where torch's streams are followed."""
    streams = Streams(SimpleNamespace(create_stream=fake._create_stream), 4)
    theirs = FakeStream(fake, 50)
    for _ in range(20):
        streams.borrow(50, lambda handle: theirs)
        for number in range(4):
            streams.wait_event(number, streams.record_event(3 - number))
        streams.give_back()
    assert next(fake.numbers) < 20


def test_a_graph_starts_after_what_streams_do(fake: FakeCuda, tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    args = arguments(runtime.allocate(64))
    recording = runtime.record([Launch(kernel, LaunchConfig(), args)] * 2)
    assert recording is not None
    runtime.launch_on(2, kernel, LaunchConfig(), args)
    fake.log.clear()
    recording.start()
    assert [entry[:2] for entry in fake.log] == [("record", 2), ("wait", 0), ("graph", 0)]


def test_no_graph_says_why(fake: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = opened(tmp_path)
    kernel = runtime.load(descriptor())
    args = arguments(runtime.allocate(64))
    fake.result = 1
    with caplog.at_level(logging.INFO, "kagent"):
        assert runtime.record([Launch(kernel, LaunchConfig(), args)] * 2) is None
    assert "2 launches are started one by one: CUDA_ERROR_NOT_SUPPORTED" in caplog.text


# -- torch's tensors


class OtherTorch:
    """A torch with several GPUs, whose current stream and context are others than kagent's."""

    device, alone = "cuda:0", False

    def current_stream(self) -> int:
        return 50


def test_torchs_context_is_current_again(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes the device of the current context for its current device."""
    core, driver = sys.modules["cuda.core"], sys.modules["cuda.bindings.driver"]
    core.Stream = SimpleNamespace(from_handle=lambda handle: FakeStream(fake, handle))  # type: ignore[attr-defined]
    monkeypatch.setattr("kagent_cuda.runtime.torch_cuda", lambda index: OtherTorch())
    runtime = opened(tmp_path)
    assert runtime.torch_device == "cuda:0"
    driver.cuCtxGetCurrent = lambda: (0, "torch's")  # type: ignore[attr-defined]
    memory = runtime.import_tensor(4096, 16)
    assert memory.handle == 4096
    fake.current.clear()
    assert runtime.after_torch()
    runtime.launch(runtime.load(descriptor()), LaunchConfig((1, 1, 1), (32, 1, 1)), arguments(memory, 8))
    assert fake.launches[-1][2][1] == (4096 + 8).to_bytes(8, "little")
    assert ("launch", 50) in fake.log
    assert runtime.before_torch()
    assert fake.current[-1] == "torch's"
    assert fake.synchronized == 0
    runtime.free(memory)
    assert runtime.after_torch()
    runtime.synchronize()
    assert not runtime.before_torch()  # somebody has waited


@pytest.mark.parametrize("available", [True, False])
def test_a_torch_without_cuda_changes_nothing(
    available: bool, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert torch_cuda(1) is None
    assert opened(tmp_path).torch_device == ("cuda:0" if available else None)
    registry = CudaPlugin().kagent_kernel_registry(_info(), load_config({}))
    assert registry is not None
    assert registry.resolves == available


def _info() -> DeviceInfo:
    return DeviceInfo(Device("cuda", 0), "Toy GPU")
