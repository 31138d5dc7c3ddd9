"""What machine this is, as far as compiled code can tell."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

# x86 names its features "flags", ARM "Features"
_CPU_FIELDS = ("model name", "flags", "features", "cpu part", "cpu variant")


@functools.cache
def machine_identity() -> tuple[str, ...]:
    """Return the CPU's model and features and the C library: code for one machine may not run on another."""
    return (platform.machine(), *(_cpu_fields() or (platform.processor(),)), _c_library())


def vector_nbytes() -> int:
    """Return the bytes of the widest vector registers that the CPU is known to have."""
    features = {feature for field in machine_identity() for feature in field.split()}
    return 64 if "avx512f" in features else 32 if "avx2" in features else 16


def vector_registers() -> int:
    """Return how many vector registers the CPU is known to have."""
    return 32 if vector_nbytes() == 64 or platform.machine().lower() in ("aarch64", "arm64") else 16


def _cpu_fields() -> tuple[str, ...]:
    found = []
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip().lower() in _CPU_FIELDS:
                    found.append(value.strip())
                if not line.strip():
                    break  # the first CPU speaks for all; there may be hundreds
    except OSError:
        return ()
    return tuple(found)


def _c_library() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):  # a C library of another make
        return ""
