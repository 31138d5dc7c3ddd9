"""Whether host memory has changed since it was last looked at.

Linux tells which pages were written (`kagent_core.watch.pages`). Only what lies on such pages is looked at, and its
fingerprint compared (`kagent_core.watch.fingerprint`); all of it where the system does not tell.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kagent_core.errors import KagentError
from kagent_core.inspect.logs import get_logger
from kagent_core.watch.fingerprint import EVERYWHERE, Fingerprinter, FingerprintTable, make_fingerprinter
from kagent_core.watch.pages import PageWatcher, Span, WatchedPages, page_watcher
from kagent_core.watch.scan import PageScan, PageScanner, make_page_scanner

log = get_logger("execute")

NEAR = 1 << 16
"""Bytes between pieces of memory that are watched together: asking costs more than looking at a few pages."""

_Looked = tuple[list[int], FingerprintTable]


class WatchedMemory:
    """Pieces of memory, and their fingerprints; made by `MemoryWatch.table`. For one thread at a time.

    Parameters
    ----------
    watched
        Places among all pieces of those whose pages are watched, and what looks at them.
    scan
        Tells what was written of these pages; None where none are watched.
    others
        The same as `watched` for the other pieces, which are looked at each time.
    unwatched_nbytes
        How many bytes these have.
    """

    def __init__(self, watched: _Looked, scan: PageScan | None, others: _Looked, unwatched_nbytes: int) -> None:
        self._watched = watched
        self._scan = scan
        self._others = others
        self._written: list[Span] | None = None  # what has to be looked at; None for everything
        self._found = [b""] * (len(watched[0]) + len(others[0]))
        self.unwatched_nbytes = unwatched_nbytes

    def compute(self) -> list[bytes]:
        """Return the fingerprints of what lies in the memory now. It must be there."""
        if self._scan is not None:
            # the marks first: what is written while the pieces are looked at is looked at again
            for written in self._scan.written():
                if written is None or self._written is None:
                    self._written = None
                else:
                    self._written += written
            if self._written != []:
                self._look(self._watched, EVERYWHERE if self._written is None else self._written)
                self._written = []
        if self.unwatched_nbytes:
            self._look(self._others, EVERYWHERE)
        return list(self._found)

    def _look(self, looked: _Looked, changed: Sequence[Span]) -> None:
        numbers, fingerprints = looked
        before, found = fingerprints.latest, fingerprints.compute(changed)
        if found is not before:
            for number, each in zip(numbers, found, strict=True):
                self._found[number] = each


class MemoryWatch:
    """Watches memory of this process.

    Parameters
    ----------
    fingerprinter
        Makes fingerprints.
    scanner
        Watches pages; None where that is not possible.
    """

    def __init__(self, fingerprinter: Fingerprinter, scanner: PageScanner | None) -> None:
        self._fingerprinter = fingerprinter
        self._scanner = scanner

    def table(self, ranges: Sequence[tuple[int, int]]) -> WatchedMemory:
        """Return what tells of some memory, again and again, whether it has changed.

        Parameters
        ----------
        ranges
            Address and length in bytes of each piece.
        """
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        watched: list[WatchedPages] = []
        numbers: list[int] = []
        scan = None
        if self._scanner is not None:
            refused = _watch(self._scanner, _near(order, ranges), ranges, watched, numbers)
            # what lies between pieces may be of another kind: then each by itself
            _watch(self._scanner, [[number] for group in refused for number in group], ranges, watched, numbers)
            scan = self._scanner.scan(watched)
        others = sorted(set(order) - set(numbers))
        unwatched_nbytes = sum(ranges[number][1] for number in others)
        return WatchedMemory(self._looked(numbers, ranges), scan, self._looked(others, ranges), unwatched_nbytes)

    def _looked(self, numbers: list[int], ranges: Sequence[tuple[int, int]]) -> _Looked:
        return numbers, self._fingerprinter.table([ranges[number] for number in numbers])


def _watch(
    scanner: PageScanner,
    groups: list[list[int]],
    ranges: Sequence[tuple[int, int]],
    watched: list[WatchedPages],
    numbers: list[int],
) -> list[list[int]]:
    """Watch pieces in groups, each as a whole; note what is watched, and return the groups that cannot be."""
    begins = [ranges[group[0]][0] for group in groups]
    ends = [max(sum(ranges[number]) for number in group) for group in groups]
    spans = [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
    refused = []
    for group, pages in zip(groups, scanner.watch(spans), strict=True):
        if isinstance(pages, WatchedPages):
            watched.append(pages)
            numbers += group
        else:
            refused.append(group)
    return refused


def _near(order: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    groups: list[list[int]] = []
    end = 0
    for number in order:
        address, nbytes = ranges[number]
        if groups and address - end <= NEAR:
            groups[-1].append(number)
        else:
            groups.append([number])
            end = 0
        end = max(end, address + nbytes)
    return groups


def make_memory_watch(cache_dir: Path, pages: Callable[[], PageWatcher | str] = page_watcher) -> MemoryWatch | None:
    """Return what watches memory; None where no C compiler works, for in Python copying is cheaper than looking.

    Parameters
    ----------
    cache_dir
        Where compiled code is kept.
    pages
        Returns what watches pages, or why nothing does.
    """
    fingerprinter = make_fingerprinter(cache_dir)
    if fingerprinter is None:
        return None
    watcher = pages()
    if isinstance(watcher, str):
        _tell(watcher)
    # a device that pinned memory is shared with writes it, and leaves no mark
    pinned = torch.cuda.is_available()
    if pinned or not isinstance(watcher, PageWatcher):
        return MemoryWatch(fingerprinter, None)
    return MemoryWatch(fingerprinter, make_page_scanner(cache_dir, watcher))


class _OwnWatches:
    """One for each cache directory, in this process."""

    def __init__(self) -> None:
        self._make = functools.cache(make_memory_watch)
        self._prepared: set[Path] = set()
        self.unlock()

    def unlock(self) -> None:
        """Let a forked process make its own: the thread that was making one is not in it."""
        self._lock = threading.Lock()

    def of(self, cache_dir: Path) -> MemoryWatch | None:
        with self._lock:
            return self._make(cache_dir)

    def prepare(self, cache_dir: Path) -> None:
        if cache_dir not in self._prepared:
            self._prepared.add(cache_dir)
            threading.Thread(target=self._prepare, args=(cache_dir,), name="kagent-watch").start()

    def _prepare(self, cache_dir: Path) -> None:
        with contextlib.suppress(KagentError):  # whoever needs it gets the error again, and in his own thread
            self.of(cache_dir)


_own = _OwnWatches()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own.unlock)


def memory_watch(cache_dir: Path) -> MemoryWatch | None:
    """Return the process's own, made the first time that it is asked for: see `make_memory_watch`."""
    return _own.of(cache_dir)


def prepare_memory_watch(cache_dir: Path) -> None:
    """Begin to make what `memory_watch` returns, which takes a compiler a while, in another thread."""
    _own.prepare(cache_dir)


@functools.cache
def _tell(reason: str) -> None:
    log.info(
        "parameters are read at every call, to see whether they have changed: %s; parameters = version trusts "
        "PyTorch's version counters instead",
        reason,
    )


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and length in bytes of the memory that a tensor's elements lie in."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
