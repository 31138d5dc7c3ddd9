"""Binaries are found again, unless they are damaged or others could have written them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kagent_core.errors import ConfigError
from kagent_core.native.binaries import BinaryCache


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    key = BinaryCache.key("source", "options", "device")
    assert BinaryCache(tmp_path / "cl").find(key) is None
    BinaryCache(tmp_path / "cl").keep(key, b"\0binary")
    assert BinaryCache(tmp_path / "cl").find(key) == b"\0binary"
    assert (tmp_path / "cl").stat().st_mode & 0o777 == 0o700


def test_keys_hold_each_part_and_where_it_ends() -> None:
    keys = {BinaryCache.key(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""))}
    assert len(keys) == 4


def test_a_damaged_binary_is_removed(tmp_path: Path) -> None:
    cache, key = BinaryCache(tmp_path / "cl"), BinaryCache.key("x")
    cache.keep(key, b"binary")
    [path] = files(tmp_path / "cl")
    path.write_bytes(b"binarz")
    assert cache.find(key) is None
    assert files(tmp_path / "cl") == []


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path / "cl")
    for text in ("x", "y"):
        cache.keep(BinaryCache.key(text), text.encode())
    cache.forget(BinaryCache.key("x"))
    assert cache.find(BinaryCache.key("x")) is None
    assert cache.find(BinaryCache.key("y")) == b"y"


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cl").mkdir(mode=0o700)
    (tmp_path / "cl").chmod(0o777)
    with pytest.raises(ConfigError, match="only its owner may write"):
        BinaryCache(tmp_path / "cl").find("key")


def test_many_writers_of_one_binary(tmp_path: Path) -> None:
    key = BinaryCache.key("x")
    threads = [threading.Thread(target=BinaryCache(tmp_path / "cl").keep, args=(key, b"one")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert BinaryCache(tmp_path / "cl").find(key) == b"one"
    assert len(files(tmp_path / "cl")) == 1
