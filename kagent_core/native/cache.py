"""A cache of shared libraries, addressed by all that decides what is in them.

An entry is two files: ``<key>.c`` for people to read, and ``<key>-<digest>.so``, whose name carries the digest of
its own bytes. So an entry appears in one atomic rename, processes that build the same one at once do not disturb
each other, and a file that was damaged later is noticed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shlex
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kagent_core.errors import CompilationError, ConfigError
from kagent_core.inspect.logs import get_logger
from kagent_core.native.compiler import Compiler, first_errors, run_tool
from kagent_core.native.machine import machine_identity

SUBDIRECTORY = "native"
_HEX_DIGITS = 32
_ERROR_LINES = 5


@dataclass(frozen=True)
class Entry:
    """A shared library on disk.

    Parameters
    ----------
    path
        The library.
    source
        The C file that it was made from.
    compile_ms
        How long the compiler took; 0 when it was not needed.
    from_cache
        Whether the library was there already.
    """

    path: Path
    source: Path
    compile_ms: float
    from_cache: bool


def cache_key(source: str, compiler: Compiler) -> str:
    """Return the key of a C text: a digest of the text, the flags, the compiler and the machine."""
    parts = (
        source,
        *("flags", *compiler.flags),
        *("libraries", *compiler.libraries),
        *("compiler", *compiler.command, compiler.version),
        *("machine", *machine_identity()),
    )
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # with their lengths, so that no two lists read alike
    return digest.hexdigest()[:_HEX_DIGITS]


class LibraryCache:
    """The shared libraries in ``<cache_dir>/native``. Safe to use from many threads and processes at once.

    Parameters
    ----------
    cache_dir
        The directory of the config key ``cache_dir``. Where it cannot be written, libraries go to a private
        temporary directory, which ends with the process.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._directory = cache_dir / SUBDIRECTORY
        self._temporary: Path | None = None
        self._lock = threading.Lock()

    def entry(self, source: str, compiler: Compiler, *, rebuild: bool = False) -> Entry:
        """Return the library of a C text, compiled if it is not there or damaged, or if a rebuild is asked for.

        Raises
        ------
        CompilationError
            When the compiler fails.
        ConfigError
            When the directory belongs to somebody else, or others may write to it.
        """
        key = cache_key(source, compiler)
        try:
            directory = self._prepared()
            return (None if rebuild else _find(directory, key)) or _build(directory, key, source, compiler)
        except OSError as error:
            directory = self._fallback(error)
        return _build(directory, key, source, compiler)

    def _prepared(self) -> Path:
        """Return the directory, made if need be. Code is never loaded from one that others can write to."""
        if self._temporary is not None:
            return self._temporary
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self._directory.mkdir(mode=0o700)
        _check_private(self._directory)
        return self._directory

    def _fallback(self, error: OSError) -> Path:
        with self._lock:
            if self._temporary is None or not self._temporary.exists():
                self._temporary = Path(tempfile.mkdtemp(prefix="kagent-"))
                atexit.register(_remove, self._temporary, os.getpid())
                get_logger("codegen").warning(
                    "cannot write to the cache directory '%s' (%s): compiling into '%s', for this process alone",
                    self._directory,
                    error.strerror or error,
                    self._temporary,
                )
            return self._temporary


def _remove(directory: Path, owner: int) -> None:
    """Remove a temporary directory, unless this is a fork of the process whose it is."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def _check_private(directory: Path) -> None:
    if os.name != "posix":
        return
    found = directory.stat()
    elsewhere = "set the config key cache_dir to a directory of your own"
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"cache directory '{directory}' is a file, expected a directory", hint=elsewhere)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"cache directory '{directory}' belongs to user {found.st_uid}, expected the current user, {os.geteuid()}:"
            " code is not loaded from it",
            hint=elsewhere,
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"cache directory '{directory}' has mode {stat.S_IMODE(found.st_mode):04o}, expected that only its owner"
            " may write: code is not loaded from it",
            hint=f"empty it and run `chmod 700 {shlex.quote(str(directory))}`, or {elsewhere}",
        )


def _find(directory: Path, key: str) -> Entry | None:
    """Return an entry whose bytes are what its name says, and remove those whose bytes are not."""
    for path in directory.glob(f"{key}-*.so"):
        with contextlib.suppress(OSError):  # gone again: another process removed it
            if path.name == _name(key, path.read_bytes()):
                return Entry(path, directory / f"{key}.c", 0.0, from_cache=True)
            get_logger("codegen").debug("%s is damaged and is compiled again", path)
            path.unlink()
    return None


def _build(directory: Path, key: str, source: str, compiler: Compiler) -> Entry:
    text = directory / f"{key}.c"
    with _scratch(directory, ".c") as scratch:
        scratch.write_text(source, encoding="utf-8")
        scratch.replace(text)
    with _scratch(directory, ".so") as scratch:
        start = time.perf_counter()
        _compile(compiler, text, scratch)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        path = directory / _name(key, scratch.read_bytes())
        scratch.replace(path)
    return Entry(path, text, elapsed_ms, from_cache=False)


@contextlib.contextmanager
def _scratch(directory: Path, suffix: str) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix="tmp-", suffix=suffix, dir=directory)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _compile(compiler: Compiler, source: Path, output: Path) -> None:
    command = compiler.command_line(source, output)
    hint = f"the C source is '{source}'; the command was `{shlex.join(command)}`"
    try:
        done = run_tool(command)
    except OSError as error:
        raise CompilationError(f"{shlex.join(compiler.command)} could not be run: {error}", hint=hint) from error
    if done.returncode != 0:
        errors = first_errors(done.stderr, _ERROR_LINES) or "it printed nothing"
        raise CompilationError(
            f"{shlex.join(compiler.command)} failed with exit code {done.returncode} on generated code: {errors}",
            hint=hint,
        )


def _name(key: str, library: bytes) -> str:
    return f"{key}-{hashlib.sha256(library).hexdigest()[:_HEX_DIGITS]}.so"
