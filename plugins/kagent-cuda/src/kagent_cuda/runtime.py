"""Memory and launches of one NVIDIA GPU, through cuda-python.

What cuda-core has no call for goes through cuda-bindings: copies between the device and host memory of any kind, and
launches whose parameters are bytes that were packed before, structs among them.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kagent_core.config import Config
from kagent_core.device import PointerArg, Runtime, ScalarArg
from kagent_core.errors import LaunchConfigError
from kagent_core.extract.pack_prototype import check_sizes, has_prototype
from kagent_core.prototype.abi import Abi
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, LocalMemory
from kagent_cuda.compiler import KernelUsage, NvrtcCompiler
from kagent_cuda.devices import SHARED_NBYTES
from kagent_cuda.parameters import Place, check_places, pack_parameters

Argument = PointerArg | ScalarArg | LocalMemory


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
        Where each parameter lies, as the driver tells it; None where it is too old to.
    usage
        What it takes of a multiprocessor; None where the compiler did not tell.
    """

    name: str
    kernel: Any
    function: Any
    places: tuple[Place, ...] | None
    usage: KernelUsage | None


class CudaRuntime(Runtime):
    """One device with one stream. Buffers are ``cuda.core.Buffer``."""

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.info = info
        self._core = importlib.import_module("cuda.core")
        self._driver = importlib.import_module("cuda.bindings.driver")
        self.device = self._core.Device(info.device.index or 0)
        self.device.set_current()
        self._context = self._checked(self._driver.cuCtxGetCurrent())
        self.stream = self.device.create_stream()
        major, minor = self.device.compute_capability
        self._compiler = NvrtcCompiler(f"sm_{major}{minor}", config.cache_dir)
        self._abi = Abi()

    # -- memory

    def allocate(self, nbytes: int) -> Any:
        """Return a buffer, in the order of the stream."""
        self._enter()
        try:
            return self.device.allocate(max(nbytes, 1), stream=self.stream)
        except Exception as error:
            if "OUT_OF_MEMORY" in str(error).upper().replace(" ", "_"):
                raise MemoryError(f"'{self.info.name}' gave no {nbytes} bytes: {error}") from error
            raise

    def free(self, buffer: Any) -> None:
        """Release a buffer, when the stream has come so far."""
        self._enter()
        buffer.close(self.stream)

    def copy_in(self, buffer: Any, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes to the device."""
        if data.nbytes:
            host = np.frombuffer(data, np.uint8)
            self._enter()
            where = int(buffer.handle) + byte_offset
            handle = self.stream.handle
            self._checked(self._driver.cuMemcpyHtoDAsync(where, host.ctypes.data, host.nbytes, handle))
            self.stream.sync()  # the host's memory may be given up now

    def copy_out(self, buffer: Any, byte_offset: int, data: memoryview) -> None:
        """Copy bytes of the device to the host, after all that was launched before."""
        self._enter()
        if data.nbytes:
            host = np.frombuffer(data, np.uint8)
            where = int(buffer.handle) + byte_offset
            handle = self.stream.handle
            self._checked(self._driver.cuMemcpyDtoHAsync(host.ctypes.data, where, host.nbytes, handle))
        self.stream.sync()

    # -- kernels

    def load(self, kernel: KernelDescriptor) -> LoadedKernel:
        """Compile a kernel, unless the cache has it, and load it."""
        if kernel.source is None:
            raise TypeError(f"kernel '{kernel.name}' has no CUDA C++ source")
        self._enter()
        compiled = self._compiler.compile(kernel.source, kernel.name)
        code = self._core.ObjectCode.from_cubin(compiled.binary, name=kernel.name)
        loaded = code.get_kernel(compiled.symbol)
        function = self._driver.CUfunction(int(loaded.handle))
        places = self._places(loaded)
        if places is not None and has_prototype(kernel):
            declared = [parameter for parameter in kernel.parameters if not parameter.type.startswith("local ")]
            check_sizes(kernel, declared, [nbytes for _, nbytes in places], self._abi)
        return LoadedKernel(kernel.name, loaded, function, places, compiled.usage.get(compiled.symbol))

    def launch(self, kernel: LoadedKernel, config: LaunchConfig, args: Sequence[Argument]) -> None:
        """Start a kernel."""
        self.prepare(kernel, config, args)()

    def prepare(self, kernel: LoadedKernel, config: LaunchConfig, args: Sequence[Argument]) -> Callable[[], object]:
        """Pack a kernel's parameters once and for all."""
        passed = [arg for arg in args if not isinstance(arg, LocalMemory)]
        block = pack_parameters(passed, lambda buffer: int(buffer.handle), self._abi)
        if kernel.places is not None:
            check_places(kernel.name, block.places, kernel.places)
        self._allow_shared(kernel, config)
        data = ctypes.create_string_buffer(block.data, max(len(block.data), 1))
        base = ctypes.addressof(data)
        pointers = (ctypes.c_void_p * max(len(block.places), 1))(*(base + offset for offset, _ in block.places))
        address, handle = ctypes.addressof(pointers), self.stream.handle
        launch, shape = self._driver.cuLaunchKernel, (*config.grid, *config.block, config.shared_nbytes)

        def start(_held: object = (data, pointers)) -> None:  # the driver reads both when it is called
            self._enter()
            self._checked(launch(kernel.function, *shape, handle, address, 0))

        return start

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._enter()
        self.stream.sync()

    # -- inside

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
        if config.shared_nbytes <= SHARED_NBYTES:
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

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        """Return what the driver answers, or raise what it refuses."""
        result, *values = answer
        if result != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(result)
            said = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
            raise CudaError(f"{getattr(result, 'name', result)}: {said}")
        return values[0] if values else None
