"""Asking what was written in many pieces of memory at once, in compiled code: a program asks at every call."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kagent_core.errors import CompilationError
from kagent_core.native import Library, find_compiler, load, why_no_compiler
from kagent_core.watch.mappings import Span
from kagent_core.watch.pages import MOST_SPANS, PageWatcher, WatchedPages
from kagent_core.watch.tensors import SOURCE as TENSORS_SOURCE

_SOURCE = r"""
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#define WP_MATCHING 1
#define CHECK_WPASYNC 2
#define WRITTEN 2
#define OF_FILE 4
#define SWAPPED 16
#define REGIONS 128

typedef struct { uint64_t begin, end, kinds; } region;
typedef struct { uint64_t begin, end; } span;
typedef struct { uint64_t begin, end, first, last, of_file; } area;
typedef struct { const unsigned char *bytes; uint64_t nbytes; unsigned char *before; } part;
struct scan {
    uint64_t size, flags, begin, end, walked, regions, most_regions, most_pages, inverted, mask, anyof, asked;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct scan)

typedef struct { int64_t file, size, written_s, written_ns, changed_s, changed_ns; } file;
typedef struct {
    int64_t pagemap, areas;
    const area *area;
    const span *spans;
    int64_t most, count;
    span *found;
    int64_t files;
    const file *file;
    int64_t doubted;
} scan_table;
typedef struct { int64_t parts; const part *part; int64_t count; span *found; } part_table;

static void note(scan_table *table, uint64_t begin, uint64_t end) {
    if (table->count < table->most) table->found[table->count++] = (span){begin, end};
    else if (table->found[table->count - 1].end < end) table->found[table->count - 1].end = end;
}

static int has_changed(const file *f) {
    struct stat now;
    return fstat((int)f->file, &now) != 0 || now.st_size != f->size || now.st_mtim.tv_sec != f->written_s ||
           now.st_mtim.tv_nsec != f->written_ns || now.st_ctim.tv_sec != f->changed_s ||
           now.st_ctim.tv_nsec != f->changed_ns;
}

/* Returns the number of regions of written pages in some memory, or -1, and where it ended looking for them. In doubt,
   a page that is not the process's own, or of which that is not known, counts as written. */
static int ask(int pagemap, uint64_t flags, uint64_t *begin, uint64_t end, uint64_t doubted, region *regions) {
    const uint64_t others = doubted ? WRITTEN | OF_FILE | SWAPPED : 0;
    struct scan scan = {
        .size = sizeof scan, .flags = flags | CHECK_WPASYNC, .begin = *begin, .end = end,
        .regions = (uintptr_t)regions, .most_regions = REGIONS, .mask = others ? 0 : WRITTEN, .anyof = others,
        .asked = WRITTEN,
    };
    const int found = ioctl(pagemap, PAGEMAP_SCAN, &scan);
    if (found < 0 || scan.walked <= *begin) return -1; /* the memory was given back, perhaps */
    *begin = scan.walked;
    return found;
}

static void protect(int pagemap, uint64_t begin, uint64_t end) {
    region regions[REGIONS];
    while (begin < end)
        if (ask(pagemap, WP_MATCHING, &begin, end, 0, regions) < 0) return; /* the next scan of it fails, too */
}

/* Notes what was written in some spans and protects it again. What lies between the spans is others': it is written at
   any time, and stays without protection. */
static int look(scan_table *table, uint64_t begin, uint64_t end, uint64_t doubted, uint64_t first, uint64_t last) {
    while (begin < end) {
        region regions[REGIONS];
        const int found = ask(table->pagemap, 0, &begin, end, doubted, regions);
        if (found < 0) return 0;
        for (int r = 0; r < found; r++) {
            while (first < last && table->spans[first].end <= regions[r].begin) first++;
            for (uint64_t n = first; n < last && table->spans[n].begin < regions[r].end; n++) {
                const span *s = &table->spans[n];
                const uint64_t from = s->begin < regions[r].begin ? regions[r].begin : s->begin;
                const uint64_t to = s->end < regions[r].end ? s->end : regions[r].end;
                protect(table->pagemap, from, to);
                note(table, from, to);
            }
        }
    }
    return 1;
}

void scan_pages(scan_table *table) {
    table->count = 0;
    for (int64_t n = 0; n < table->files && !table->doubted; n++) table->doubted = has_changed(&table->file[n]);
    for (int64_t n = 0; n < table->areas; n++) {
        const area *a = &table->area[n];
        const uint64_t doubted = a->of_file && table->doubted;
        if (look(table, a->begin, a->end, doubted, a->first, a->last)) continue;
        for (uint64_t s = a->first; s < a->last; s++) /* somebody has mapped other memory between them, or there */
            if (!look(table, table->spans[s].begin, table->spans[s].end, doubted, s, s + 1))
                note(table, table->spans[s].begin, table->spans[s].end);
    }
}

