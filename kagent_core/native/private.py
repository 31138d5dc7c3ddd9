"""Directories that code is loaded from: only their owner may write there."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kagent_core.errors import ConfigError
from kagent_core.inspect.logs import get_logger

_SHELF_DIGITS = 2


class PrivateDirectory:
    """A directory of a cache, made when it is first wanted. Safe to use from many threads and processes at once.

    Entries lie in subdirectories by the first digits of their keys: whoever looks for an entry reads a whole directory.

    Parameters
    ----------
    path
        The directory. Where it cannot be written, a private temporary directory takes its place, which ends with the
        process.
    """

    def __init__(self, path: Path) -> None:
        self._directory = path
        self._temporary: Path | None = None
        self._lock = threading.Lock()

    def ready(self, key: str) -> Path:
        """Return the subdirectory of a key, made if need be. Code is never loaded from where others can write.

        Raises
        ------
        ConfigError
            When it belongs to somebody else, or others may write to it.
        OSError
            When it cannot be made.
        """
        if self._temporary is not None:
            return _shelf(self._temporary, key)
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self._directory.mkdir(mode=0o700)
        _check_private(self._directory)
        return _shelf(self._directory, key)

    def fallback(self, key: str, error: OSError) -> Path:
        """Return a key's subdirectory of a temporary directory in its place, and say why once."""
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
            return _shelf(self._temporary, key)


def _shelf(directory: Path, key: str) -> Path:
    shelf = directory / key[:_SHELF_DIGITS]
    with contextlib.suppress(FileExistsError):
        shelf.mkdir(mode=0o700)
    return shelf


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


@contextlib.contextmanager
def scratch(directory: Path, suffix: str) -> Iterator[Path]:
    """Yield a new file in a directory, which is gone afterwards unless it was renamed."""
    handle, name = tempfile.mkstemp(prefix="tmp-", suffix=suffix, dir=directory)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
