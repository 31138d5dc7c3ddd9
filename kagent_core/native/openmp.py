"""Which OpenMP runtime torch uses, so that compiled code joins it and brings no second one.

Two runtimes in one process keep two pools of threads, and ``torch.set_num_threads`` governs only one of them.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from kagent_core.native.symbols import provider

_RUNTIME = re.compile(r"/lib(gomp|omp|iomp5)\b[^/]*\.(so|dylib)[^/]*$")
# torch's own libraries that call OpenMP, as the platforms name them
_TORCH_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")


def torch_runtime() -> Path | None:
    """Return the OpenMP runtime that torch is bound to, or None when torch was built without one.

    Imports torch, and so makes sure that its runtime is loaded before any compiled library asks for one: the
    loader then binds the library to it, where both go by the same name.
    """
    import torch

    for name in _TORCH_LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            return provider(ctypes.CDLL(str(path)), "omp_get_max_threads")
    return None


def mapped_runtimes() -> frozenset[str]:
    """Return the files of all OpenMP runtimes in this process; empty where the system has no ``/proc``."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return frozenset(path for path in paths if _RUNTIME.search(path))
