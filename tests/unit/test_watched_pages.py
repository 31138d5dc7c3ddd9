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
