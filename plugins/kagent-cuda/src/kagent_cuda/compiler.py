"""Compiling CUDA C++ with NVRTC, with or without a GPU: binaries are kept in kagent's cache directory."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kagent_core.errors import CompilationError
from kagent_core.inspect.logs import get_logger
from kagent_core.native.binaries import BinaryCache

log = get_logger("codegen")

SUBDIRECTORY = "cuda"
_HEADER_NAME = "stdint.h"
_HEADER = """#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#ifdef _WIN64
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
typedef long int64_t;
typedef unsigned long uint64_t;
#endif
typedef int64_t intptr_t;
typedef uint64_t uintptr_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
"""
"""What sources may use, as with nvcc, and NVRTC lacks: it has no C library."""

OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v", f"--pre-include={_HEADER_NAME}")
"""Of every compilation: no product and sum are contracted, because eager PyTorch rounds after each, and the assembler
says what kernels use."""

_ERROR_LINES = 5
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_MESSAGE = re.compile(r"\b(error|warning)\b", re.IGNORECASE)
_REMARK = "warnings can be suppressed"  # which follows the first warning


@dataclass(frozen=True)
class KernelUsage:
    """What one compiled kernel takes of a multiprocessor.

    Attributes
    ----------
    registers
        32-bit registers of a thread.
    shared_nbytes
        Shared memory that it declares, in bytes.
    stack_nbytes
        Local memory of a thread, in bytes.
    spilled_nbytes
        Of it, what had no room in registers: bytes written and read.
    """

    registers: int
    shared_nbytes: int
    stack_nbytes: int
    spilled_nbytes: int


@dataclass(frozen=True)
class CompiledSource:
    """A compiled source.

    Attributes
    ----------
    binary
        The cubin.
    usage
        Of each kernel, by name.
    symbol
        The kernel's name in the cubin: its own, or what C++ makes of that without ``extern "C"``.
    architecture
        What it was compiled for.
    """

    binary: bytes
    usage: dict[str, KernelUsage]
    symbol: str
    architecture: str


class NvrtcCompiler:
    """Compiles for one architecture.

    Parameters
    ----------
    architecture
        Such as ``sm_90``.
    cache_dir
        The directory of the config key ``cache_dir``.
    options
        More options of NVRTC's.
    """

    def __init__(self, architecture: str, cache_dir: Path, options: Sequence[str] = ()) -> None:
        self.architecture = architecture
        self._options = (f"--gpu-architecture={architecture}", *OPTIONS, *options)
        self._cache = BinaryCache(cache_dir / SUBDIRECTORY)

    def compile(self, source: str, name: str) -> CompiledSource:
        """Return a compiled source, from the cache where it has it.

        Parameters
        ----------
        source
            CUDA C++.
        name
            Of the kernel in it.

        Raises
        ------
        CompilationError
            When NVRTC is missing, or refuses the source or warns of something in it; with its first messages.
        """
        version = ".".join(map(str, nvrtc_version()))
        key = self._cache.key(_HEADER, source, name, self.architecture, version, *self._options)
        kept = self._cache.find(key)
        if kept is not None:
            line, _, binary = kept.partition(b"\n")
            head = json.loads(line)
            usage = {kernel: KernelUsage(**values) for kernel, values in head["usage"].items()}
            return CompiledSource(binary, usage, head["symbol"], self.architecture)
        binary, symbol, text = _compiled(source, name, self._options)
        warnings = _telling(text)
        if warnings:
            raise _refused(name, self.architecture, warnings)
        usage = read_usage(text)
        head = {"symbol": symbol, "usage": {kernel: asdict(values) for kernel, values in usage.items()}}
        self._cache.keep(key, json.dumps(head).encode() + b"\n" + binary)
        return CompiledSource(binary, usage, symbol, self.architecture)


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version.

    Raises
    ------
    CompilationError
        When there is no NVRTC.
    """
    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-python does not find it
        raise CompilationError(
            f"CUDA's compiler was not found: {str(error).splitlines()[0]}", hint="`pip install nvidia-cuda-nvrtc`"
        ) from error
    return int(major), int(minor)


def supported_architectures() -> list[str]:
    """Return what NVRTC compiles for, oldest first."""
    nvrtc_version()
    _, found = _nvrtc().nvrtcGetSupportedArchs()
    return [f"sm_{number}" for number in found]


def read_usage(log_text: str) -> dict[str, KernelUsage]:
    """Return what each kernel uses, of what the assembler said of it (``--ptxas-options=-v``).

    Examples
    --------
    >>> said = '''ptxas info : Compiling entry function 'add' for 'sm_90'
    ...     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
    ... ptxas info : Used 28 registers, used 1 barriers, 1024 bytes smem'''
    >>> read_usage(said)
    {'add': KernelUsage(registers=28, shared_nbytes=1024, stack_nbytes=8, spilled_nbytes=8)}
    """
    usage = {}
    parts = _ENTRY.split(log_text)
    for name, said in zip(parts[1::3], parts[3::3], strict=True):
        stack, used, shared = _STACK.search(said), _USED.search(said), _SHARED.search(said)
        if used is not None:
            nbytes = (int(stack[1]), int(stack[2]) + int(stack[3])) if stack else (0, 0)
            usage[name] = KernelUsage(int(used[1]), int(shared[1]) if shared else 0, *nbytes)
    return usage


def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompilationError(
            f"cuda-bindings cannot be imported: {error}", hint="`pip install cuda-bindings`"
        ) from error


def _compiled(source: str, name: str, options: Sequence[str]) -> tuple[bytes, str, str]:
    """Return the binary, the kernel's name in it, and the messages of a compilation."""
    nvrtc = _nvrtc()
    success = nvrtc.nvrtcResult.NVRTC_SUCCESS
    headers, names = [_HEADER.encode()], [_HEADER_NAME.encode()]
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), len(headers), headers, names)
    if result != success:
        raise CompilationError(f"NVRTC takes no source of kernel '{name}': {result.name}")
    try:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
        encoded = [option.encode() for option in options]
        [result] = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        text = _read(nvrtc, "ProgramLog", program).decode(errors="replace").rstrip("\0")
        if result != success:
            raise _refused(name, options[0].rpartition("=")[2], _telling(text) or [result.name])
        result, symbol = nvrtc.nvrtcGetLoweredName(program, name.encode())
        if result != success:
            raise CompilationError(f"the source of kernel '{name}' has no kernel of that name: {result.name}")
        return _read(nvrtc, "CUBIN", program), symbol.decode(), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: Any, what: str, program: Any) -> bytes:
    _, nbytes = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    data: bytes = b" " * nbytes  # which NVRTC fills: cuda-python takes no other kind of buffer
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data


def _telling(text: str) -> list[str]:
    """Return the lines of a compiler's messages that tell of an error or a warning."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if _MESSAGE.search(line) and _REMARK not in line]


def _refused(name: str, architecture: str, messages: Sequence[str]) -> CompilationError:
    return CompilationError(
        f"NVRTC refuses kernel '{name}' for {architecture}: {'; '.join(messages[:_ERROR_LINES])}",
        hint="KAGENT_LOGS=codegen=debug prints the sources of generated kernels",
    )
