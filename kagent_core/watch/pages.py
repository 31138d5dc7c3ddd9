"""Which pages of this process's memory were written: asked of Linux, which keeps the books anyway.

A page that is watched is write-protected; the kernel lifts the protection by itself when it is written, whoever writes
and through whatever name, and keeps a mark. Asking for the marks of 10 MB takes a few microseconds. It needs Linux 6.7
or later, userfaultfd (which containers may forbid) and private memory that is not a file's.

Follows ``Documentation/admin-guide/mm/userfaultfd.rst`` (asynchronous write-protection) and ``pagemap.rst``
(``PAGEMAP_SCAN``) of the Linux kernel.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

_SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282, "loongarch64": 282}
"""Number of userfaultfd."""

_API = 0xAA
_USER_MODE_ONLY = 1
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_REGISTER_MODE_WP = 2
_SCAN_WP_MATCHING, _SCAN_CHECK_WPASYNC = 1, 2
_PAGE_IS_WRITTEN = 1 << 1

MOST_SPANS = 32
"""Spans of written pages that are kept apart, for each watched memory; where there are more, all of it counts."""

Span = tuple[int, int]
"""Begin and end, as addresses."""


def _ioctl_number(direction: int, kind: int, number: int, nbytes: int) -> int:
    return direction << 30 | nbytes << 16 | kind << 8 | number


_UFFDIO_API = _ioctl_number(3, _API, 0x3F, 24)
_UFFDIO_REGISTER = _ioctl_number(3, _API, 0x00, 32)
_PAGEMAP_SCAN = _ioctl_number(3, ord("f"), 16, 96)


Lost = TypeVar("Lost")


class PagesError(Exception):
    """Why pages cannot be watched."""


class WatchedPages:
    """Some memory whose pages are watched.

    Attributes
    ----------
    begin, end
        Addresses, of whole pages.
    """

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self._written: list[Span] = []

    def take_written(self) -> list[Span]:
        """Return what was noted as written since this was called last: spans of whole pages, which may overlap."""
        spans, self._written = self._written, []
        return spans

    def note(self, begin: int, end: int) -> None:
        """Note that a span was written, of which some pages are these."""
        self._written.append((max(begin, self.begin), min(end, self.end)))
        if len(self._written) > MOST_SPANS:
            self._written = [(self.begin, self.end)]


class PageWatcher:
    """Watches pages of this process. One instance serves all: asking takes the marks away.

    Attributes
    ----------
    pagemap
        File descriptor of the process's page map.

    Raises
    ------
    PagesError
        When this system does not let pages be watched.
    """

    def __init__(self) -> None:
        import fcntl

        self._ioctl = fcntl.ioctl
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[WatchedPages] = weakref.WeakSet()
        self._process = os.getpid()
        self._region = (ctypes.c_uint64 * 3)()
        self._faults = _open_userfaultfd(self._ioctl)
        try:
            self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._try()
        except OSError as error:
            raise PagesError(f"this kernel does not tell which pages were written ({error}); Linux 6.7 does") from error

    def watch(self, memory: Sequence[tuple[int, int]]) -> list[WatchedPages | str]:
        """Watch some memory.

        Parameters
        ----------
        memory
            Address and length in bytes of each piece.

        Returns
        -------
        list
            For each piece its pages, or why they cannot be watched.
        """
        private = _private_memory()
        return [self._watch(address, nbytes, private) for address, nbytes in memory]

    def _watch(self, address: int, nbytes: int, private: Sequence[tuple[int, int]]) -> WatchedPages | str:
        size = mmap.PAGESIZE
        begin, end = address // size * size, -(-(address + nbytes) // size) * size
        if not _covered(begin, end, private):
            return "other processes may write it, or it is a file's"
        pages = WatchedPages(begin, end)
        argument = bytearray(struct.pack("4Q", begin, end - begin, _REGISTER_MODE_WP, 0))
        with self._lock:
            try:
                self._ioctl(self._faults, _UFFDIO_REGISTER, argument)
                if self._scan(pages):
                    self._note([(begin, end)])
            except OSError as error:
                self._note([(begin, end)])  # what was scanned before has lost its marks
                return str(error)
            self._watched.add(pages)
        return pages

    def note_all(self, scan: Callable[[], tuple[list[Span], Lost]]) -> Lost | None:
        """Tell all that watch some pages what a scan has found written, and return what else it returns.

        None, without a scan, in a child process.
        """
        if os.getpid() != self._process:
            return None
        with self._lock:
            written, lost = scan()
            if written:
                self._note(written)
        return lost

    def _note(self, written: Sequence[Span]) -> None:
        """Tell all that watch some pages that these were written: their marks are gone now."""
        for pages in self._watched:
            for begin, end in written:
                if pages.begin < end and begin < pages.end:
                    pages.note(begin, end)

    def _scan(self, pages: WatchedPages) -> bool:
        """Take the marks of some pages away, and return whether there were any."""
        written = False
        begin = pages.begin
        while begin < pages.end:
            argument = bytearray(
                struct.pack(
                    *("12Q", 96, _SCAN_WP_MATCHING | _SCAN_CHECK_WPASYNC, begin, pages.end, 0),
                    *(ctypes.addressof(self._region), 1, 0, 0, _PAGE_IS_WRITTEN, 0, _PAGE_IS_WRITTEN),
                )
            )
            found = self._ioctl(self.pagemap, _PAGEMAP_SCAN, argument)
            written = written or found > 0
            # it ends early where what it has found fills the one region that it is given
            begin = struct.unpack_from("Q", argument, 32)[0]
        return written

    def _try(self) -> None:
        """Watch a page, and see whether what is written there is told."""
        with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as memory:
            view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(memory)
            try:
                (pages,) = self.watch([(ctypes.addressof(view), mmap.PAGESIZE)])
                if isinstance(pages, str):
                    raise OSError(errno.ENOTSUP, pages)
                before = self._scan(pages)
                view[0] = b"\1"
                told = not before and self._scan(pages)
            finally:
                del view
        if not told:
            raise OSError(errno.ENOTSUP, "a written page was not told")


def _private_memory() -> list[tuple[int, int]]:
    """Return begin and end of the memory that only this process writes and that is no file's, in ascending order."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode, *_ = line.split(maxsplit=5)
        if permissions.endswith("p") and inode == "0":
            begin, end = (int(part, 16) for part in span.split("-"))
            if found and found[-1][1] == begin:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
    return found


