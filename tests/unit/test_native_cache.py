"""Compiled libraries are kept, shared between processes and threads, checked, and never taken from strangers."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kagent_core.errors import CompilationError, ConfigError
from kagent_core.native import Compiler, load
from kagent_core.native import cache as cache_module
from kagent_core.native import private as private_module
from kagent_core.native.cache import LibraryCache, cache_key

SOURCE = "void answer(const long long *table) { ((long long *)table[0])[0] = 42; }\n"


@pytest.fixture
def counted(commands):
    """Return a compiler that writes a line per call, and a function that counts them."""
    compiler, calls = commands
    return compiler, lambda: len(calls())


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory into which nobody can write, not even root."""
    directory = tmp_path / "read-only"
    (directory / "native").mkdir(parents=True, mode=0o700)
    mkstemp = private_module.tempfile.mkstemp

    def refuse(*args: object, **kwargs: object):
        if str(kwargs["dir"]).startswith(str(directory)):
            raise OSError(30, "Read-only file system")
        return mkstemp(*args, **kwargs)

    monkeypatch.setattr(private_module.tempfile, "mkstemp", refuse)
    return directory


def files(directory: Path) -> set[Path]:
    return {path for path in (directory / "native").rglob("*") if path.is_file()}


def answer(path: Path, name: str = "answer") -> int:
    out = ctypes.c_longlong()
    table = (ctypes.c_longlong * 1)(ctypes.addressof(out))
    ctypes.CDLL(str(path))[name](ctypes.c_void_p(ctypes.addressof(table)))
    return out.value


# ---- entries -------------------------------------------------------------------------------------------------------


def test_the_second_time_comes_from_the_cache(counted, tmp_path: Path) -> None:
    compiler, count = counted
    first = LibraryCache(tmp_path).entry(SOURCE, compiler)
    second = LibraryCache(tmp_path).entry(SOURCE, compiler)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.compile_ms > 0
    assert second.compile_ms == 0
    assert first.path == second.path
    assert count() == 1
    assert answer(second.path) == 42


def test_the_source_lies_beside_the_library(compiler: Compiler, tmp_path: Path) -> None:
    entry = LibraryCache(tmp_path).entry(SOURCE, compiler)
    assert entry.source.read_text(encoding="utf-8") == SOURCE
    key = cache_key(SOURCE, compiler)
    assert entry.source == tmp_path / "native" / key[:2] / f"{key}.c"
    assert files(tmp_path) == {entry.source, entry.path}


def test_the_key_holds_all_that_decides_the_code(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [
        (SOURCE, compiler),
        (SOURCE + "\n", compiler),
        (SOURCE, dataclasses.replace(compiler, flags=(*compiler.flags, "-O1"))),
        (SOURCE, dataclasses.replace(compiler, libraries=())),
        (SOURCE, dataclasses.replace(compiler, command=("other", *compiler.command))),
        (SOURCE, dataclasses.replace(compiler, version="another version")),
    ]
    keys = [cache_key(*variant) for variant in variants]
    monkeypatch.setattr(cache_module, "machine_identity", lambda: ("another machine",))
    keys.append(cache_key(SOURCE, compiler))
    assert len(set(keys)) == len(keys)


def test_the_words_of_a_key_do_not_run_together(compiler: Compiler) -> None:
    one, other = (dataclasses.replace(compiler, command=words) for words in (("a", "bc"), ("ab", "c")))
    assert cache_key(SOURCE, one) != cache_key(SOURCE, other)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign"])
def test_a_damaged_entry_is_compiled_again(compiler: Compiler, tmp_path: Path, damage: str) -> None:
    cache = LibraryCache(tmp_path)
    entry = cache.entry(SOURCE, compiler)
    data = entry.path.read_bytes()
    foreign = cache.entry(SOURCE.replace("42", "43"), compiler).path.read_bytes()
    half = len(data) // 2
    changed = {
        "empty": b"",
        "truncated": data[:half],
        "flipped": data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :],
        "foreign": foreign,
    }
    entry.path.write_bytes(changed[damage])
    again = cache.entry(SOURCE, compiler)
    assert not again.from_cache
    assert answer(again.path) == 42
    assert cache.entry(SOURCE, compiler).from_cache


