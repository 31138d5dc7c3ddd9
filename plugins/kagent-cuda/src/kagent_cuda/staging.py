"""Pinned host memory, through which what is small goes to the device without anybody waiting."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

MOST_NBYTES = 1 << 20
"""What is larger than this is copied from where it lies: copying it twice on the host would cost more than waiting."""

_TOTAL_NBYTES = 4 << 20
_ALIGNMENT = 256


class Staging:
    """Pinned memory that is filled from its beginning until somebody has waited for the device.

    Parameters
    ----------
    driver
        ``cuda.bindings.driver``.
    checked
        Returns what the driver answers, or raises.
    """

    def __init__(self, driver: Any, checked: Callable[[tuple[Any, ...]], Any]) -> None:
        self._driver = driver
        self._checked = checked
        self._address: int | None = None
        self._used = 0

    def place(self, source: int, nbytes: int) -> int | None:
        """Copy host bytes into pinned memory and return where they are; None where there is no room for them.

        Parameters
        ----------
        source
            Their address.
        nbytes
            How many.
        """
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if nbytes > MOST_NBYTES or begin + nbytes > _TOTAL_NBYTES:
            return None
        if self._address is None:
            self._address = int(self._checked(self._driver.cuMemAllocHost(_TOTAL_NBYTES)))
        self._used = begin + nbytes
        ctypes.memmove(self._address + begin, source, nbytes)
        return self._address + begin

    def reuse(self) -> None:
        """Begin anew: the device has read all that was placed."""
        self._used = 0

    def close(self) -> None:
        """Give the memory back."""
        if self._address is not None:
            self._checked(self._driver.cuMemFreeHost(self._address))
            self._address = None
