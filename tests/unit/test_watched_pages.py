"""Which pages were written is noticed however they are written."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kagent_core.config import load_config
from kagent_core.watch import mappings
from kagent_core.watch.fingerprint import FingerprintTable
from kagent_core.watch.mappings import Span
from kagent_core.watch.memory import MemoryWatch, make_memory_watch, memory_of
from kagent_core.watch.pages import MOST_SPANS, PagesError, PageWatcher, page_watcher
from kagent_core.watch.scan import CopiedParts, PageScan, PageScanner, make_page_scanner

WATCHER = page_watcher()
pytestmark = pytest.mark.skipif(isinstance(WATCHER, str), reason=f"pages cannot be watched here: {WATCHER}")


PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def scanner() -> PageScanner:
    assert isinstance(WATCHER, PageWatcher)
    return make_page_scanner(load_config().cache_dir, WATCHER)


def _ones() -> torch.Tensor:
    """Return a tensor on pages of its own, on which nobody else writes."""
    memory = mmap.mmap(-1, 512 * 1024 * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(512, 1024).fill_(1)


def _span(tensor: torch.Tensor) -> Span:
    """Return the pages of a tensor that begins with one."""
    return tensor.data_ptr(), tensor.data_ptr() + -(-memory_of(tensor)[1] // PAGE) * PAGE


def _scan(scanner: PageScanner, *tensors: torch.Tensor) -> PageScan:
    scan, refused = scanner.watch(sorted(map(_span, tensors)))
    assert not refused
    return scan


def test_what_is_not_written_is_not_told(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    assert scan.written() == []
    assert tensor.sum() == tensor.numel()
    assert scan.written() == []


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
        assert scan.written() == []
        write(tensor)
        assert scan.written()


def test_the_span_of_what_was_written_is_told(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    tensor.data.view(-1)[3 * PAGE // 4 : 5 * PAGE // 4 + 1] = 5  # 4 bytes each: pages 3, 4 and 5
    assert scan.written() == [(tensor.data_ptr() + 3 * PAGE, tensor.data_ptr() + 6 * PAGE)]


def test_what_lies_between_is_neither_watched_nor_protected(scanner: PageScanner) -> None:
    tensor = _ones()
    first, second = tensor[:16], tensor[32:64]
    scan = _scan(scanner, first, second)
    again = _scan(scanner, tensor[16:32])
    assert again.written() == scan.written() == []
    tensor.data[20] = 3
    assert scan.written() == []
    assert again.written() == [(tensor[20].data_ptr(), tensor[21].data_ptr())]  # nobody has taken its mark
    tensor.data[15:33] = 3
    assert scan.written() == [
        (tensor[15].data_ptr(), tensor[16].data_ptr()),
        (tensor[32].data_ptr(), tensor[33].data_ptr()),
    ]


def test_more_spans_than_are_told_apart_are_all_told_and_no_mark_is_left(scanner: PageScanner) -> None:
    memory = mmap.mmap(-1, 4 * MOST_SPANS * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(-1, PAGE).fill_(1)
    scan = _scan(scanner, tensor)
    tensor.data[::2].zero_()
    spans = scan.written()
    for row in tensor[::2]:
        assert any(begin <= row.data_ptr() < end for begin, end in spans)
    assert len(spans) <= 2 * MOST_SPANS
    assert scan.written() == []


def test_two_watches_of_the_same_memory_both_notice(scanner: PageScanner) -> None:
    tensor = _ones()
    first, second = _scan(scanner, tensor), _scan(scanner, tensor[:2])
    first.written(), second.written()
    tensor.data[0, 0] = 2
    assert first.written()  # takes the marks away
    assert second.written()


def test_pages_that_are_forgotten_are_told_no_more(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    scan.forget({tensor[3].data_ptr(), tensor[0].data_ptr()})
    tensor.data[0], tensor.data[3] = 5, 5
    assert scan.written() == []
    tensor.data[2:5] = 7
    assert scan.written() == [
        (tensor[2].data_ptr(), tensor[3].data_ptr()),
        (tensor[4].data_ptr(), tensor[5].data_ptr()),
    ]


def _map_again(address: int, nbytes: int) -> None:
    """Map other memory at some place, as the system does after memory was given back."""
    libc, fixed = ctypes.CDLL(None), 0x10
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    assert libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address


def test_other_memory_at_the_same_place_is_not_vouched_for(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    assert scan.written() == []
    _map_again(tensor.data_ptr(), 512 * 4096)
    for _ in range(3):
        assert scan.written() == [_span(tensor)]


def test_other_memory_between_or_in_some_of_it_costs_the_rest_nothing(scanner: PageScanner) -> None:
    tensor = _ones()
    kept, lost = tensor[:16], tensor[32:64]
    scan = _scan(scanner, kept, lost)
    _map_again(tensor[20].data_ptr(), 8 * 4096)
    assert scan.written() == []
    kept.data[3, 5] = 9
    assert scan.written() == [(tensor[3].data_ptr(), tensor[4].data_ptr())]
    _map_again(tensor[40].data_ptr(), 4096)
    assert scan.written() == [_span(lost)]


def test_a_child_process_is_told_everything(scanner: PageScanner) -> None:
    tensor = _ones()
    scan = _scan(scanner, tensor)
    assert scan.written() == []
    child = os.fork()
    if child == 0:
        os._exit(0 if scan.written() == [_span(tensor)] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory_that_others_may_write_is_refused(scanner: PageScanner, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.ones(1 << 16, np.float32).tofile(path)
    tensors = [torch.from_file(str(path), shared=True, size=1 << 16), torch.ones(1 << 16).share_memory_()]
    spans = sorted(map(_span, tensors))
    _, refused = scanner.watch(spans)
    assert sorted(refused) == spans
    for reason in refused.values():
        assert "other processes" in reason


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


# -- others who write on the same pages


def test_pages_that_others_write_are_compared(watch: MemoryWatch) -> None:
    tensor = _ones()
    pieces = [tensor[row, :100] for row in range(8)] + [tensor[8:12]]
    table = _table(watch, *pieces)
    before = table.compute()
    for value in range(5):
        tensor.data[:8, 500] = value
        tensor.data[12, 500] = value
        assert table.compute() is before
    assert table._pages is not None
    assert len(table._pages._copied) == 8
    tensor.data[:12, 700] = 9
    tensor.data[12:] = 9
    assert [a == b for a, b in zip(table.compute(), before, strict=True)] == [True] * 8 + [False]
    for row in (7, 0):
        before = table.compute()
        tensor.data[row, 99] = 7
        assert [n for n, (a, b) in enumerate(zip(table.compute(), before, strict=True)) if a != b] == [row]


def test_a_piece_is_seen_to_change_on_both_kinds_of_pages(watch: MemoryWatch) -> None:
    tensor = _ones().view(-1)
    piece = tensor[100:5000]  # the end of a page, three pages, the beginning of another one
    table = _table(watch, piece)
    table.compute()
    for value in range(4):
        tensor.data[[0, 5100]] = value
        table.compute()
    assert table._pages is not None
    assert len(table._pages._copied) == 2
    for place in (0, 2000, 4899):
        before = table.compute()
        piece.data[place] = 5
        assert table.compute() != before


def test_what_was_copied_while_it_was_written_is_looked_at_again(watch: MemoryWatch, monkeypatch) -> None:
    tensor = _ones()
    table = _table(watch, tensor[0, :100])
    before = table.compute()
    pages = table._pages
    assert pages is not None
    copies = pages._scanner.copies

    def write_first(parts: list[Span]) -> CopiedParts:
        tensor.data[0, 3] = 4  # by another thread, after it was looked at
        return copies(parts)

    monkeypatch.setattr(pages._scanner, "copies", write_first)
    tensor.data[0, 500] = 1
    assert table.compute() is before
    tensor.data[0, 500] = 2
    table.compute()
    assert table.compute() != before


# -- memory that is mapped from a file


@pytest.fixture(params=["old", "new"])
def mapped(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[torch.Tensor, Path]:
    """A private mapping of a file that was written long ago, or just now, and the file."""
    path = tmp_path / "weights.bin"
    np.ones(1 << 16, np.float32).tofile(path)
    if request.param == "old":
        os.utime(path, (1e9, 1e9))
        time.sleep(1.1)  # nobody can set the time at which this happened
    return torch.from_file(str(path), shared=False, size=1 << 16), path


def test_private_mappings_of_files_are_watched(watch: MemoryWatch, mapped: tuple[torch.Tensor, Path]) -> None:
    tensor, _ = mapped
    table = _table(watch, tensor[:1000], tensor[20000:])
    before = table.compute()
    assert table.compute() is before
    for write in (lambda: tensor.data[:1].fill_(3), lambda: np.copyto(tensor[30000:].numpy(), 2)):
        write()
        after = table.compute()
        assert after != before
        assert table.compute() is after
        before = after


def _overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(np.full(1 << 16, 7, np.float32).tobytes())


def _shortened(path: Path) -> None:
    np.full(1 << 16, 7, np.float32).tofile(path)


def _mapped_by_another(path: Path) -> None:
    torch.from_file(str(path), shared=True, size=1 << 16).fill_(7)


def _replaced(path: Path) -> None:
    np.full(1 << 16, 7, np.float32).tofile(path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("change", [_overwritten, _shortened, _mapped_by_another, _replaced])
def test_a_file_that_changes_is_told_apart_where_the_tensor_does(watch: MemoryWatch, mapped, change) -> None:
    tensor, path = mapped
    table = _table(watch, tensor)
    before, values = table.compute(), tensor.clone()
    for value in (5, 6):
        change(path)
        changed = not torch.equal(tensor, values)
        assert changed == (change is _shortened)  # its own pages are gone, and others' changes do not show in them
        assert (table.compute() != before) == changed
        before = table.compute()
        tensor.data[9] = value
        after = table.compute()
        assert after != before
        values, before = tensor.clone(), after
    if change is _replaced:
        return
    path.write_bytes(np.full(1 << 16, 8, np.float32).tobytes())
    assert tensor[0] == 8
    assert table.compute() != before
    before = table.compute()
    torch.from_file(str(path), shared=True, size=1 << 16)[99] = 3
    assert tensor[99] == 3
    assert table.compute() != before


def test_where_memory_is_scarce_files_are_looked_at(watch: MemoryWatch, mapped, monkeypatch) -> None:
    monkeypatch.setattr(mappings, "_spare_memory", lambda: mappings.SPARE * (1 << 18) - 1)
    tensor, path = mapped
    table = watch.table([memory_of(tensor)])
    assert table.unwatched_nbytes == 1 << 18
    before = table.compute()
    _overwritten(path)
    assert tensor[5] == 7
    assert table.compute() != before


def test_descriptors_of_files_are_closed(watch: MemoryWatch, mapped) -> None:
    tensor, path = mapped

    def opened() -> int:
        return sum(each.resolve() == path for each in Path("/proc/self/fd").iterdir())

    before = opened()
    table = _table(watch, tensor)
    assert opened() == before + 1
    del table
    gc.collect()
    assert opened() == before
