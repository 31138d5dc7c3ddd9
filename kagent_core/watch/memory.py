"""Whether host memory has changed since it was last looked at.

Linux tells which pages were written (`kagent_core.watch.pages`). Only what lies on such pages is looked at, and its
fingerprint compared (`kagent_core.watch.fingerprint`); all of it where the system does not tell.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kagent_core.errors import KagentError
from kagent_core.inspect.logs import get_logger
from kagent_core.watch.fingerprint import EVERYWHERE, Fingerprinter, FingerprintTable, make_fingerprinter
from kagent_core.watch.mappings import Span
from kagent_core.watch.neighbours import SharedPages
from kagent_core.watch.pages import PageWatcher, page_watcher
from kagent_core.watch.scan import PageScanner, compiled_scan, make_page_scanner
from kagent_core.watch.tensors import SameTensors, TensorComparer, make_tensor_comparer

log = get_logger("execute")

_Looked = tuple[list[int], FingerprintTable]


class WatchedMemory:
    """Pieces of memory, and their fingerprints; made by `MemoryWatch.table`. For one thread at a time.

    Parameters
    ----------
    watched
        Places among all pieces of those whose pages are watched, and what looks at them.
    pages
        Tells what was written of these; None where none are watched.
    others
        The same as `watched` for the other pieces, which are looked at each time.
    unwatched_nbytes
        How many bytes these have.
    """

    def __init__(self, watched: _Looked, pages: SharedPages | None, others: _Looked, unwatched_nbytes: int) -> None:
        self._watched = watched
        self._pages = pages
        self._others = others
        self._written: list[Span] = list(EVERYWHERE)  # what has to be looked at
        self._found = [b""] * (len(watched[0]) + len(others[0]))
        self.unwatched_nbytes = unwatched_nbytes

    def compute(self) -> list[bytes]:
        """Return the fingerprints of what lies in the memory now; the same list where nothing has changed.

        The memory must be there.
        """
        if self._pages is not None:
            # the marks first: what is written while the pieces are looked at is looked at again
            self._written += self._pages.written()
            if self._written:
                changed = self._look(self._watched, self._written)
                self._written = self._pages.note(self._written, changed)
        if self.unwatched_nbytes:
            self._look(self._others, EVERYWHERE)
        return self._found

    def _look(self, looked: _Looked, written: Sequence[Span]) -> set[int]:
        """Look at what was written, and return which of these pieces have changed."""
        numbers, fingerprints = looked
        before, found = fingerprints.latest, fingerprints.compute(written)
        if found is before:
            return set()
        changed = {n for n, each in enumerate(found) if not before or each != before[n]}
        self._found = list(self._found)
        for n in changed:
            self._found[numbers[n]] = found[n]
        return changed


class MemoryWatch:
    """Watches memory of this process.

    Parameters
    ----------
    fingerprinter
        Makes fingerprints.
    scanner
        Watches pages; None where that is not possible.
    tensors
        Compares tensors quickly; None where that is not possible, or where reading their memory takes far longer.
    """

    def __init__(
        self, fingerprinter: Fingerprinter, scanner: PageScanner | None, tensors: TensorComparer | None = None
    ) -> None:
        self._fingerprinter = fingerprinter
        self._scanner = scanner
        self._tensors = tensors

    def tensors(self, tensors: tuple[torch.Tensor, ...]) -> SameTensors | None:
        """Return what tells, again and again, whether tensors are these and lie where they lay; None for none."""
        return None if self._tensors is None else self._tensors.of(tensors)

    def table(self, ranges: Sequence[tuple[int, int]]) -> WatchedMemory:
        """Return what tells of some memory, again and again, whether it has changed.

        Parameters
        ----------
        ranges
            Address and length in bytes of each piece.
        """
        numbers: list[int] = []
        pages = None
        if self._scanner is not None:
            spans = _pages_of(ranges)
            scan, refused = self._scanner.watch(spans)
            for reason in set(refused.values()):
                _tell(reason)
            numbers = [n for n, piece in enumerate(ranges) if _span_with(piece, spans) not in refused]
            pages = SharedPages(self._scanner, scan, [ranges[number] for number in numbers])
        others = sorted(set(range(len(ranges))) - set(numbers))
        unwatched_nbytes = sum(ranges[number][1] for number in others)
        return WatchedMemory(self._looked(numbers, ranges), pages, self._looked(others, ranges), unwatched_nbytes)

    def _looked(self, numbers: list[int], ranges: Sequence[tuple[int, int]]) -> _Looked:
        return numbers, self._fingerprinter.table([ranges[number] for number in numbers])


def _pages_of(ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """Return the pages of some pieces of memory, in spans in ascending order; what shares a page is in one span."""
    size = mmap.PAGESIZE
    spans: list[Span] = []
    for address, nbytes in sorted(piece for piece in ranges if piece[1]):
        begin, end = address // size * size, -(-(address + nbytes) // size) * size
        if spans and begin < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


def _span_with(piece: tuple[int, int], spans: Sequence[Span]) -> Span | None:
    """Return which of some spans a piece lies in; None for a piece without bytes."""
    address, nbytes = piece
    return spans[bisect.bisect_right(spans, (address, sys.maxsize)) - 1] if nbytes else None


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
    scanner = make_page_scanner(cache_dir, watcher)
    return MemoryWatch(fingerprinter, scanner, make_tensor_comparer(compiled_scan(cache_dir)))


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
            for make in (self.of, compiled_scan) if isinstance(page_watcher(), PageWatcher) else (self.of,):
                threading.Thread(target=_quietly, args=(make, cache_dir), name="kagent-watch").start()


def _quietly(make: Callable[[Path], object], cache_dir: Path) -> None:
    with contextlib.suppress(KagentError):  # whoever needs it gets the error again, and in his own thread
        make(cache_dir)


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
        "some or all parameters are read at every call, to see whether they have changed: %s; "
        "parameters = version trusts PyTorch's version counters instead",
        reason,
    )


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and length in bytes of the memory that a tensor's elements lie in."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
