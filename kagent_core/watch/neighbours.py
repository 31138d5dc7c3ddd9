"""Pages that watched memory shares with other memory, which is written at any time."""

from __future__ import annotations

import bisect
import mmap
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from kagent_core.watch.mappings import Span
from kagent_core.watch.scan import CopiedParts, PageScan, PageScanner

PATIENCE = 2
"""How often others write a page before it is watched no more: each time, the system lifts its protection (0.5 to 1 µs,
which is their time), and it is looked at and protected again (1 µs). To compare what lies there with a copy takes 0.1
µs, so a page that nobody else writes is better watched, and one that is written between calls is better compared."""


class SharedPages:
    """Watches pieces of memory; those parts of them whose pages others write are compared with copies.

    Parameters
    ----------
    scanner
        Makes copies.
    scan
        Tells what was written of the pages of all pieces.
    pieces
        Address and length in bytes of each.
    """

    def __init__(self, scanner: PageScanner, scan: PageScan, pieces: Sequence[tuple[int, int]]) -> None:
        self._scanner = scanner
        self._scan = scan
        self._pieces = pieces
        self._on: dict[int, list[int]] = {}
        for number, (address, nbytes) in enumerate(pieces):
            for page in _partly_covered(address, nbytes):
                self._on.setdefault(page, []).append(number)
        self._pages = sorted(self._on)
        self._by_others: Counter[int] = Counter()
        self._copied: list[Span] = []
        self._copies: CopiedParts | None = None

    def written(self) -> list[Span]:
        """Return what has to be looked at, as it may have been written since this was asked last."""
        spans = self._scan.written()
        return spans if self._copies is None else spans + self._copies.differing()

    def note(self, written: Sequence[Span], changed: AbstractSet[int]) -> list[Span]:
        """Note that some spans were written, and what that changed; return what has to be looked at once more.

        Parameters
        ----------
        written
            The spans.
        changed
            Which pieces are not as they were.
        """
        written_pages = {
            page
            for begin, end in written
            for page in self._pages[bisect.bisect_left(self._pages, begin) : bisect.bisect_left(self._pages, end)]
        }
        self._by_others.update(page for page in written_pages if changed.isdisjoint(self._on[page]))
        noisy = {page for page in written_pages if self._by_others[page] >= PATIENCE}
        if not noisy:
            return []
        self._copied += [part for page in noisy for part in self._parts(page)]
        for page in noisy:
            del self._on[page], self._by_others[page]
        self._pages = sorted(self._on)
        self._scan.forget(noisy)
        self._copies = self._scanner.copies(self._copied)
        return list(self._copied)  # may have been written since they were looked at

    def _parts(self, page: int) -> list[Span]:
        """Return what lies on a page."""
        ends = ((address, address + nbytes) for address, nbytes in map(self._pieces.__getitem__, self._on[page]))
        return [(max(begin, page), min(end, page + mmap.PAGESIZE)) for begin, end in ends]


def _partly_covered(address: int, nbytes: int) -> set[int]:
    """Return the pages that a piece shares with what lies before and behind it."""
    size, end = mmap.PAGESIZE, address + nbytes
    return {place // size * size for place in (address, end) if nbytes and place % size}
