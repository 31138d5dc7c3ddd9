"""A cache of compiled programs as bytes, for devices whose drivers take such binaries back."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from kagent_core.inspect.logs import get_logger
from kagent_core.native.private import PrivateDirectory, scratch

_HEX_DIGITS = 32


class BinaryCache:
    """Binaries by all that decides what is in them. Safe to use from many threads and processes at once.

    A file's name carries the digest of its own bytes, so that one that was damaged later is noticed and not used.

    Parameters
    ----------
    directory
        Where they are kept; only its owner may write there. Where it cannot be written, they go to a private temporary
        directory, which ends with the process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = PrivateDirectory(directory)

    @staticmethod
    def key(*parts: str) -> str:
        """Return the key of what some texts decide: the source, options, compiler, device."""
        digest = hashlib.sha256()
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)  # with their lengths, so that no two lists read alike
        return digest.hexdigest()[:_HEX_DIGITS]

    def find(self, key: str) -> bytes | None:
        """Return the binary of a key, or None. One that is damaged is removed.

        Raises
        ------
        ConfigError
            When the directory belongs to somebody else, or others may write to it.
        """
        try:
            directory = self._directory.ready(key)
        except OSError as error:
            directory = self._directory.fallback(key, error)
        for path in directory.glob(f"{key}-*.bin"):
            with contextlib.suppress(OSError):  # gone again: another process removed it
                data = path.read_bytes()
                if path.name == _name(key, data):
                    return data
                get_logger("codegen").debug("%s is damaged and is made again", path)
                path.unlink()
        return None

    def keep(self, key: str, data: bytes) -> None:
        """Keep a binary.

        Raises
        ------
        ConfigError
            As `find`.
        """
        try:
            self._write(self._directory.ready(key), key, data)
        except OSError as error:
            self._write(self._directory.fallback(key, error), key, data)

    def forget(self, key: str) -> None:
        """Remove a binary that the driver does not take any more."""
        with contextlib.suppress(OSError):
            for path in self._directory.ready(key).glob(f"{key}-*.bin"):
                path.unlink()

    @staticmethod
    def _write(directory: Path, key: str, data: bytes) -> None:
        with scratch(directory, ".bin") as file:
            file.write_bytes(data)
            file.replace(directory / _name(key, data))


def _name(key: str, data: bytes) -> str:
    return f"{key}-{hashlib.sha256(data).hexdigest()[:_HEX_DIGITS]}.bin"