def _covered(begin: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether one of some spans, in ascending order, covers another one."""
    position = bisect.bisect_right(spans, (begin, sys.maxsize)) - 1
    return position >= 0 and end <= spans[position][1]


def _open_userfaultfd(ioctl: Callable[..., int]) -> int:
    """Return a file descriptor of userfaultfd with asynchronous write-protection."""
    number = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        raise PagesError(f"{sys.platform} on {platform.machine()} does not tell which pages were written")
    libc = ctypes.CDLL(None, use_errno=True)
    # for user mode only, which needs no privilege: what the kernel writes for a program is marked all the same
    descriptor = int(libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY))
    if descriptor < 0:
        raise PagesError(f"userfaultfd is not allowed here ({os.strerror(ctypes.get_errno())})")
    try:
        ioctl(descriptor, _UFFDIO_API, bytearray(struct.pack("3Q", _API, _WP_ASYNC | _WP_UNPOPULATED, 0)))
    except OSError as error:
        os.close(descriptor)
        raise PagesError(f"this kernel has no asynchronous write-protection ({error}); Linux 6.7 has") from error
    return descriptor


@functools.cache
def page_watcher() -> PageWatcher | str:
    """Return the process's watcher, or why there is none."""
    try:
        return PageWatcher()
    except PagesError as error:
        return str(error)
