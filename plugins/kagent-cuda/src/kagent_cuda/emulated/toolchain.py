"""The C++ compiler that kernels of the emulated device are compiled with."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
from pathlib import Path

from kagent_core.errors import ConfigError
from kagent_core.native import Compiler
from kagent_core.native.compiler import Kind, first_errors, run_tool

_NAMES = ("g++", "clang++")
_COMMON = ("-x", "c++", "-std=gnu++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-w")
_MACHINE = ("-O2",)
# No product and sum are contracted, as on the device. Every access to memory calls the machine.
_KERNEL = (
    *("-O1", "-g1", "-gdwarf-4", "-ffp-contract=off", "-fwrapv", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    *("-fsanitize=thread,alignment,bounds", "-nostdlib"),
)
_KERNEL_BY_KIND = {"gcc": ("-fno-gnu-unique",), "clang": (), "zig": ()}


def why_missing() -> str | None:
    """Return why nothing can be emulated here, or None. Nothing is tried yet."""
    if not sys.platform.startswith("linux"):
        return f"emulation needs Linux, this is {sys.platform}"
    if _command() is None:
        wanted = os.environ.get("CXX", "").strip() or " or ".join(_NAMES)
        return f"emulation compiles with a C++ compiler, {wanted} was not found; install one, such as g++"
    return None


def machine_compiler() -> Compiler:
    """Return what compiles the machine."""
    command, kind, version = _found()
    return Compiler(command, kind, version, (*_COMMON, *_MACHINE), ("-lpthread",))


def kernel_compiler(machine: Path) -> Compiler:
    """Return what compiles kernels.

    Parameters
    ----------
    machine
        The library that they call.
    """
    command, kind, version = _found()
    flags = (*_COMMON, *_KERNEL, *_KERNEL_BY_KIND[kind])
    return Compiler(command, kind, version, flags, ("-x", "none", str(machine), "-lm", "-lc"))


def _command() -> tuple[str, ...] | None:
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        words = shlex.split(chosen)
        program = shutil.which(words[0])
        return None if program is None else (program, *words[1:])
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    return None if found is None else (found,)


def _found() -> tuple[tuple[str, ...], Kind, str]:
    command = _command()
    if command is None:
        raise ConfigError(f"no CUDA kernel can be emulated: {why_missing()}")
    return _about(command)


@functools.cache
def _about(command: tuple[str, ...]) -> tuple[tuple[str, ...], Kind, str]:
    done = run_tool((*command, "--version"))
    if done.returncode != 0 or not done.stdout.strip():
        raise ConfigError(f"{shlex.join(command)} --version failed: {first_errors(done.stderr, 1)}")
    version = done.stdout.strip().splitlines()[0]
    return command, "clang" if "clang" in version.lower() else "gcc", version
