"""Memory of the emulated device: poisoned, with pages around it that nobody may touch."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections import deque
from dataclasses import dataclass

POISON = 0xFF
"""Every byte that was never written: NaN in every float, -1 in every integer."""

ALIGNMENT = 16
"""Of allocations: what the widest access to memory needs. An allocation ends where its last page does, or so near."""

_PAGE = mmap.PAGESIZE
_QUARANTINE = 256
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class EmulationError(RuntimeError):
    """What a CUDA device would not have survived, or what it would have done in silence."""


@dataclass(frozen=True)
class Allocation:
    """One allocation.

    Attributes
    ----------
    address
        Of its first byte.
    nbytes
        How many it has.
    """

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        """Address behind its last byte."""
        return self.address + self.nbytes

    @property
    def _first_page(self) -> int:
        return self.address // _PAGE * _PAGE

    @property
    def _slack(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Address and bytes of what the pages have before and behind."""
        last = -(-self.end // _PAGE) * _PAGE
        return (self._first_page, self.address - self._first_page), (self.end, last - self.end)


class Memory:
    """All allocations of one device.

    Parameters
    ----------
    nbytes
        Of the whole device.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._addresses: list[int] = []
        self._live: dict[int, Allocation] = {}
        self._freed: deque[Allocation] = deque()

    def allocate(self, nbytes: int) -> Allocation:
        """Return new memory, poisoned.

        Raises
        ------
        MemoryError
            When the device, or the host, has not that much left.
        """
        if self._used + nbytes > self._nbytes:
            raise MemoryError(f"{nbytes} bytes wanted, {self._nbytes - self._used} of {self._nbytes} are left")
        taken = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        pages = -(-taken // _PAGE) * _PAGE
        base = _libc.mmap(None, pages + 2 * _PAGE, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if base == _FAILED or _libc.mprotect(base + _PAGE, pages, _READ_WRITE):
            raise MemoryError(f"the host gave no {nbytes} bytes for the emulated device")
        ctypes.memset(base + _PAGE, POISON, pages)
        allocation = Allocation(base + _PAGE + pages - taken, nbytes)
        self._live[allocation.address] = allocation
        bisect.insort(self._addresses, allocation.address)
        self._used += nbytes
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give memory back. Who still touches it is found out.

        Raises
        ------
        EmulationError
            When it is not allocated, or somebody wrote beside it.
        """
        if self._live.get(allocation.address) is not allocation:
            raise EmulationError(f"free of {allocation.address:#x}, which is not allocated")
        self._check_slack(allocation, "somebody")
        del self._live[allocation.address]
        self._addresses.remove(allocation.address)
        self._used -= allocation.nbytes
        first, pages = _pages(allocation)
        _libc.mprotect(first, pages, _NO_ACCESS)
        self._freed.append(allocation)
        if len(self._freed) > _QUARANTINE:
            first, pages = _pages(self._freed.popleft())
            _libc.munmap(first - _PAGE, pages + 2 * _PAGE)

    def write(self, allocation: Allocation, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes in."""
        address = self._checked(allocation, byte_offset, data.nbytes, "copy to the device")
        if data.nbytes:
            ctypes.memmove(address, bytes(data), data.nbytes)

    def read(self, allocation: Allocation, byte_offset: int, data: memoryview) -> None:
        """Copy bytes out."""
        address = self._checked(allocation, byte_offset, data.nbytes, "copy from the device")
        if data.nbytes:
            data.cast("B")[:] = ctypes.string_at(address, data.nbytes)

    def holding(self, address: int) -> Allocation | None:
        """Return the allocation that an address lies in; one right behind it counts, as of an empty tensor."""
        place = bisect.bisect_right(self._addresses, address)
        if place == 0:
            return None
        found = self._live[self._addresses[place - 1]]
        return found if address <= found.end else None

    def was_freed(self, address: int) -> bool:
        """Whether an address lies in memory that was freed not long ago."""
        return any(allocation.address <= address < allocation.end for allocation in self._freed)

    def check_guards(self, allocations: set[Allocation], who: str) -> None:
        """Raise where somebody wrote beside one of some allocations."""
        for allocation in allocations:
            self._check_slack(allocation, who)

    def all(self) -> list[Allocation]:
        """Return what is allocated, by address."""
        return [self._live[address] for address in self._addresses]

    def _checked(self, allocation: Allocation, byte_offset: int, nbytes: int, what: str) -> int:
        if self._live.get(allocation.address) is not allocation:
            raise EmulationError(f"{what}: the memory at {allocation.address:#x} was freed")
        if byte_offset < 0 or byte_offset + nbytes > allocation.nbytes:
            raise EmulationError(
                f"{what}: bytes {byte_offset} to {byte_offset + nbytes} of an allocation of {allocation.nbytes} bytes"
            )
        return allocation.address + byte_offset

    def _check_slack(self, allocation: Allocation, who: str) -> None:
        for address, nbytes in allocation._slack:
            if ctypes.string_at(address, nbytes) != bytes([POISON]) * nbytes:
                raise EmulationError(f"{who} wrote beside an allocation of {allocation.nbytes} bytes")


def _pages(allocation: Allocation) -> tuple[int, int]:
    """Return address and bytes of the pages of an allocation."""
    first = allocation._first_page
    end = -(-max(allocation.end, allocation.address + 1) // _PAGE) * _PAGE
    return first, end - first
