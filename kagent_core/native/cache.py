"""A cache of shared libraries, addressed by all that decides what is in them.

An entry is two files: ``<key>.c`` for people to read, and ``<key>-<digest>.so``, whose name carries the digest of
its own bytes. So an entry appears in one atomic rename, processes that build the same one at once do not disturb
each other, and a file that was damaged later is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kagent_core.errors import CompilationError
from kagent_core.inspect.logs import get_logger
from kagent_core.native.binaries import BinaryCache
from kagent_core.native.compiler import Compiler, first_errors, run_tool
from kagent_core.native.machine import machine_identity
from kagent_core.native.pieces import PiecedText, processors
from kagent_core.native.private import PrivateDirectory, scratch

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


def cache_key(source: str | PiecedText, compiler: Compiler) -> str:
    """Return the key of a C text: a digest of the text, the flags, the compiler and the machine."""
    parts = (
        str(source),
        *("flags", *compiler.flags),
        *("libraries", *compiler.libraries),
        *("compiler", *compiler.command, compiler.version),
        *("machine", *machine_identity()),
    )
    return BinaryCache.key(*parts)


class LibraryCache:
    """The shared libraries in ``<cache_dir>/native``. Safe to use from many threads and processes at once.

    Parameters
    ----------
    cache_dir
        The directory of the config key ``cache_dir``. Where it cannot be written, libraries go to a private
        temporary directory, which ends with the process.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._directory = PrivateDirectory(cache_dir / SUBDIRECTORY)

    def entry(self, source: str | PiecedText, compiler: Compiler, *, rebuild: bool = False) -> Entry:
        """Return the library of a C text, compiled if it is not there or damaged, or if a rebuild is asked for.

        A text in pieces is compiled by as many processes as there are processors.

        Raises
        ------
        CompilationError
            When the compiler fails.
        ConfigError
            When the directory belongs to somebody else, or others may write to it.
        """
        key = cache_key(source, compiler)
        try:
            directory = self._directory.ready(key)
            return (None if rebuild else _find(directory, key)) or _build(directory, key, source, compiler)
        except OSError as error:
            directory = self._directory.fallback(key, error)
        return _build(directory, key, source, compiler)


def _find(directory: Path, key: str) -> Entry | None:
    """Return an entry whose bytes are what its name says, and remove those whose bytes are not."""
    for path in directory.glob(f"{key}-*.so"):
        with contextlib.suppress(OSError):  # gone again: another process removed it
            if path.name == _name(key, path.read_bytes()):
                return Entry(path, directory / f"{key}.c", 0.0, from_cache=True)
            get_logger("codegen").debug("%s is damaged and is compiled again", path)
            path.unlink()
    return None


def _build(directory: Path, key: str, source: str | PiecedText, compiler: Compiler) -> Entry:
    text = directory / f"{key}.c"
    with scratch(directory, ".c") as file:
        file.write_text(str(source), encoding="utf-8")
        file.replace(text)
    shares = source.shares(processors()) if isinstance(source, PiecedText) else []
    with scratch(directory, ".so") as file:
        start = time.perf_counter()
        if len(shares) > 1:
            _compile_shares(compiler, text, shares, file)
        else:
            _run(compiler, compiler.command_line(text, file), text)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        path = directory / _name(key, file.read_bytes())
        file.replace(path)
    return Entry(path, text, elapsed_ms, from_cache=False)


def _compile_shares(compiler: Compiler, source: Path, shares: Sequence[tuple[str, ...]], output: Path) -> None:
    """Compile shares of a text, all at once, and link them."""
    with contextlib.ExitStack() as files, ThreadPoolExecutor(len(shares)) as threads:
        objects = [files.enter_context(scratch(output.parent, ".o")) for _ in shares]
        commands = [compiler.object_command_line(source, *made) for made in zip(objects, shares, strict=True)]
        list(threads.map(lambda command: _run(compiler, command, source), commands))
        _run(compiler, compiler.link_command_line(objects, output), source)


def _run(compiler: Compiler, command: tuple[str, ...], source: Path) -> None:
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
