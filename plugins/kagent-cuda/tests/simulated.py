"""A CUDA driver in a hundred lines: `CudaRuntime` runs on it as on a GPU, kernels are run by the emulated device.

Nothing runs before somebody waits, and then what may run next does, whichever comes: a wait that is missing, memory
that is freed or written too early and host memory that is reused before it was read show as wrong results or errors.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda.bindings.nvrtc  # it imports the driver's module, which the simulated one takes the place of
import pytest
import torch

from kagent_core.capture.schemas import torch_dtype
from kagent_core.config import Config
from kagent_core.specs import Device, DeviceInfo, LaunchConfig, TensorSpec
from kagent_core.testing.torch_device import TORCH_DEVICE, register_torch_device, torch_device_blocks
from kagent_cuda import runtime
from kagent_cuda.compiler import CompiledSource
from kagent_cuda.devices import emulated_device
from kagent_cuda.emulated.kernels import EmulatedKernel, Machine
from kagent_cuda.emulated.launches import run_kernel
from kagent_cuda.emulated.memory import Allocation, Memory
from kagent_cuda.plugin import CudaPlugin

assert cuda.bindings.nvrtc

DEVICE = "simulated:0"


class Plugin(CudaPlugin):
    """kagent-cuda with one device, which is not told from a real one."""

    device_type = "simulated"

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        info = replace(emulated_device(0), device=Device.parse(DEVICE), emulated=False, details=())
        return [info]


class Event:
    """The last time that it was recorded: a list that is not empty from when it has happened."""

    def __init__(self) -> None:
        self.happened: list[bool] = [True]


class Stream:
    """What is to be done, in order."""

    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda = cuda
        self.number = number
        self.handle = self
        self.queue: deque[tuple[Callable[[], object], list[bool] | None]] = deque()

    def do(self, work: Callable[[], object], after: list[bool] | None = None) -> tuple[int]:
        self.queue.append((work, after))
        return (0,)

    def sync(self) -> None:
        self.cuda.calls["sync"] += 1
        while self.queue:
            ready = [stream for stream in self.cuda.streams if stream.queue and stream.queue[0][1] != []]
            if self.cuda.random.random() < 0.2:  # some streams run ahead for a while, others lag behind
                self.cuda.random.shuffle(self.cuda.haste)
            max(ready, key=lambda stream: self.cuda.haste[stream.number]).queue.popleft()[0]()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.happened = happened = []
        self.do(lambda: happened.append(True))
        return event

    def wait(self, event: Event) -> None:
        if not self.cuda.ignores_waits:
            self.do(lambda: None, event.happened)


class Buffer:
    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self.cuda = cuda
        self.allocation: Allocation = cuda.memory.allocate(nbytes)
        self.handle = self.allocation.address

    def close(self, stream: Stream) -> None:
        stream.do(lambda: self.cuda.memory.free(self.allocation))


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.handle = len(cuda.graphs)
        cuda.graphs.append(self)
        self.nodes: list[Callable[[], object]] = []
        self.edges: list[list[int]] = []

    def add(self, after: list[int], count: int, node: Any) -> tuple[int, int]:
        self.nodes.append(self._launch(node))
        self.edges.append(after)
        return 0, len(self.nodes) - 1

    def set(self, position: int, node: Any) -> tuple[int]:
        self.cuda.calls["update"] += 1
        self.nodes[position] = self._launch(node)
        return (0,)

    def instantiate(self) -> Graph:
        return self

    def upload(self, stream: Stream) -> None:
        pass

    def close(self) -> None:
        self.nodes.clear()

    def launch(self, stream: Stream) -> None:
        self.cuda.calls["graph"] += 1
        nodes = list(self.nodes)
        stream.do(lambda: self._run(nodes))

    def _run(self, nodes: list[Callable[[], object]]) -> None:
        left = dict(enumerate(nodes))
        while left:
            ready = [n for n in left if self.cuda.ignores_waits or left.keys().isdisjoint(self.edges[n])]
            left.pop(self.cuda.random.choice(ready))()

    def _launch(self, node: Any) -> Callable[[], object]:
        grid = (node.gridDimX, node.gridDimY, node.gridDimZ)
        block = (node.blockDimX, node.blockDimY, node.blockDimZ)
        config = LaunchConfig(grid, block, node.sharedMemBytes)
        return self.cuda.kernel_call(node.func, config, node.kernelParams)


class TorchBlock(Allocation):
    """Memory that torch has allocated."""

    _slack = ()


class DeviceMemory(Memory):
    """Memory of the device, in which torch allocates too."""

    def all(self) -> list[Allocation]:
        return [*super().all(), *self._theirs()]

    def holding(self, address: int) -> Allocation | None:
        theirs = (block for block in self._theirs() if block.address <= address <= block.end)
        return next(theirs, None) or super().holding(address)

    def _theirs(self) -> list[Allocation]:
        return [TorchBlock(*block) for block in torch_device_blocks()] if torch_is_there() else []


def torch_is_there() -> bool:
    return register_torch_device.cache_info().currsize > 0


class Torch:
    """torch's CUDA on the device: each of its streams is one of the driver's.

    Attributes
    ----------
    device
        As torch calls it.
    stream
        The current one.
    """

    device = TORCH_DEVICE
    alone = True

    def __init__(self, cuda: Cuda) -> None:
        register_torch_device()
        self.cuda = cuda
        self.stream = cuda._create_stream()

    def current_stream(self) -> Stream:
        return self.stream

    def run_on(self, handle: Stream, work: Callable[[], object]) -> None:
        self.cuda.calls["torch"] += 1
        handle.do(work)

    def tensor_at(self, address: int, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor in host memory: torch's kernels are to run when their turn comes."""
        if spec.span == 0:
            return torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype))
        data = (ctypes.c_ubyte * (spec.span * spec.dtype.itemsize)).from_address(address)
        return torch.frombuffer(data, dtype=torch_dtype(spec.dtype)).as_strided(spec.shape, spec.strides)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like one in host memory, which torch fills when the current stream comes so far."""
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).clone()
        there = torch.empty_like(flat, device=self.device)
        # its version counter is where it was: for torch, the tensor has been filled
        self.stream.do(lambda: ctypes.memmove(there.data_ptr(), flat.data_ptr(), flat.nbytes))
        return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def read(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return what tensors hold when the current stream comes so far."""
        found: list[torch.Tensor] = []
        self.stream.do(lambda: found.extend(tensor.cpu() for tensor in tensors))
        self.stream.sync()
        return found


