"""The memory of this process that nobody else writes, and pages of files that are made its own."""

from __future__ import annotations

import bisect
import ctypes
import os
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kagent_core.inspect.logs import get_logger

log = get_logger("execute")

Span = tuple[int, int]
"""Begin and end, as addresses."""

FileId = tuple[str | int, ...]

Kind = Literal["anonymous", "file"]

_POPULATE_WRITE = 23
"""Of madvise, since Linux 5.14: what a write to every page would do to the page, without writing."""

SPARE = 4
"""Pages of files are made the process's own where this many times their memory is free: before, the system can take
their memory back, and many processes can share it."""


_RECENT_NS = 10**9
"""The steps of the clock that tells when a file was changed are up to 10 ms: within one, two changes look alike."""


@dataclass(frozen=True)
class PrivateMemory:
    """Memory that this process alone writes, in ascending order.

    Attributes
    ----------
    anonymous
        What is no file's.
    all
        The same, and private mappings of files.
    files
        These mappings, each with what the system knows of its file: device, inode, path.
    """

    anonymous: Sequence[Span]
    all: Sequence[Span]
    files: Sequence[tuple[Span, FileId]]

    @staticmethod
    def now() -> PrivateMemory:
        """Return what there is now."""
        anonymous: list[Span] = []
        every: list[Span] = []
        files: list[tuple[Span, FileId]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions, _, device, inode, *path = line.split(maxsplit=5)
            if not permissions.endswith("p"):
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            if inode != "0":
                files.append(((begin, end), (device, int(inode), *path)))
            for found in (every, anonymous) if inode == "0" else (every,):
                if found and found[-1][1] == begin:
                    found[-1] = (found[-1][0], end)
                else:
                    found.append((begin, end))
        return PrivateMemory(anonymous, every, files)

    def kind(self, span: Span) -> Kind | None:
        """Return what some memory is; None where not all of it is private."""
        if _covered(span, self.anonymous):
            return "anonymous"
        return "file" if _covered(span, self.all) else None

    def files_of(self, spans: Iterable[Span]) -> set[FileId]:
        """Return the files that some memory is mapped from."""
        wanted = list(spans)
        return {
            file for (begin, end), file in self.files if any(begin < last and first < end for first, last in wanted)
        }


def _covered(span: Span, spans: Sequence[Span]) -> bool:
    """Whether one of some spans, in ascending order, covers another one."""
    position = bisect.bisect_right(spans, (span[0], sys.maxsize)) - 1
    return position >= 0 and span[1] <= spans[position][1]


def own_pages(spans: Iterable[Span]) -> dict[Span, str]:
    """Make pages of private mappings the process's own, so that nobody else can change what lies there.

    What lies there stays as it is, and whoever reads it through the mapping sees it: PyTorch, too.

    Returns
    -------
    dict
        The spans whose pages are still the file's, with the reasons.
    """
    spans = list(spans)
    nbytes = sum(end - begin for begin, end in spans)
    if not nbytes:
        return {}
    spare = _spare_memory()
    if nbytes * SPARE > spare:
        return dict.fromkeys(spans, f"{nbytes} bytes are a file's, and {spare} are free")
    libc = ctypes.CDLL(None, use_errno=True)
    refused = {}
    for begin, end in spans:
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE):
            refused[begin, end] = f"their memory is a file's ({os.strerror(ctypes.get_errno())})"
    owned = nbytes - sum(end - begin for begin, end in refused)
    if owned:
        log.info("%d bytes of parameters in private mappings of files were given memory of their own", owned)
    return refused


class UnchangedFiles:
    """Files that have not changed since they were opened.

    Who shortens a file takes away what lies in memory behind its end, even pages that have become a process's own.

    Parameters
    ----------
    files
        The files.

    Attributes
    ----------
    known
        File descriptor, size and times of each.
    doubted
        Whether some file cannot be told from another one, or may change without being noticed: the system's clock
        for files can be a few milliseconds late.
    """

    def __init__(self, files: Iterable[FileId]) -> None:
        self.known: list[tuple[int, ...]] = []
        self.doubted = False
        descriptors: list[int] = []
        weakref.finalize(self, _close, descriptors)
        for device, inode, *path in files:
            try:
                descriptors.append(os.open(str(path[0]), os.O_PATH | os.O_CLOEXEC))
                found = os.fstat(descriptors[-1])
            except (OSError, IndexError):
                self.doubted = True
                continue
            named = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
            recent = time.time_ns() - max(found.st_ctime_ns, found.st_mtime_ns) < _RECENT_NS
            if recent or (named, found.st_ino) != (device, inode):
                self.doubted = True
            times = (part for ns in (found.st_mtime_ns, found.st_ctime_ns) for part in divmod(ns, 10**9))
            self.known.append((descriptors[-1], found.st_size, *times))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _spare_memory() -> int:
    """Return how many bytes of memory are free for this process, as far as the system tells."""
    found = [0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) << 10]
    control = Path("/sys/fs/cgroup")
    try:
        most, used = ((control / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if most != "max":
            found.append(max(0, int(most) - int(used)))
    except (OSError, ValueError):
        pass  # no limit of its own
    return min(found)