def test_a_failing_compilation_leaves_only_its_source(compiler: Compiler, tmp_path: Path) -> None:
    bad = "void f(void) {\n  x = 1;\n  y = 2;\n}\n"
    with pytest.raises(CompilationError, match=r"failed with exit code 1 .*'x' undeclared") as caught:
        LibraryCache(tmp_path).entry(bad, compiler)
    [source] = files(tmp_path)
    assert source.name == f"{cache_key(bad, compiler)}.c"
    assert source.read_text(encoding="utf-8") == bad
    assert "'y' undeclared" in caught.value.message
    assert str(source) in str(caught.value.hint)
    assert shlex.join((*compiler.command, *compiler.flags)) in str(caught.value.hint)


def test_a_compiler_that_is_gone_is_named(compiler: Compiler, tmp_path: Path) -> None:
    gone = dataclasses.replace(compiler, command=("/nowhere/cc",))
    with pytest.raises(CompilationError, match="/nowhere/cc could not be run"):
        LibraryCache(tmp_path).entry(SOURCE, gone)


# ---- the directory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_directory_is_private(compiler: Compiler, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        LibraryCache(tmp_path / "made").entry(SOURCE, compiler)
    finally:
        os.umask(before)
    assert (tmp_path / "made" / "native").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_to_is_refused(compiler: Compiler, tmp_path: Path, mode: int) -> None:
    cache = LibraryCache(tmp_path)
    cache.entry(SOURCE, compiler)
    (tmp_path / "native").chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}") as caught:
        cache.entry(SOURCE, compiler)
    assert "chmod 700" in str(caught.value.hint)


def test_a_directory_of_another_user_is_refused(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LibraryCache(tmp_path).entry(SOURCE, compiler)
    monkeypatch.setattr(private_module.os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="expected the current user, 12345") as caught:
        LibraryCache(tmp_path).entry(SOURCE, compiler)
    assert "cache_dir" in str(caught.value.hint)


def test_a_file_in_the_directorys_place_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "native").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        LibraryCache(tmp_path).entry(SOURCE, compiler)


