"""Loading a C text as a library of functions, once per process."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kagent_core.errors import CompilationError
from kagent_core.inspect.logs import get_logger
from kagent_core.native.cache import Entry, LibraryCache, cache_key
from kagent_core.native.compiler import Compiler
from kagent_core.native.pieces import PiecedText

_PYTHON_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.py_object, ctypes.c_void_p)


@dataclass(frozen=True)
class Library:
    """A C text, compiled and loaded. It stays loaded until the process ends.

    Parameters
    ----------
    key
        The text's key in the cache.
    path
        The shared library.
    source
        The C file, for people to read.
    compile_ms
        How long the compiler took; 0 when the library was in the cache.
    from_cache
        Whether the library was in the cache.
    """

    key: str
    path: Path
    source: Path
    compile_ms: float
    from_cache: bool
    _handle: ctypes.CDLL = field(repr=False, compare=False)

    def function(self, name: str) -> Callable[[int], None]:
        """Return a function of the library, ``void name(const int64_t *table)``; it is given the table's address.

        The call releases Python's lock. ``omp parallel`` in it takes as many threads as torch is set to use, in a
        thread that torch has told so: torch tells a thread when it first runs a parallel operator or
        ``torch.get_num_threads()`` in it.

        Raises
        ------
        CompilationError
            When the library has no such function.
        """
        try:
            function = self._handle[name]
        except AttributeError:
            raise self._has_no(name) from None
        function.restype = None
        function.argtypes = (ctypes.c_void_p,)
        call: Callable[[int], None] = function
        return call

    def python_function(self, name: str) -> Callable[[Any, int], int]:
        """Return a function of the library that looks at a Python object: ``int64_t name(void *, int64_t *table)``.

        It is given the object and the table's address. The call keeps Python's lock.

        Raises
        ------
        CompilationError
            When the library has no such function.
        """
        try:
            call: Callable[[Any, int], int] = _PYTHON_FUNCTION((name, self._handle))
        except AttributeError:
            raise self._has_no(name) from None
        return call

    def _has_no(self, name: str) -> CompilationError:
        return CompilationError(
            f"compiled library '{self.path}' has no function '{name}'", hint=f"the C source is '{self.source}'"
        )


def load(source: str | PiecedText, cache_dir: Path, compiler: Compiler) -> Library:
    """Compile a C text, unless the cache has it, and load it.

    The same text is compiled once per process, also when several threads ask at once: the others wait.

    Raises
    ------
    CompilationError
        When the text cannot be compiled, or the library cannot be loaded.
    ConfigError
        When the cache directory belongs to somebody else, or others may write to it.
    """
    return _loaders.of(cache_dir).load(source, compiler)


class _Loader:
    """The libraries that were loaded from one cache."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache = LibraryCache(cache_dir)
        self._libraries: dict[str, Future[Library]] = {}
        self._lock = threading.Lock()

    def load(self, source: str | PiecedText, compiler: Compiler) -> Library:
        key = cache_key(source, compiler)
        with self._lock:
            future = self._libraries.get(key)
            ours = future is None
            if future is None:
                future = self._libraries[key] = Future()
        if ours:
            try:
                future.set_result(self._load(key, source, compiler))
            except BaseException as error:  # noqa: BLE001  those who wait must hear of an interrupt, too; raised below
                with self._lock:
                    del self._libraries[key]  # the next one tries again
                future.set_exception(error)
        return future.result()

    def _load(self, key: str, source: str | PiecedText, compiler: Compiler, *, rebuild: bool = False) -> Library:
        entry = self._cache.entry(source, compiler, rebuild=rebuild)
        try:
            handle = ctypes.CDLL(str(entry.path))
        except OSError as error:
            if not entry.from_cache:
                raise _not_loadable(entry, error) from error
            # whole, but made for other libraries than this machine has, or another process removed it meanwhile
            return self._load(key, source, compiler, rebuild=True)
        how = "found in the cache" if entry.from_cache else f"compiled in {entry.compile_ms:.0f} ms"
        get_logger("codegen").debug("%s: %s, %s", key, how, entry.path)
        return Library(key, entry.path, entry.source, entry.compile_ms, entry.from_cache, handle)


class _Loaders:
    """One loader per cache directory of this process."""

    def __init__(self) -> None:
        self.forget()

    def of(self, cache_dir: Path) -> _Loader:
        """Return the loader of a cache directory."""
        with self._lock:
            return self._loaders.setdefault(cache_dir, _Loader(cache_dir))

    def forget(self) -> None:
        """Start afresh, as a forked process must: the threads that were compiling are not in it."""
        self._lock = threading.Lock()
        self._loaders: dict[Path, _Loader] = {}


def _not_loadable(entry: Entry, error: OSError) -> CompilationError:
    return CompilationError(
        f"compiled library '{entry.path}' cannot be loaded: {error}", hint=f"the C source is '{entry.source}'"
    )


_loaders = _Loaders()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loaders.forget)
