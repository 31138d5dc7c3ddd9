"""Asking for the marks of many pieces of memory at once, in compiled code: a program asks at every call."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from kagent_core.native import find_compiler, load
from kagent_core.watch.pages import MOST_SPANS, PageWatcher, Span, WatchedPages

_SOURCE = (
    f"#define MOST_SPANS {MOST_SPANS}\n"
    r"""
#include <stdint.h>
#include <sys/ioctl.h>

#define WP_MATCHING 1
#define CHECK_WPASYNC 2
#define PAGE_IS_WRITTEN 2

typedef struct { uint64_t begin, end, kinds; } region;
typedef struct { int64_t place; uint64_t begin, end; } record;
struct scan {
    uint64_t size, flags, begin, end, walked, regions, most_regions, most_pages, inverted, mask, anyof, asked;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct scan)

/* table: file of the page map, number of spans, records, number of records, then begin and end of each span */
void scan_pages(int64_t *table) {
    record *found = (record *)table[2];
    int64_t count = 0;
    for (int64_t n = 0; n < table[1]; n++) {
        const uint64_t whole = table[4 + 2 * n], end = table[5 + 2 * n];
        const int64_t first = count;
        for (uint64_t begin = whole; begin < end;) {
            region regions[MOST_SPANS];
            struct scan scan = {
                .size = sizeof scan, .flags = WP_MATCHING | CHECK_WPASYNC, .begin = begin, .end = end,
                .regions = (uintptr_t)regions, .most_regions = MOST_SPANS, .mask = PAGE_IS_WRITTEN,
                .asked = PAGE_IS_WRITTEN,
            };
            const int written = ioctl((int)table[0], PAGEMAP_SCAN, &scan);
            if (written < 0 || scan.walked <= begin) { /* the memory was given back, perhaps */
                count = first;
                found[count++] = (record){n, 0, 0};
                break;
            }
            for (int r = 0; r < written; r++) {
                if (count - first == MOST_SPANS) {
                    count = first;
                    found[count++] = (record){n, whole, end};
                }
                found[count++] = (record){n, regions[r].begin, regions[r].end};
            }
            begin = scan.walked;
        }
    }
    table[3] = count;
}
"""
)

_COUNT = 3
_RECORD = 3


class PageScan:
    """Some watched memory that is asked about together; made by `PageScanner.scan`.

    Parameters
    ----------
    function
        The compiled function.
    watcher
        Watches the pages.
    pages
        The memory.
    """

    def __init__(self, function: Callable[[int], None], watcher: PageWatcher, pages: Sequence[WatchedPages]) -> None:
        self._function = function
        self._watcher = watcher
        self._pages = list(pages)
        self._records = array.array("q", bytes(8 * _RECORD * MOST_SPANS * max(len(pages), 1)))
        spans = itertools.chain.from_iterable((each.begin, each.end) for each in pages)
        self._table = array.array("q", [watcher.pagemap, len(pages), self._records.buffer_info()[0], 0, *spans])

    def written(self) -> list[list[Span] | None]:
        """Return, for each memory, what was written since this was asked last: spans of whole pages.

        None for what can no longer be told: the memory was given up, or this is a child process.
        """
        lost = self._watcher.note_all(self._scan)
        if lost is None:
            return [None] * len(self._pages)
        return [None if pages in lost else pages.take_written() for pages in self._pages]

    def _scan(self) -> tuple[list[Span], set[WatchedPages]]:
        """Take the marks away; return where there were any, and the memory that cannot be asked about."""
        self._function(self._table.buffer_info()[0])
        count = self._table[_COUNT]
        if not count:
            return [], set()
        flat = self._records[: _RECORD * count]
        places, begins, ends = flat[::_RECORD], flat[1::_RECORD], flat[2::_RECORD]
        lost = {self._pages[place] for place, begin in zip(places, begins, strict=True) if not begin}
        spans = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin]
        return spans + [(pages.begin, pages.end) for pages in lost], lost


class PageScanner:
    """Watches memory, and asks about much of it at once.

    Parameters
    ----------
    function
        The compiled function.
    watcher
        Watches the pages.
    """

    def __init__(self, function: Callable[[int], None], watcher: PageWatcher) -> None:
        self._function = function
        self._watcher = watcher

    def watch(self, memory: Sequence[tuple[int, int]]) -> list[WatchedPages | str]:
        """As `PageWatcher.watch`."""
        return self._watcher.watch(memory)

    def scan(self, pages: Sequence[WatchedPages]) -> PageScan:
        """Return what asks about some of the watched memory, again and again."""
        return PageScan(self._function, self._watcher, pages)


def make_page_scanner(cache_dir: Path, watcher: PageWatcher) -> PageScanner:
    """Return what watches memory.

    Raises
    ------
    KagentError
        When no C compiler works.
    """
    compiler = find_compiler()
    assert compiler is not None
    return PageScanner(load(_SOURCE, cache_dir, compiler).function("scan_pages"), watcher)
