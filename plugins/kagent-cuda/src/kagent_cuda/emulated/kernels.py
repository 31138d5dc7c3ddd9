"""Compiling CUDA C++ for the host."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kagent_core.errors import CompilationError
from kagent_core.native import Library, load
from kagent_cuda.emulated.memory import EmulationError
from kagent_cuda.emulated.toolchain import kernel_compiler, machine_compiler
from kagent_cuda.parameters import Place

MOST_PARAMETERS = 4096
"""Kernels with more are refused: of one byte each, so many fit into the 4 KiB that a launch can pass."""

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel can declare; beyond, a launch has to ask for dynamic shared memory."""

_DYNAMIC = re.compile(
    r"\bextern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:<>\s]+?)\s*(\w+)\s*\[\s*\]\s*;"
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel, compiled for the host.

    Attributes
    ----------
    name
        Of its function.
    library
        What it was compiled into.
    places
        Where each parameter lies in the parameter block, as the source's own signature has it.
    pointers
        Whether each parameter is a pointer.
    parameter_nbytes
        Bytes of the whole block.
    most_threads
        Threads of a block that its ``__launch_bounds__`` promises at most; 0 without.
    static_nbytes
        Bytes of shared memory that it declares.
    """

    name: str
    library: Library
    places: tuple[Place, ...]
    pointers: tuple[bool, ...]
    parameter_nbytes: int
    most_threads: int
    static_nbytes: int

    @functools.cached_property
    def entry(self) -> int:
        """Address of the function that runs one thread."""
        return ctypes.cast(self.library.function("kagent_entry"), ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    @functools.cached_property
    def touch(self) -> Callable[[int], None]:
        """Makes the shared memory of the calling thread."""
        return self.library.function("kagent_touch")


class Machine:
    """The library that runs kernels, and compiles what it runs.

    Parameters
    ----------
    cache_dir
        The directory of the config key ``cache_dir``.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._library = load("\n".join(map(_text, _MACHINE)), cache_dir, machine_compiler())
        self.launch = self._library.function("kagent_launch")
        self._image = self._library.function("kagent_image")

    def compile(self, source: str, name: str) -> EmulatedKernel:
        """Return a kernel of a source.

        Raises
        ------
        EmulationError
            When the source has no such kernel, or it is none that a device could run.
        CompilationError
            When the compiler refuses it; says why.
        """
        plain = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
        if not re.search(rf"\b__global__\b[^;{{]*\b{re.escape(name)}\s*\(", plain):
            raise EmulationError(f"the source has no kernel '{name}': expected '__global__ void {name}(...)'")
        text = f'{_text("device.h")}\n#line 1 "{name}.cu"\n{_pointers_to_dynamic(source)}\n'
        text += f'#line 1 "the launch of {name}"\nKAGENT_KERNEL({name}, {_bound(plain, name)})\n'
        try:
            library = load(text, self._cache_dir, kernel_compiler(self._library.path))
        except CompilationError as error:
            raise CompilationError(f"kernel '{name}': {error.message}", hint=error.hint) from error
        places, pointers, nbytes = _layout(library)
        kernel = EmulatedKernel(name, library, places, pointers, nbytes, _number(library, "kagent_bound"), 0)
        kernel.touch(0)
        static = self.image(kernel)[3]
        if static > STATIC_SHARED:
            raise EmulationError(
                f"kernel '{name}' declares {static} bytes of shared memory, expected at most {STATIC_SHARED}; "
                "more must be dynamic"
            )
        return EmulatedKernel(name, library, places, pointers, nbytes, kernel.most_threads, static)

    def image(self, kernel: EmulatedKernel) -> tuple[int, int, int, int]:
        """Return begin and end of a kernel's library, and address and bytes of the shared memory that it declares.

        Shared memory is of the calling thread, which must have made it: see `EmulatedKernel.touch`.
        """
        table = (ctypes.c_int64 * 4)(kernel.entry)
        self._image(ctypes.addressof(table))
        begin, end, shared, nbytes = table
        return begin, end, shared, nbytes - _TOUCHED


_MACHINE = ("state.h", "accesses.h", "machine.cpp")
_TOUCHED = 16
"""Bytes that device.h itself declares."""


@functools.cache
def _text(name: str) -> str:
    return resources.files("kagent_cuda.emulated").joinpath(name).read_text(encoding="utf-8")


def _pointers_to_dynamic(source: str) -> str:
    """Return a source whose dynamic shared memory is a pointer: that is all that C++ cannot be made to read."""

    def pointer(found: re.Match[str]) -> str:
        lines = found[0].count("\n") * "\n"
        kind, name = found[1].strip(), found[2]
        return f"static {kind} *const {name} = ({kind} *)kagent_dynamic_memory;{lines}"

    return _DYNAMIC.sub(pointer, source)


def _bound(plain: str, name: str) -> str:
    """Return the most threads of a block in a kernel's ``__launch_bounds__``, as it is written; 0 without."""
    found = re.search(rf"\b__global__\b([^;{{}}]*?)\b{re.escape(name)}\s*\(", plain)
    bounds = re.search(r"__launch_bounds__\s*\(([^,)]*)", found[1]) if found else None
    return bounds[1].strip() if bounds else "0"


def _number(library: Library, function: str) -> int:
    table = (ctypes.c_int64 * 1)()
    library.function(function)(ctypes.addressof(table))
    return int(table[0])


def _layout(library: Library) -> tuple[tuple[Place, ...], tuple[bool, ...], int]:
    table = (ctypes.c_int64 * (2 + 3 * MOST_PARAMETERS))()
    library.function("kagent_describe_kernel")(ctypes.addressof(table))
    count, nbytes = table[0], table[1]
    rows = [table[2 + 3 * n : 5 + 3 * n] for n in range(count)]
    return tuple((row[0], row[1]) for row in rows), tuple(bool(row[2]) for row in rows), nbytes
