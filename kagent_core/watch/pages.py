"""Which pages of this process's memory were written: asked of Linux, which keeps the books anyway.

A page that is watched is write-protected; the kernel lifts the protection by itself when it is written, whoever writes
and through whatever name, and so marks it. Asking for the marks of 10 MB takes a few microseconds. It needs Linux 6.7
or later, userfaultfd (which containers may forbid) and memory that only this process writes.

A private mapping of a file is such memory once its pages are the process's own, which the first write to each makes
them: until then they are the file's, and change with it. So they are made its own before they are watched, as a write
that changes nothing would do. They are the file's again where somebody shortens it: once a file has changed, every page
of its own is asked about, which takes longer, and counts as written where it is the file's.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kagent_core.watch.mappings import PrivateMemory, Span, UnchangedFiles, own_pages

_SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282, "loongarch64": 282}
"""Number of userfaultfd."""

_API = 0xAA
_USER_MODE_ONLY = 1
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_REGISTER_MODE_WP = 2
_SCAN_WP_MATCHING, _SCAN_CHECK_WPASYNC = 1, 2
_PAGE_IS_WRITTEN = 1 << 1

MOST_SPANS = 256
"""Spans of written pages that are kept apart; where there are more, all that lies between them counts."""

NEAR = 1 << 18
"""Bytes between spans that are asked about together: to tell of so many pages that are not watched takes the kernel as
long as to be asked once more (0.5 µs). It passes over watched ones eight times as fast."""


def _ioctl_number(direction: int, kind: int, number: int, nbytes: int) -> int:
    return direction << 30 | nbytes << 16 | kind << 8 | number


_UFFDIO_API = _ioctl_number(3, _API, 0x3F, 24)
_UFFDIO_REGISTER = _ioctl_number(3, _API, 0x00, 32)
_PAGEMAP_SCAN = _ioctl_number(3, ord("f"), 16, 96)


class PagesError(Exception):
    """Why pages cannot be watched."""


@dataclass(frozen=True, slots=True)
class Area:
    """Spans that the kernel is asked about in one go. What lies between them is not watched, and not protected.

    Attributes
    ----------
    spans
        In ascending order.
    of_file
        Whether a private mapping of a file is among them.
    """

    spans: tuple[Span, ...]
    of_file: bool


class WatchedPages:
    """Spans of pages that are watched; made by `PageWatcher.watch`.

    Parameters
    ----------
    areas
        The spans, in ascending order.
    files
        What they are mapped from.

    Attributes
    ----------
    areas, files
        As above.
    spans
        The spans of all areas.
    """

    def __init__(self, areas: Sequence[Area], files: UnchangedFiles) -> None:
        self.files = files
        self._written: list[Span] = []
        self._set(areas)

    def _set(self, areas: Sequence[Area]) -> None:
        self.areas = tuple(areas)
        self.spans = [span for area in areas for span in area.spans]
        self._ends = [end for _, end in self.spans]

    def take_written(self) -> list[Span]:
        """Return what was noted as written since this was called last: spans of whole pages, which may overlap."""
        if not self._written:
            return []
        spans, self._written = self._written, []
        return spans

    def note(self, begin: int, end: int) -> None:
        """Note that a span was written, of which some pages may be these."""
        for position in range(bisect.bisect_right(self._ends, begin), len(self.spans)):
            first, last = self.spans[position]
            if first >= end:
                break
            self._written.append((max(begin, first), min(end, last)))
        if len(self._written) > MOST_SPANS:
            self._written = [(min(begin for begin, _ in self._written), max(end for _, end in self._written))]

    def forget(self, pages: Collection[int]) -> None:
        """Watch some pages, given by their addresses, no more."""
        left = [Area(tuple(_without(area.spans, pages)), area.of_file) for area in self.areas]
        self._set([area for area in left if area.spans])


def _without(spans: Sequence[Span], pages: Collection[int]) -> Iterator[Span]:
    for begin, end in spans:
        for page in sorted(page for page in pages if begin <= page < end):
            if begin < page:
                yield begin, page
            begin = page + mmap.PAGESIZE
        if begin < end:
            yield begin, end


class PageWatcher:
    """Watches pages of this process. One instance serves all: who protects a page again takes its mark away.

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

    def watch(self, spans: Sequence[Span]) -> tuple[WatchedPages, dict[Span, str]]:
        """Watch some memory.

        Parameters
        ----------
        spans
            Of whole pages, in ascending order, apart from each other.

        Returns
        -------
        tuple
            What is watched; and the spans that cannot be, with the reasons.
        """
        private = PrivateMemory.now()
        kinds = {span: private.kind(span) for span in spans}
        refused = {span: "other processes may write their memory" for span, kind in kinds.items() if kind is None}
        of_files = [span for span, kind in kinds.items() if kind == "file"]
        files = UnchangedFiles(private.files_of(of_files))
        refused |= own_pages(of_files)
        groups = _together([span for span in spans if span not in refused], private)
        with self._lock:
            areas: list[Area] = []
            for group in groups:
                of_file = kinds[group[0]] == "file"
                if self._register(group[0][0], group[-1][1]) is None:
                    areas.append(Area(tuple(group), of_file))
                    continue
                for span in group:  # what lies between them may be of another kind
                    reason = self._register(*span)
                    if reason is None:
                        areas.append(Area((span,), of_file))
                    else:
                        refused[span] = reason
            pages = WatchedPages(areas, files)
            self._watched.add(pages)
            for span in pages.spans:
                if self._protect(*span):
                    self._note([span])
            pages.take_written()
        return pages, refused

    def written(self, pages: WatchedPages, scan: Callable[[], list[Span]]) -> list[Span]:
        """Return the spans of some watched memory that were written since this was asked last: of whole pages.

        Parameters
        ----------
        pages
            The memory.
        scan
            Finds what was written, and protects it again. What can no longer be told is among it, and in a child
            process all is.
        """
        if os.getpid() != self._process:
            return list(pages.spans)
        with self._lock:
            written = scan()
            if written:
                self._note(written)
            return pages.take_written()

    def forget(self, watched: WatchedPages, pages: Collection[int]) -> None:
        """Watch some pages no more, for one of those that watch them."""
        with self._lock:
            watched.forget(pages)

    def _register(self, begin: int, end: int) -> str | None:
        """Let the kernel keep marks of some memory; return why it does not."""
        try:
            self._ioctl(
                self._faults, _UFFDIO_REGISTER, bytearray(struct.pack("4Q", begin, end - begin, _REGISTER_MODE_WP, 0))
            )
        except OSError as error:
            return str(error)
        return None

    def _note(self, written: Sequence[Span]) -> None:
        """Tell all that watch some pages that these were written: their marks are gone now."""
        for pages in self._watched:
            for begin, end in written:
                pages.note(begin, end)

    def _protect(self, begin: int, end: int) -> bool:
        """Take the marks of some pages away, and return whether there were any."""
        written = False
        while begin < end:
            argument = bytearray(
                struct.pack(
                    *("12Q", 96, _SCAN_WP_MATCHING | _SCAN_CHECK_WPASYNC, begin, end, 0),
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
                span = (ctypes.addressof(view), ctypes.addressof(view) + mmap.PAGESIZE)
                _, refused = self.watch([span])
                if refused:
                    raise OSError(errno.ENOTSUP, refused[span])
                before = self._protect(*span)
                view[0] = b"\1"
                told = not before and self._protect(*span)
            finally:
                del view
        if not told:
            raise OSError(errno.ENOTSUP, "a written page was not told")


def _together(spans: Sequence[Span], private: PrivateMemory) -> list[list[Span]]:
    """Return spans in groups, with little between them, and that of the same kind."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            kind = private.kind(last)
            if span[0] - last[1] <= NEAR and private.kind(span) == kind == private.kind((first[0], span[1])):
                groups[-1].append(span)
                continue
        groups.append([span])
    return groups


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
