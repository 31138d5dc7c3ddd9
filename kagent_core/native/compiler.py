"""Finding a C compiler that works on this machine."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kagent_core.errors import ConfigError
from kagent_core.native.flags import SHARED, FlagSet, candidates, no_threads_reason
from kagent_core.native.openmp import mapped_runtimes, torch_runtime

Kind = Literal["gcc", "clang", "zig"]

_PROBE_FUNCTION = "probe"
# One vector of math and one parallel loop. It starts no thread: a pool that is there does not survive a fork.
_PROBE = """\
__attribute__((simd("notinbranch"), const, nothrow)) float expf(float);
void probe(float *x) {
  #pragma omp parallel for simd num_threads(1)
  for (int i = 0; i < 64; i++) x[i] = expf(x[i]);
}
"""
_PROBE_SECONDS = 120  # zig builds its C library stubs on its first call


@dataclass(frozen=True)
class Compiler:
    """A C compiler that was tried and works.

    Parameters
    ----------
    command
        How it is called, without any flag.
    kind
        Whose flags it takes.
    version
        The first line of what it says of itself.
    flags
        Flags before the source.
    libraries
        What the linker gets after the source.
    single_thread
        Why ``omp parallel`` runs on one thread; None when it uses as many as torch is set to use.
    """

    command: tuple[str, ...]
    kind: Kind
    version: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    single_thread: str | None = None

    def command_line(self, source: Path, output: Path) -> tuple[str, ...]:
        """Return the command that compiles one C file into a shared library."""
        return (*self.command, *self.flags, str(source), "-o", str(output), *self.libraries)

    def object_command_line(self, source: Path, output: Path, more: Sequence[str]) -> tuple[str, ...]:
        """Return the command that compiles one C file, with some more flags, into an object file."""
        flags = (flag for flag in self.flags if flag != SHARED)
        return (*self.command, *flags, *more, "-c", str(source), "-o", str(output))

    def link_command_line(self, objects: Sequence[Path], output: Path) -> tuple[str, ...]:
        """Return the command that makes a shared library of object files."""
        return (*self.command, *self.flags, *map(str, objects), "-o", str(output), *self.libraries)


@dataclass(frozen=True)
class _Search:
    compiler: Compiler | None
    reason: str


def find_compiler() -> Compiler | None:
    """Find the C compiler: the environment's ``CC``, else gcc, clang or the package ``ziglang``.

    It is tried on a small program first. What is found is remembered, for as long as ``CC`` and ``PATH`` stay as
    they are.

    Raises
    ------
    ConfigError
        When ``CC`` names a program that does not exist.
    """
    return _searched().compiler


def why_no_compiler() -> str:
    """Say what `find_compiler` looked for and why nothing of it works; empty when it found one."""
    return _searched().reason


def _searched() -> _Search:
    with _searching.lock:
        return _search(os.environ.get("CC", ""), os.environ.get("PATH"))


class _Searching:
    """Has those wait who ask while another thread searches."""

    def __init__(self) -> None:
        self.unlock()

    def unlock(self) -> None:
        """Let a forked process search: the thread that was searching is not in it."""
        self.lock = threading.Lock()


_searching = _Searching()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_searching.unlock)


@functools.cache
def _search(cc: str, path: str | None) -> _Search:
    failures = []
    for command in [_chosen(cc, path)] if cc.strip() else _installed(path):
        found = _try(command)
        if isinstance(found, Compiler):
            return _Search(found, "")
        failures.append(f"{shlex.join(command)}: {found}")
    looked = f"CC is '{cc}'" if cc.strip() else "looked for gcc and clang on PATH and for the Python package ziglang"
    return _Search(None, "; ".join([f"no C compiler works here ({looked})", *failures]))


def _chosen(cc: str, path: str | None) -> tuple[str, ...]:
    hint = "set CC to a C compiler such as gcc, or unset it: then gcc, clang and ziglang are looked for"
    try:
        words = shlex.split(cc)
    except ValueError as error:
        raise ConfigError(f"environment variable CC is '{cc}', expected a command: {error}", hint=hint) from None
    program = shutil.which(words[0], path=path) if words else None
    if program is None:
        raise ConfigError(f"environment variable CC is '{cc}', expected a C compiler that exists", hint=hint)
    # not resolved: a program such as ccache goes by the name of the link
    return (str(Path(program).absolute()), *words[1:])


def _installed(path: str | None) -> Iterator[tuple[str, ...]]:
    for name in ("gcc", "clang"):
        program = shutil.which(name, path=path)
        if program is not None:
            yield (str(Path(program).absolute()),)
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "cc")


def _try(command: tuple[str, ...]) -> Compiler | str:
    """Return a compiler with the first flags that work, or why none do."""
    try:
        about = run_tool((*command, "--version"), timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if about.returncode != 0 or not about.stdout.strip():
        return f"--version failed: {first_errors(about.stderr, 1) or f'exit code {about.returncode}'}"
    kind = _kind_of(command, about.stdout)
    version = about.stdout.strip().splitlines()[0]
    runtime = torch_runtime()
    single_thread, failure = no_threads_reason(kind, runtime), None
    for choice in candidates(kind, runtime):
        problem = _probe(command, choice)
        if problem is None:
            why = None if choice.threads else single_thread or failure
            return Compiler(command, kind, version, choice.flags, choice.libraries, why)
        failure = failure or problem
    return failure or "there are no flags for it"


def _kind_of(command: tuple[str, ...], version: str) -> Kind:
    if "ziglang" in command or Path(command[0]).stem == "zig":
        return "zig"
    # macOS calls its clang gcc; gcc under the name of cc does not say gcc
    return "clang" if "clang" in version.lower() else "gcc"


def _probe(command: tuple[str, ...], choice: FlagSet) -> str | None:
    """Compile, load and run a small program; return what went wrong."""
    with tempfile.TemporaryDirectory(prefix="kagent-", ignore_cleanup_errors=True) as directory:
        source, output = Path(directory, "probe.c"), Path(directory, "probe.so")
        source.write_text(_PROBE, encoding="utf-8")
        compiler = Compiler(command, "gcc", "", choice.flags, choice.libraries)
        before = mapped_runtimes()
        try:
            done = run_tool(compiler.command_line(source, output), timeout=_PROBE_SECONDS)
            if done.returncode != 0:
                return f"cannot compile: {first_errors(done.stderr, 1) or f'exit code {done.returncode}'}"
            values = (ctypes.c_float * 64)()
            ctypes.CDLL(str(output))[_PROBE_FUNCTION](values)
        except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
            return f"cannot load what it compiles: {error}"
    if list(values) != [1.0] * 64:
        return f"exp(0) came out as {values[0]}"
    second = mapped_runtimes() - before if before else ()
    return f"its code brings a second OpenMP runtime, {', '.join(sorted(second))}" if second else None


def run_tool(command: tuple[str, ...], *, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a compiler, with its messages in English."""
    environment: Mapping[str, str] = os.environ | {"LC_ALL": "C"}
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout,
    )


def first_errors(messages: str, count: int) -> str:
    """Return the first lines of a compiler's messages that tell of an error, else the first lines."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "undefined" in line.lower()]
    return "\n".join((errors or lines)[:count])
