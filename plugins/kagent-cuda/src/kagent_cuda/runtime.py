"""Memory and launches of one NVIDIA GPU, through cuda-python.

What cuda-core has no call for goes through cuda-bindings: copies between the device and host memory of any kind, and
launches whose parameters are bytes that were packed before, structs among them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kagent_core.config import Config
from kagent_core.device import Launch, PointerArg, Recording, Runtime, ScalarArg
from kagent_core.errors import LaunchConfigError
from kagent_core.extract.pack_prototype import check_sizes, has_prototype
from kagent_core.inspect.logs import get_logger
from kagent_core.prototype.abi import Abi
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, LocalMemory
from kagent_cuda.compiler import KernelUsage, NvrtcCompiler
from kagent_cuda.cubin import parameter_places
from kagent_cuda.devices import SHARED_NBYTES
from kagent_cuda.graphs import CudaGraph
from kagent_cuda.library import LibraryFunction, bound
from kagent_cuda.parameters import HeldParameters, Place, check_places, pack_parameters
from kagent_cuda.staging import Staging
from kagent_cuda.streams import STREAMS, Streams
from kagent_cuda.torch_cuda import TensorMemory, torch_cuda

log = get_logger("execute")

Argument = PointerArg | ScalarArg | LocalMemory

_NOT_RECORDED = "{} of them are torch's own kernels, which may allocate memory while a graph would be captured"


class CudaError(RuntimeError):
    """What the CUDA driver refuses."""


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on the device.

    Attributes
    ----------
    name
        As it was registered.
    kernel
        cuda-core's, which keeps the code loaded.
    function
        The driver's handle for launches.
    places
        Where each parameter lies, as the driver tells it, or else the binary; None where neither does.
    usage
        What it takes of a multiprocessor; None where the compiler did not tell.
    """

    name: str
    kernel: Any
    function: Any
    places: tuple[Place, ...] | None
    usage: KernelUsage | None


Kernel = LoadedKernel | LibraryFunction


