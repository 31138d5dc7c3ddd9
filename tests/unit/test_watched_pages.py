"""Which pages were written is noticed however they are written."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kagent_core.config import load_config
from kagent_core.watch.fingerprint import FingerprintTable
from kagent_core.watch.memory import MemoryWatch, make_memory_watch, memory_of
from kagent_core.watch.pages import MOST_SPANS, PagesError, PageWatcher, WatchedPages, page_watcher
from kagent_core.watch.scan import PageScan, PageScanner, make_page_scanner

WATCHER = page_watcher()
pytestmark = pytest.mark.skipif(isinstance(WATCHER, str), reason=f"pages cannot be watched here: {WATCHER}")


@pytest.fixture(scope="module")
def scanner() -> PageScanner:
    assert isinstance(WATCHER, PageWatcher)
    return make_page_scanner(load_config().cache_dir, WATCHER)


def _ones() -> torch.Tensor:
    """Return a tensor on pages of its own, on which nobody else writes."""
    memory = mmap.mmap(-1, 512 * 1024 * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(512, 1024).fill_(1)


def _watched(scanner: PageScanner, tensor: torch.Tensor) -> WatchedPages:
    [pages] = scanner.watch([(tensor.data_ptr(), tensor.untyped_storage().nbytes())])
    assert isinstance(pages, WatchedPages)
    return pages


def _scan(scanner: PageScanner, tensor: torch.Tensor) -> PageScan:
    return scanner.scan([_watched(scanner, tensor)])


def test_what_is_not_written_is_not_told(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    assert scan.written() == [[]]
    assert tensor.sum() == tensor.numel()
    assert scan.written() == [[]]


def _read_zeros(tensor: torch.Tensor) -> None:
    with Path("/dev/zero").open("rb", buffering=0) as zeros:
        zeros.readinto(memoryview(tensor.numpy()).cast("B"))


WRITES = {
    "in place": lambda t: t.add_(1),
    "data": lambda t: t.data.mul_(2),
    "one element of data": lambda t: t.data[100].fill_(7),
    "last element": lambda t: t.view(-1)[-1:].zero_(),
    "numpy": lambda t: np.copyto(t.numpy(), 3),
    "dlpack": lambda t: torch.from_dlpack(t).neg_(),
    "storage": lambda t: t.untyped_storage().fill_(1),
    "the kernel, for a read from a file": _read_zeros,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_write_is_noticed_every_time(scanner: PageScanner, write) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    for _ in range(3):
        assert scan.written() == [[]]
        write(tensor)
        [spans] = scan.written()
        assert spans


def test_the_span_of_what_was_written_is_told(scanner: PageScanner) -> None:
    tensor, page = _ones(), mmap.PAGESIZE
    scan = _scan(scanner, tensor)
    tensor.data.view(-1)[3 * page // 4 : 5 * page // 4 + 1] = 5  # 4 bytes each: pages 3, 4 and 5
    assert scan.written() == [[(tensor.data_ptr() + 3 * page, tensor.data_ptr() + 6 * page)]]


def test_many_spans_are_one_and_no_mark_is_left(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    tensor.data[::2].zero_()
    whole = (tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes())
    [spans] = scan.written()
    assert spans is not None
    assert spans[0] == whole
    assert len(spans) <= MOST_SPANS
    assert scan.written() == [[]]


def test_two_watches_of_the_same_memory_both_notice(scanner: PageScanner) -> None:
    tensor = _ones()
    first = _scan(scanner, tensor)
    second = scanner.scan([pages for pages in scanner.watch([(tensor.data_ptr(), 8192)]) if not isinstance(pages, str)])
    first.written(), second.written()
    tensor.data[0, 0] = 2
    assert first.written() != [[]]  # takes the marks away
    assert second.written() != [[]]


def test_other_memory_at_the_same_place_is_not_vouched_for(scanner: PageScanner) -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    [pages] = scanner.watch([(address, 1 << 20)])
    assert isinstance(pages, WatchedPages)
    scan = scanner.scan([pages])
    assert scan.written() == [[]]
    gc.collect()
    memory.close()
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
    again = libc.mmap(address, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert again == address
    assert scan.written() == [None]
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(1 << 20))


def test_a_child_process_is_told_nothing(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    assert scan.written() == [[]]
    child = os.fork()
    if child == 0:
        os._exit(0 if scan.written() == [None] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory_that_others_may_write_is_refused(scanner: PageScanner, tmp_path) -> None:
    path = tmp_path / "weights.bin"
    np.ones(1 << 16, np.float32).tofile(path)
    tensors = [torch.from_file(str(path), shared=shared, size=1 << 16) for shared in (True, False)]
    tensors.append(torch.ones(1 << 16).share_memory_())
    for refused in scanner.watch([memory_of(tensor) for tensor in tensors]):
        assert isinstance(refused, str)
        assert "other processes" in refused


def test_system_without_it_says_why(monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    with pytest.raises(PagesError, match="pdp11"):
        PageWatcher()


# -- many at once


@pytest.fixture(scope="module")
def watch() -> MemoryWatch:
    made = make_memory_watch(load_config().cache_dir)
    assert made is not None
    return made


def _table(watch: MemoryWatch, *tensors: torch.Tensor):
    table = watch.table([memory_of(tensor) for tensor in tensors])
    assert table.unwatched_nbytes == 0
    return table


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_of_many_pieces_the_one_that_was_written_changes(watch: MemoryWatch, write) -> None:
    tensors = [_ones() for _ in range(4)]
    table = _table(watch, *tensors)
    before = table.compute()
    for tensor in (tensors[2], tensors[0]):
        write(tensor)
        after = table.compute()
        assert [a == b for a, b in zip(after, before, strict=True)] == [each is not tensor for each in tensors]
        before = after
    assert table.compute() == before


def test_what_is_written_on_many_pages_is_all_seen(watch: MemoryWatch) -> None:
    tensor = _ones()
    table = _table(watch, *(tensor[row] for row in range(0, 512, 4)))
    before = table.compute()
    rows = [row for row in range(0, 512, 4) if row % 12]
    tensor.data[rows, 7] = 5  # more spans than are kept apart
    after = table.compute()
    assert [a != b for a, b in zip(after, before, strict=True)] == [row % 12 != 0 for row in range(0, 512, 4)]


def test_two_tables_of_the_same_memory_both_see_it(watch: MemoryWatch) -> None:
    tensor = _ones()
    first, second = _table(watch, tensor), _table(watch, tensor[:8])
    before = first.compute(), second.compute()
    tensor.data[3, 3] = 4
    assert first.compute() != before[0]  # takes the marks away
    assert second.compute() != before[1]


def test_neighbours_on_the_same_page_change_nothing(watch: MemoryWatch) -> None:
    tensor = _ones()
    table = _table(watch, tensor[0, :100], tensor[0, 200:300])
    before = table.compute()
    tensor.data[0, 150] = 9
    assert table.compute() == before
    tensor.data[0, 299] = 9
    assert [a == b for a, b in zip(table.compute(), before, strict=True)] == [True, False]


def test_an_interrupted_look_is_made_up_for(watch: MemoryWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = _ones()
    table = _table(watch, tensor)
    before = table.compute()
    tensor.data[0, 0] = 3

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FingerprintTable, "compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.compute()
    assert table.compute() != before


def test_in_a_child_process_all_is_looked_at(watch: MemoryWatch) -> None:
    tensor = _ones()[:8]  # so little that no other thread helps, of which a child has none
    table = _table(watch, tensor)
    before = table.compute()
    child = os.fork()
    if child == 0:
        same = table.compute() == before
        tensor.data[0, 0] = 3
        os._exit(0 if same and table.compute() != before else 1)
    assert os.waitpid(child, 0)[1] == 0