void compare_parts(part_table *table) {
    table->count = 0;
    for (int64_t n = 0; n < table->parts; n++) {
        const part *p = &table->part[n];
        if (memcmp(p->bytes, p->before, p->nbytes) == 0) continue;
        memcpy(p->before, p->bytes, p->nbytes);
        table->found[table->count++] = (span){(uintptr_t)p->bytes, (uintptr_t)p->bytes + p->nbytes};
    }
}
"""


_COUNT = 5
"""Where the table of a scan has the number of spans that it has found."""

_PARTS_COUNT = 2
"""Where a table of parts has the number of those that differ."""

Function = Callable[[int], None]


def _spans(found: array.array[int], count: int) -> list[Span]:
    flat = found[: 2 * count].tolist()
    return list(zip(flat[::2], flat[1::2], strict=True))


class PageScan:
    """Some watched memory that is asked about together; made by `PageScanner.watch`.

    Parameters
    ----------
    function
        The compiled function.
    watcher
        Watches the pages.
    pages
        The memory.
    """

    def __init__(self, function: Function, watcher: PageWatcher, pages: WatchedPages) -> None:
        self._function = function
        self._watcher = watcher
        self._pages = pages
        self._fill()

    def written(self) -> list[Span]:
        """Return what was written since this was asked last, or may have been: spans of whole pages."""
        return self._watcher.written(self._pages, self._scan)

    def forget(self, pages: Collection[int]) -> None:
        """Watch some pages, given by their addresses, no more."""
        self._watcher.forget(self._pages, pages)
        self._fill()

    def _scan(self) -> list[Span]:
        self._function(self._at)
        count = self._table[_COUNT]
        return _spans(self._found, count) if count else []

    def _fill(self) -> None:
        """Write down what the compiled code needs."""
        areas, spans = self._pages.areas, self._pages.spans
        most = len(spans) + MOST_SPANS
        self._spans = array.array("Q", itertools.chain.from_iterable(spans))
        self._found = array.array("Q", bytes(16 * most))
        self._areas = array.array("Q")
        first = 0
        for area in areas:
            last = first + len(area.spans)
            self._areas.extend((area.spans[0][0], area.spans[-1][1], first, last, int(area.of_file)))
            first = last
        files = self._pages.files
        self._files = array.array("q", itertools.chain.from_iterable(files.known))
        at_areas, at_spans, at_found, at_files = (
            each.buffer_info()[0] for each in (self._areas, self._spans, self._found, self._files)
        )
        self._table = array.array("Q", [self._watcher.pagemap, len(areas), at_areas, at_spans, most, 0, at_found])
        self._table.extend((len(files.known), at_files, int(files.doubted)))
        self._at = self._table.buffer_info()[0]


class CopiedParts:
    """Small parts of memory with copies, which they are compared with each time; made by `PageScanner.copies`.

    Parameters
    ----------
    function
        The compiled function.
    parts
        Begin and end of each.
    """

    def __init__(self, function: Function, parts: Sequence[Span]) -> None:
        self._function = function
        self._copies = array.array("B", bytes(sum(end - begin for begin, end in parts)))
        self._found = array.array("Q", bytes(16 * len(parts)))
        self._parts = array.array("Q")
        place = self._copies.buffer_info()[0]
        for begin, end in parts:
            self._parts.extend((begin, end - begin, place))
            place += end - begin
        self._table = array.array("Q", [len(parts), self._parts.buffer_info()[0], 0, self._found.buffer_info()[0]])
        self._at = self._table.buffer_info()[0]
        self.differing()

    def differing(self) -> list[Span]:
        """Return the parts that are not as they were when this was asked last."""
        self._function(self._at)
        count = self._table[_PARTS_COUNT]
        return _spans(self._found, count) if count else []


class PageScanner:
    """Watches memory, and asks about much of it at once.

    Parameters
    ----------
    scan, compare
        The compiled functions.
    watcher
        Watches the pages.
    """

    def __init__(self, scan: Function, compare: Function, watcher: PageWatcher) -> None:
        self._scan = scan
        self._compare = compare
        self._watcher = watcher

    def watch(self, spans: Sequence[Span]) -> tuple[PageScan, dict[Span, str]]:
        """Watch spans as `PageWatcher.watch`; return what asks about them, and what cannot be watched and why."""
        pages, refused = self._watcher.watch(spans)
        return PageScan(self._scan, self._watcher, pages), refused

    def copies(self, parts: Sequence[Span]) -> CopiedParts:
        """Return what compares parts of memory with copies, made now."""
        return CopiedParts(self._compare, parts)


def compiled_scan(cache_dir: Path) -> Library:
    """Return the compiled functions, and those of `kagent_core.watch.tensors`.

    Raises
    ------
    CompilationError
        When no C compiler works.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilationError(why_no_compiler(), hint="install gcc or clang")
    return load(_SOURCE + TENSORS_SOURCE, cache_dir, compiler)


def make_page_scanner(cache_dir: Path, watcher: PageWatcher) -> PageScanner:
    """Return what watches memory.

    Raises
    ------
    CompilationError
        When no C compiler works.
    """
    library = compiled_scan(cache_dir)
    return PageScanner(library.function("scan_pages"), library.function("compare_parts"), watcher)
