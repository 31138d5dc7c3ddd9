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
from kagent_core.watch.pages import PagesError, PageWatcher, page_watcher

WATCHER = page_watcher()
pytestmark = pytest.mark.skipif(isinstance(WATCHER, str), reason=f"pages cannot be watched here: {WATCHER}")


@pytest.fixture
def watcher() -> PageWatcher:
    assert isinstance(WATCHER, PageWatcher)
    return WATCHER


def _ones() -> torch.Tensor:
    """Return a tensor on pages of its own, on which nobody else writes."""
    memory = mmap.mmap(-1, 512 * 1024 * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(512, 1024).fill_(1)


def _watched(watcher: PageWatcher, tensor: torch.Tensor):
    (pages,) = watcher.watch([(tensor.data_ptr(), tensor.untyped_storage().nbytes())])
    return pages


def test_what_is_not_written_keeps_its_generation(watcher: PageWatcher) -> None:
    tensor = _ones()
    pages = _watched(watcher, tensor)
    before = pages.generation()
    assert before is not None
    assert tensor.sum() == tensor.numel()
    assert pages.generation() == before


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
def test_every_write_is_noticed_every_time(watcher: PageWatcher, write) -> None:
    tensor = _ones()
    pages = _watched(watcher, tensor)
    for _ in range(3):
        before = pages.generation()
        assert pages.generation() == before
        write(tensor)
        after = pages.generation()
        assert after is not None
        assert after != before


def test_many_pages_apart_are_one_change_and_no_mark_is_left(watcher: PageWatcher) -> None:
    tensor = _ones()
    pages = _watched(watcher, tensor)
    before = pages.generation()
    tensor.data[::2].zero_()
    after = pages.generation()
    assert after != before
    assert pages.generation() == after


def test_two_watches_of_the_same_memory_both_notice(watcher: PageWatcher) -> None:
    tensor = _ones()
    first, (second,) = _watched(watcher, tensor), watcher.watch([(tensor.data_ptr(), 8192)])
    known = first.generation(), second.generation()
    known = first.generation(), second.generation()
    tensor.data[0, 0] = 2
    changed = first.generation()  # takes the marks away
    assert changed != known[0]
    assert second.generation() != known[1]


def test_other_memory_at_the_same_place_is_not_vouched_for(watcher: PageWatcher) -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    (pages,) = watcher.watch([(address, 1 << 20)])
    before = pages.generation()
    assert before is not None
    gc.collect()
    memory.close()
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
    again = libc.mmap(address, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert again == address
    assert pages.generation() != before
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(1 << 20))


def test_a_child_process_is_told_nothing(watcher: PageWatcher) -> None:
    tensor = _ones()
    pages = _watched(watcher, tensor)
    assert pages.generation() is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if pages.generation() is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory_that_others_may_write_is_refused(watcher: PageWatcher, tmp_path) -> None:
    path = tmp_path / "weights.bin"
    np.ones(1 << 16, np.float32).tofile(path)
    for shared in (True, False):
        mapped = torch.from_file(str(path), shared=shared, size=1 << 16)
        assert "other processes" in _watched(watcher, mapped)
    assert "other processes" in _watched(watcher, torch.ones(1 << 16).share_memory_())


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