class CudaRuntime(Runtime):
    """One device. Buffers are ``cuda.core.Buffer``."""

    streams = STREAMS

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.info = info
        self._core = importlib.import_module("cuda.core")
        self._driver = importlib.import_module("cuda.bindings.driver")
        self.device = self._core.Device(info.device.index or 0)
        self.device.set_current()
        self._context = self._checked(self._driver.cuCtxGetCurrent())
        self._streams = Streams(self.device, self.streams)
        self._staging = Staging(self._driver, self._checked)
        self._shared: dict[int, int] = {}
        major, minor = self.device.compute_capability
        self._compiler = NvrtcCompiler(f"sm_{major}{minor}", config.cache_dir)
        self._abi = Abi()
        self._torch = torch_cuda(info.device.index or 0)
        self.torch_device = None if self._torch is None else self._torch.device
        self._outer: Any = None

    # -- memory

    def allocate(self, nbytes: int) -> Any:
        """Return a buffer."""
        self._enter()
        try:
            return self.device.allocate(max(nbytes, 1), stream=self._streams.first)
        except Exception as error:
            if "OUT_OF_MEMORY" in str(error).upper().replace(" ", "_"):
                raise MemoryError(f"'{self.info.name}' gave no {nbytes} bytes: {error}") from error
            raise

    def free(self, buffer: Any) -> None:
        """Release a buffer, when the device has come so far."""
        self._enter()
        buffer.close(self._streams.first)

    def copy_in(self, buffer: Any, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes to the device: what is small goes through pinned memory, and nobody waits for it."""
        if not data.nbytes:
            return
        host = np.frombuffer(data, np.uint8)
        self._enter()
        pinned = self._staging.place(host.ctypes.data, host.nbytes)
        source, where = host.ctypes.data if pinned is None else pinned, int(buffer.handle) + byte_offset
        self._checked(self._driver.cuMemcpyHtoDAsync(where, source, host.nbytes, self._streams.first.handle))
        if pinned is None:
            self._wait()  # the caller may change the bytes from here on

    def copy_out(self, buffer: Any, byte_offset: int, data: memoryview) -> None:
        """Copy bytes of the device to the host, after all that was launched before."""
        self._enter()
        if data.nbytes:
            host = np.frombuffer(data, np.uint8)
            where, handle = int(buffer.handle) + byte_offset, self._streams.first.handle
            self._checked(self._driver.cuMemcpyDtoHAsync(host.ctypes.data, where, host.nbytes, handle))
        self._wait()

    # -- torch's tensors

    def import_tensor(self, address: int, nbytes: int) -> TensorMemory:
        """Return a tensor's memory as a buffer."""
        return TensorMemory(address)

    def after_torch(self) -> bool:
        """Launch on torch's current stream from here on: what it was given comes before."""
        assert self._torch is not None
        handle = self._torch.current_stream()
        if not self._torch.alone:  # torch's current device is that of the context
            self._outer = self._checked(self._driver.cuCtxGetCurrent())
        self._enter()
        self._streams.borrow(handle, self._core.Stream.from_handle)
        return True

    def before_torch(self) -> bool:
        """Gather all streams into torch's, which need not be waited for; False where somebody has waited already."""
        self._enter()
        done = self._streams.give_back()
        if done and self._outer is not None:
            self._checked(self._driver.cuCtxSetCurrent(self._outer))
            self._outer = None
        return done

    # -- kernels

    def load(self, kernel: KernelDescriptor) -> Kernel:
        """Compile a kernel, unless the cache has it, and load it. One of torch's own is what it is."""
        if self._torch is not None and isinstance(kernel.function, LibraryFunction):
            return kernel.function
        if kernel.source is None:
            raise TypeError(f"kernel '{kernel.name}' has no CUDA C++ source")
        self._enter()
        compiled = self._compiler.compile(kernel.source, kernel.name)
        code = self._core.ObjectCode.from_cubin(compiled.binary, name=kernel.name)
        loaded = code.get_kernel(compiled.symbol)
        function = self._checked(self._driver.cuKernelGetFunction(self._driver.CUkernel(int(loaded.handle))))
        places = self._places(loaded) or parameter_places(compiled.binary, compiled.symbol)
        if places is not None and has_prototype(kernel):
            declared = [parameter for parameter in kernel.parameters if not parameter.type.startswith("local ")]
            check_sizes(kernel, declared, [nbytes for _, nbytes in places], self._abi)
        return LoadedKernel(kernel.name, loaded, function, places, compiled.usage.get(compiled.symbol))

    def launch(self, kernel: Kernel, config: LaunchConfig, args: Sequence[Argument]) -> None:
        """Start a kernel."""
        self.prepare(kernel, config, args)()

    def launch_on(self, stream: int, kernel: Kernel, config: LaunchConfig, args: Sequence[Argument]) -> None:
        """Start a kernel on one of the streams."""
        self.prepare_on(stream, kernel, config, args)()

    def prepare(self, kernel: Kernel, config: LaunchConfig, args: Sequence[Argument]) -> Callable[[], object]:
        """Pack a kernel's parameters once and for all."""
        return self._prepared(lambda: self._streams.first, kernel, config, args)

    def prepare_on(
        self, stream: int, kernel: Kernel, config: LaunchConfig, args: Sequence[Argument]
    ) -> Callable[[], object]:
        """Pack the parameters of a launch on one of the streams."""
        return self._prepared(lambda: self._streams.on(stream), kernel, config, args)

    def record_event(self, stream: int) -> Any:
        """Return an event that happens when a stream has come so far."""
        self._enter()
        return self._streams.record_event(stream)

    def wait_event(self, stream: int, event: Any) -> None:
        """Let a stream wait for an event."""
        self._enter()
        self._streams.wait_event(stream, event)

    def record(self, launches: Sequence[Launch]) -> Recording | None:
        """Return a CUDA graph of some launches; None, and why not in the log, where there can be none."""
        self._enter()
        theirs = sum(isinstance(launch.kernel, LibraryFunction) for launch in launches)
        if theirs:
            told = _NOT_RECORDED.format(theirs)
            log.info("%s: %d launches are started one by one: %s", self.info.device, len(launches), told)
            return None
        try:
            definition = importlib.import_module("cuda.core.graph").GraphDefinition()
            graph = CudaGraph(self._driver, self._checked, definition, launches, self._packed, self._entered)
        except Exception as error:  # noqa: BLE001  whatever the driver refuses: launching each works without it
            log.info("%s: %d launches are started one by one: %s", self.info.device, len(launches), error)
            return None
        log.debug("%s: a graph of %d launches", self.info.device, len(launches))
        return graph

    def why_not_recorded(self, kernels: Sequence[KernelDescriptor]) -> str | None:
        """Say how many are torch's."""
        theirs = sum(isinstance(kernel.function, LibraryFunction) for kernel in kernels)
        return _NOT_RECORDED.format(theirs) if theirs else None

    def synchronize(self) -> None:
        """Wait for every stream."""
        self._enter()
        self._wait()

    def close(self) -> None:
        """Release what the runtime holds of the device."""
        self._enter()
        self._wait()
        self._staging.close()

    # -- inside

    def _wait(self) -> None:
        self._streams.synchronize()
        self._staging.reuse()

    def _entered(self) -> Any:
        self._enter()
        return self._streams.first

    def _packed(self, kernel: LoadedKernel, config: LaunchConfig, args: Sequence[Argument]) -> HeldParameters:
        self._enter()
        block = pack_parameters(
            [arg for arg in args if not isinstance(arg, LocalMemory)], lambda buffer: int(buffer.handle), self._abi
        )
        if kernel.places is not None:
            check_places(kernel.name, block.places, kernel.places)
        self._allow_shared(kernel, config)
        return HeldParameters(block)

    def _prepared(
        self, stream: Callable[[], Any], kernel: Kernel, config: LaunchConfig, args: Sequence[Argument]
    ) -> Callable[[], object]:
        if isinstance(kernel, LibraryFunction):
            return self._prepared_of_torch(stream, kernel, args)
        held = self._packed(kernel, config, args)  # which the driver reads when it is called
        launch, shape = self._driver.cuLaunchKernel, (*config.grid, *config.block, config.shared_nbytes)

        def start() -> None:
            self._enter()
            self._checked(launch(kernel.function, *shape, stream().handle, held.address, 0))

        return start

    def _prepared_of_torch(
        self, stream: Callable[[], Any], kernel: LibraryFunction, args: Sequence[Any]
    ) -> Callable[[], object]:
        theirs = self._torch
        assert theirs is not None
        self._enter()
        call = bound(kernel, args, lambda arg: theirs.tensor_at(int(arg.buffer.handle) + arg.byte_offset, arg.spec))

        def start() -> None:
            self._enter()
            theirs.run_on(stream().handle, call)

        return start

    def _enter(self) -> None:
        # whoever called before in this thread may have made another device current
        self._checked(self._driver.cuCtxSetCurrent(self._context))

    def _places(self, loaded: Any) -> tuple[Place, ...] | None:
        try:
            return tuple((int(one.offset), int(one.size)) for one in loaded.arguments_info)
        except (NotImplementedError, RuntimeError):  # drivers before CUDA 12.4 do not tell
            return None

    def _allow_shared(self, kernel: LoadedKernel, config: LaunchConfig) -> None:
        """Ask for more dynamic shared memory than every device gives unasked."""
        allowed = self._shared.get(int(kernel.kernel.handle), SHARED_NBYTES)
        if config.shared_nbytes <= allowed:
            return
        most = int(self.device.properties.max_shared_memory_per_block_optin)
        if config.shared_nbytes > most:
            raise LaunchConfigError(
                f"kernel '{kernel.name}' wants {config.shared_nbytes} bytes of dynamic shared memory, "
                f"'{self.info.name}' gives a block {most}",
                hint="derive fewer elements for its shared memory",
            )
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(self._driver.cuFuncSetAttribute(kernel.function, attribute, config.shared_nbytes))
        self._shared[int(kernel.kernel.handle)] = config.shared_nbytes

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        """Return what the driver answers, or raise what it refuses."""
        result, *values = answer
        if result != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(result)
            said = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
            raise CudaError(f"{getattr(result, 'name', result)}: {said}")
        return values[0] if values else None