def test_where_nothing_can_be_written_a_private_directory_is_used(
    compiler: Compiler, read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = LibraryCache(read_only)
    with caplog.at_level(logging.WARNING, "kagent.codegen"):
        first = cache.entry(SOURCE, compiler)
        other = cache.entry(SOURCE.replace("42", "43"), compiler)
        again = cache.entry(SOURCE, compiler)
    assert answer(first.path) == 42
    assert answer(other.path) == 43
    assert again.from_cache
    assert not first.path.is_relative_to(read_only)
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1
    assert "Read-only file system" in caplog.messages[0]
    assert str(read_only) in caplog.messages[0]


def test_the_private_directory_may_vanish(compiler: Compiler, read_only: Path) -> None:
    cache = LibraryCache(read_only)
    shutil.rmtree(cache.entry(SOURCE, compiler).path.parent)
    assert answer(cache.entry(SOURCE, compiler).path) == 42


def test_the_private_directory_ends_with_the_process_that_made_it(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")  # a file: no directory can be made below it
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom kagent_core.native import find_compiler\n"
        "from kagent_core.native.cache import LibraryCache\n"
        f"path = LibraryCache(Path({str(tmp_path / 'cache')!r})).entry({SOURCE!r}, find_compiler()).path\n"
        "if os.fork() == 0:\n    sys.exit()\n"
        "os.wait()\nprint(path.exists(), path.parent)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    there, directory = done.stdout.split()
    assert there == "True"
    assert not Path(directory).exists()


def test_what_is_in_a_read_only_directory_is_used(compiler: Compiler, tmp_path: Path, read_only: Path) -> None:
    written = LibraryCache(tmp_path / "writable").entry(SOURCE, compiler)
    shutil.copytree(written.path.parent, read_only / "native" / written.path.parent.name)
    entry = LibraryCache(read_only).entry(SOURCE, compiler)
    assert entry.from_cache
    assert entry.path.is_relative_to(read_only / "native")


# ---- many at once --------------------------------------------------------------------------------------------------


def test_many_processes_that_build_the_same_all_succeed(compiler: Compiler, tmp_path: Path) -> None:
    program = (
        "import ctypes, sys\nfrom pathlib import Path\nfrom kagent_core.native import find_compiler, load\n"
        "compiler = find_compiler()\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "out = ctypes.c_longlong()\ntable = (ctypes.c_longlong * 1)(ctypes.addressof(out))\n"
        f"load({SOURCE!r}, Path({str(tmp_path)!r}), compiler).function('answer')(ctypes.addressof(table))\n"
        "print(out.value)"
    )
    pipe = subprocess.PIPE
    workers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:  # let go together, once all have started
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    outputs = [worker.communicate() for worker in workers]
    assert [out for out, _ in outputs] == ["42\n"] * 4, outputs
    assert not [path for path in files(tmp_path) if path.name.startswith("tmp-")]
    assert LibraryCache(tmp_path).entry(SOURCE, compiler).from_cache


def test_threads_that_ask_at_once_compile_once(counted, tmp_path: Path) -> None:
    compiler, count = counted
    barrier, found = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(load(SOURCE, tmp_path, compiler))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count() == 1
    assert len(found) == 8
    assert all(library is found[0] for library in found)


def test_a_failure_is_told_to_all_and_not_remembered(compiler: Compiler, tmp_path: Path) -> None:
    script, works = tmp_path / "flaky-cc", tmp_path / "works"
    script.write_text(
        f'#!/bin/sh\ntest -e {works} || {{ sleep 0.2; echo "error: no luck" >&2; exit 3; }}\n'
        f'exec {shlex.join(compiler.command)} "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    flaky = dataclasses.replace(compiler, command=(str(script),))
    errors = []

    def ask() -> None:
        try:
            load(SOURCE, tmp_path, flaky)
        except CompilationError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert "error: no luck" in errors[0].message
    works.touch()
    assert answer(load(SOURCE, tmp_path, flaky).path) == 42


# ---- loading -------------------------------------------------------------------------------------------------------


def test_a_library_says_where_it_comes_from(compiler: Compiler, tmp_path: Path, caplog) -> None:
    LibraryCache(tmp_path).entry(SOURCE, compiler)
    with caplog.at_level(logging.DEBUG, "kagent.codegen"):
        cached = load(SOURCE, tmp_path, compiler)
        made = load(SOURCE.replace("42", "43"), tmp_path, compiler)
    assert cached.from_cache
    assert cached.compile_ms == 0
    assert not made.from_cache
    assert made.compile_ms > 0
    assert cached.source.read_text(encoding="utf-8") == SOURCE
    first, second = caplog.messages
    assert first.startswith(f"{cached.key}: found in the cache")
    assert second.startswith(f"{made.key}: compiled in {made.compile_ms:.0f} ms")


def test_a_library_that_lacks_a_symbol_is_an_error(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(CompilationError, match=r"cannot be loaded.*no_such_symbol") as caught:
        load("extern void no_such_symbol(void); void f(void *x) { no_such_symbol(); }", tmp_path, compiler)
    assert ".c'" in str(caught.value.hint)


def test_a_whole_entry_that_cannot_be_loaded_is_compiled_again(compiler: Compiler, tmp_path: Path) -> None:
    key = cache_key(SOURCE, compiler)
    directory = tmp_path / "native" / key[:2]
    directory.mkdir(mode=0o700, parents=True)
    directory.parent.chmod(0o700)
    alien = b"made for another C library"
    (directory / cache_module._name(key, alien)).write_bytes(alien)
    library = load(SOURCE, tmp_path, compiler)
    assert not library.from_cache
    assert answer(library.path) == 42


def test_a_forked_process_does_not_wait_for_its_parents_threads(compiler: Compiler, tmp_path: Path) -> None:
    program = (
        "import dataclasses, os, signal, threading, time\nfrom pathlib import Path\n"
        "from kagent_core.native import find_compiler, load\n"
        f"directory, compiler = Path({str(tmp_path)!r}), find_compiler()\n"
        "script, started = directory / 'slow-cc', directory / 'started'\n"
        "script.write_text(f'#!/bin/sh\\ntest -e {started} || {{ touch {started}; sleep 1; }}\\n'"
        " f'exec {compiler.command[0]} \"$@\"\\n')\n"
        "script.chmod(0o755)\nslow = dataclasses.replace(compiler, command=(str(script),))\n"
        f"thread = threading.Thread(target=load, args=({SOURCE!r}, directory, slow))\nthread.start()\n"
        "while not started.exists():\n    time.sleep(0.01)\n"
        "child = os.fork()\n"
        f"if child == 0:\n    signal.alarm(20)\n    load({SOURCE!r}, directory, slow)\n    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\nthread.join()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "7\n", done.stderr