class Cuda:
    """The driver and cuda-core.

    Parameters
    ----------
    cache_dir
        Of compiled kernels.
    seed
        Of what runs next.
    graphs
        Whether it has graphs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache_dir: Path, seed: int = 0, graphs: bool = True) -> None:
        self.memory = DeviceMemory(2**32)
        self.machine = Machine(cache_dir)
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.haste: list[int] = []
        self.graphs: list[Graph] = []
        self.calls: Counter[str] = Counter()
        self.ignores_waits = False
        self._info = emulated_device(0)
        self._kernels: list[EmulatedKernel] = []
        self._pinned: list[Any] = []
        core, driver, graph = ModuleType("cuda.core"), ModuleType("cuda.bindings.driver"), ModuleType("cuda.core.graph")
        device = SimpleNamespace(
            set_current=lambda: None,
            create_stream=self._create_stream,
            compute_capability=(9, 0),
            allocate=lambda nbytes, stream: Buffer(self, nbytes),
            properties=SimpleNamespace(max_shared_memory_per_block_optin=232448),
        )
        vars(core).update(Device=lambda index: device, ObjectCode=SimpleNamespace(from_cubin=self._from_cubin))
        core.Stream = SimpleNamespace(from_handle=lambda handle: handle)  # type: ignore[attr-defined]
        vars(driver).update(self._functions())
        vars(graph).update(GraphDefinition=lambda: Graph(self))
        modules = {"cuda.core": core, "cuda.bindings.driver": driver} | ({"cuda.core.graph": graph} if graphs else {})
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(runtime, "NvrtcCompiler", lambda architecture, cache_dir: self)
        if not graphs:
            monkeypatch.setitem(sys.modules, "cuda.core.graph", None)

    def compile(self, source: str, name: str) -> CompiledSource:
        self._kernels.append(self.machine.compile(source, name))
        return CompiledSource(b"%d" % (len(self._kernels) - 1), {}, name, "sm_90")

    def kernel_call(self, kernel: EmulatedKernel, config: LaunchConfig, pointers: int) -> Callable[[], object]:
        """Read the parameters, as a driver does when it is called, and return what runs the kernel."""
        block = bytearray()
        for (offset, nbytes), pointer in zip(
            kernel.places, (ctypes.c_void_p * max(len(kernel.places), 1)).from_address(pointers), strict=False
        ):
            block += bytes(offset - len(block)) + ctypes.string_at(pointer, nbytes)
        data = bytes(block)
        return lambda: run_kernel(self.machine, self.memory, self._info, kernel, config, data)

    def _launch(self, kernel: EmulatedKernel, *args: Any) -> tuple[int]:
        self.calls["launch"] += 1
        *shape, shared, stream, pointers, _ = args
        config = LaunchConfig(tuple(shape[:3]), tuple(shape[3:]), shared)
        return stream.do(self.kernel_call(kernel, config, pointers))  # type: ignore[no-any-return]

    def _functions(self) -> dict[str, Any]:
        def copy(to: int, source: int, nbytes: int, stream: Stream) -> tuple[int]:
            return stream.do(lambda: ctypes.memmove(to, source, nbytes))

        return {
            "CUresult": SimpleNamespace(CUDA_SUCCESS=0),
            "CUkernel": lambda number: number,
            "cuKernelGetFunction": lambda number: (0, self._kernels[number]),
            "CUgraph": lambda number: self.graphs[number],
            "CUgraphExec": lambda number: self.graphs[number],
            "CUDA_KERNEL_NODE_PARAMS": SimpleNamespace,
            "cuGraphAddKernelNode": lambda graph, after, count, node: graph.add(after, count, node),
            "cuGraphExecKernelNodeSetParams": lambda graph, position, node: graph.set(position, node),
            "CUfunction_attribute": SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
            "cuFuncSetAttribute": lambda *args: (0,),
            "cuCtxGetCurrent": lambda: (0, "context"),
            "cuCtxSetCurrent": lambda context: (0,),
            "cuMemcpyHtoDAsync": copy,
            "cuMemcpyDtoHAsync": copy,
            "cuLaunchKernel": self._launch,
            "cuMemAllocHost": self._allocate_host,
            "cuMemFreeHost": lambda address: (0,),
        }

    def _create_stream(self) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        self.haste.append(len(self.haste))
        return self.streams[-1]

    def _allocate_host(self, nbytes: int) -> tuple[int, int]:
        self._pinned.append((ctypes.c_ubyte * nbytes)())
        return 0, ctypes.addressof(self._pinned[-1])

    def _from_cubin(self, binary: bytes, name: str) -> Any:
        number = int(binary)
        places = [SimpleNamespace(offset=offset, size=nbytes) for offset, nbytes in self._kernels[number].places]
        kernel = SimpleNamespace(handle=number, arguments_info=places)
        return SimpleNamespace(get_kernel=lambda symbol: kernel)
