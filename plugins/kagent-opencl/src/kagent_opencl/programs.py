"""Compiling OpenCL C, once per machine: binaries are kept in kagent's cache directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import pyopencl as cl

from kagent_core.errors import CompilationError
from kagent_core.inspect.logs import get_logger
from kagent_core.native.binaries import BinaryCache
from kagent_opencl.packer import KernelArgument, arguments_of

log = get_logger("codegen")

SUBDIRECTORY = "opencl"
OPTIONS = ("-cl-std=CL1.2",)
_ARGUMENT_INFO = "-cl-kernel-arg-info"
_ERROR_LINES = 5


class Programs:
    """Compiles for one device.

    Parameters
    ----------
    context, device
        What for.
    cache_dir
        The directory of the config key ``cache_dir``.
    """

    def __init__(self, context: cl.Context, device: cl.Device, cache_dir: Path) -> None:
        self._context = context
        self._device = device
        self._cache = BinaryCache(cache_dir / SUBDIRECTORY)
        platform = device.platform
        self._identity = (
            *(platform.name, platform.version, device.name, device.vendor, device.version, device.driver_version),
            *OPTIONS,
        )

    def build(self, source: str) -> cl.Program:
        """Return a compiled program.

        Raises
        ------
        CompilationError
            When the driver's compiler refuses it; with its first messages.
        """
        key = self._cache.key(source, *self._identity)
        binary = self._cache.find(key)
        if binary is not None:
            try:
                return self._built(cl.Program(self._context, [self._device], [binary]))
            except cl.Error as error:  # made by a driver that calls itself the same
                log.debug("%s: the driver does not take its binary: %s", key, error)
                self._cache.forget(key)
        return self._compiled(key, source)

    def build_with_arguments(self, source: str, name: str) -> tuple[cl.Program, list[KernelArgument] | None]:
        """Return a compiled program, and the arguments of one of its kernels; None where the driver does not tell them.

        Binaries tell none, so they are kept beside the binary.

        Raises
        ------
        CompilationError
            As `build`.
        """
        key = self._cache.key(source, *self._identity, "arguments", name)
        kept = self._cache.find(key)
        if kept is not None:
            known = json.loads(kept)
            return self.build(source), None if known is None else [KernelArgument(*parts) for parts in known]
        program = self._compiled(self._cache.key(source, *self._identity), source, _ARGUMENT_INFO)
        found = arguments_of(cl.Kernel(program, name))
        self._cache.keep(key, json.dumps(None if found is None else [astuple(one) for one in found]).encode())
        return program, found

    def _compiled(self, key: str, source: str, *options: str) -> cl.Program:
        try:
            program = self._built(cl.Program(self._context, source), options)
        except cl.Error as error:
            raise CompilationError(
                f"'{self._device.name.strip()}' refuses a kernel: {_messages(error)}",
                hint="KAGENT_LOGS=codegen=debug prints the sources of generated kernels",
            ) from error
        binaries: list[bytes] = program.get_info(cl.program_info.BINARIES)  # type: ignore[assignment]
        if binaries[0]:
            self._cache.keep(key, binaries[0])
        return program

    def _built(self, program: cl.Program, options: Sequence[str] = ()) -> cl.Program:
        # without pyopencl's own cache, which reads pickles
        built: cl.Program = program.build(options=[*OPTIONS, *options], cache_dir=False)  # type: ignore[arg-type]
        return built


def _messages(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and "BUILD_PROGRAM_FAILURE" not in line]
    return "; ".join(dict.fromkeys((errors or lines)[:_ERROR_LINES]))
