"""The flags that each kind of C compiler gets."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kagent_core.native.symbols import vector_math_library

SHARED = "-shared"
"""What makes a shared library; in the way where an object file is made."""

# -O3 is for code that keeps a tile in registers: it unrolls the loops over the tile, which -O2 does not, and such
# code ran three times faster. The two that relax arithmetic change no value: no caller reads errno or the flags of
# floating-point exceptions. No product and sum are contracted, because eager PyTorch rounds after each.
_COMMON = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fPIC",
    SHARED,
    "-std=gnu11",
    "-w",
)
_X86 = ("x86_64", "AMD64", "i686", "i386")


@dataclass(frozen=True)
class FlagSet:
    """One way to call a compiler.

    Parameters
    ----------
    flags
        What stands before the source.
    libraries
        What stands after the source, for the linker.
    threads
        Whether ``omp parallel`` uses threads.
    """

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    threads: bool


def candidates(kind: str, runtime: Path | None) -> Iterator[FlagSet]:
    """Yield the sets of flags to try, the fastest code first.

    Parameters
    ----------
    kind
        ``gcc``, ``clang`` or ``zig``.
    runtime
        The OpenMP runtime that the code must join.
    """
    machine = ("-march=native",) if platform.machine() in _X86 else ("-march=native", "-mcpu=native")
    for threading, vectors, target in itertools.product(_threading(kind, runtime), _vector_math(kind), machine):
        vector_flags = ("-fveclib=libmvec",) if vectors else ()
        yield FlagSet(
            flags=(*_COMMON, target, *vector_flags, *threading.flags, *(("-pipe",) if kind == "gcc" else ())),
            libraries=(*threading.libraries, *map(str, vectors), "-lm"),
            threads=threading.threads,
        )


def no_threads_reason(kind: str, runtime: Path | None) -> str | None:
    """Say why a compiler's parallel code cannot join a runtime, or None when it can."""
    if kind == "gcc" or (runtime is not None and not _is_gnu(runtime)):
        return None
    theirs = "torch has no OpenMP runtime" if runtime is None else f"torch's OpenMP runtime is {runtime.name}"
    return f"{theirs}, and {kind} makes parallel code for LLVM's alone"


def _threading(kind: str, runtime: Path | None) -> Iterator[FlagSet]:
    if no_threads_reason(kind, runtime) is None:
        # gcc's own -lgomp comes last on its command line; the linker drops it when torch's library has it all
        joined = () if runtime is None or _is_default(runtime) else ("-Wl,--as-needed", str(runtime))
        # clang is told only to translate the pragmas: as a driver it would link a libomp of its own
        yield FlagSet(("-fopenmp",) if kind == "gcc" else ("-Xclang", "-fopenmp"), joined, threads=True)
    yield FlagSet(("-fopenmp-simd",), (), threads=False)


def _vector_math(kind: str) -> Iterator[tuple[Path, ...]]:
    """Yield the libraries of vector math that a compiler must be told of; gcc sees them in the declarations."""
    library = None if kind == "gcc" or platform.machine() not in _X86 else vector_math_library()
    if library is not None:
        yield (library,)  # by its path: without the C library's development files, nothing else finds it
    yield ()


def _is_gnu(runtime: Path) -> bool:
    return runtime.name.startswith("libgomp")


def _is_default(runtime: Path) -> bool:
    """Tell whether a runtime goes by the name that gcc links against anyway."""
    return runtime.name.startswith("libgomp.so.1")
