"""Whether host memory has changed since it was last looked at.

Linux tells which pages were written (`kagent_core.watch.pages`). Only what lies on such pages is looked at, and its
fingerprint compared (`kagent_core.watch.fingerprint`); all of it where the system does not tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kagent_core.inspect.logs import get_logger
from kagent_core.watch.fingerprint import Fingerprinter, FingerprintTable, make_fingerprinter
from kagent_core.watch.pages import PageWatcher, WatchedPages, page_watcher

log = get_logger("execute")

NEAR = 1 << 16
"""Bytes between pieces of memory that are watched together: asking costs more than looking at a few pages."""


@dataclass
class _Group:
    """Pieces of memory near each other.

    Attributes
    ----------
    numbers, pieces
        Their places among all pieces; address and length in bytes of each.
    fingerprints
        What looks at them.
    pages
        Theirs, where those are watched; else the pieces are looked at each time.
    generation, known
        Of the pages, before the pieces were last looked at; and what was found.
    """

    numbers: list[int]
    pieces: list[tuple[int, int]]
    fingerprints: FingerprintTable
    pages: WatchedPages | None = None
    generation: int | None = None
    known: list[bytes] = field(default_factory=list)

    def compute(self) -> list[bytes]:
        generation = self.pages.generation() if self.pages is not None else None
        if generation is None or generation != self.generation or not self.known:
            # the generation first: what is written while the pieces are looked at is looked at again
            self.generation, self.known = generation, self.fingerprints.compute()
        return self.known


class WatchedMemory:
    """Pieces of memory, and their fingerprints; made by `MemoryWatch.table`. For one thread at a time."""

    def __init__(self, groups: Sequence[_Group], count: int) -> None:
        self._groups = groups
        self._found = [b""] * count

    def compute(self) -> list[bytes]:
        """Return the fingerprints of what lies in the memory now. It must be there."""
        for group in self._groups:
            for number, found in zip(group.numbers, group.compute(), strict=True):
                self._found[number] = found
        return list(self._found)

    @property
    def unwatched_nbytes(self) -> int:
        """How many bytes are looked at each time."""
        return sum(nbytes for group in self._groups if group.pages is None for _, nbytes in group.pieces)


class MemoryWatch:
    """Watches memory of this process.

    Parameters
    ----------
    fingerprinter
        Makes fingerprints.
    watcher
        Watches pages; None where that is not possible.
    """

    def __init__(self, fingerprinter: Fingerprinter, watcher: PageWatcher | None) -> None:
        self._fingerprinter = fingerprinter
        self._watcher = watcher

    def table(self, ranges: Sequence[tuple[int, int]]) -> WatchedMemory:
        """Return what tells of some memory, again and again, whether it has changed.

        Parameters
        ----------
        ranges
            Address and length in bytes of each piece.
        """
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        if self._watcher is None:
            return WatchedMemory([self._group(order, ranges)] if ranges else [], len(ranges))
        near = [self._group(numbers, ranges) for numbers in _near(order, ranges)]
        _watch(near, self._watcher)
        # what lies between may be of another kind
        apart = [self._group([n], ranges) for group in near if group.pages is None for n in group.numbers]
        _watch(apart, self._watcher)
        return WatchedMemory([group for group in near if group.pages is not None] + apart, len(ranges))

    def _group(self, numbers: Sequence[int], ranges: Sequence[tuple[int, int]]) -> _Group:
        pieces = [ranges[number] for number in numbers]
        return _Group(list(numbers), pieces, self._fingerprinter.table(pieces))


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


def _watch(groups: Sequence[_Group], watcher: PageWatcher) -> None:
    spans = [(g.pieces[0][0], max(a + n for a, n in g.pieces) - g.pieces[0][0]) for g in groups]
    for group, pages in zip(groups, watcher.watch(spans), strict=True):
        group.pages = pages if isinstance(pages, WatchedPages) else None


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
    return MemoryWatch(fingerprinter, watcher if isinstance(watcher, PageWatcher) and not pinned else None)


@functools.cache
def memory_watch(cache_dir: Path) -> MemoryWatch | None:
    """Return the process's own, made the first time that it is asked for: see `make_memory_watch`."""
    return make_memory_watch(cache_dir)


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
