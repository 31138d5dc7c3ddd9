"""Fingerprints of memory: every byte and its place count."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
import torch

from kagent_core.config import load_config
from kagent_core.native import find_compiler
from kagent_core.watch import fingerprint
from kagent_core.watch.fingerprint import Fingerprinter, make_fingerprinter

BLOCK, CHUNK = 2048, 1 << 16
SIZES = (1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 8 * CHUNK)


@pytest.fixture(scope="module")
def fingerprinter() -> Fingerprinter:
    made = make_fingerprinter(load_config().cache_dir)
    assert made is not None
    return made


def bytes_of(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def of(fingerprinter, *arrays):
    return fingerprinter.table([(array.ctypes.data, array.nbytes) for array in arrays]).compute()


@pytest.mark.parametrize("nbytes", SIZES)
def test_any_bit_of_any_byte_changes_it(fingerprinter, nbytes):
    values, chance = bytes_of(nbytes), random.Random(nbytes)
    table = fingerprinter.table([(values.ctypes.data, nbytes)])
    (before,) = table.compute()
    assert len(before) == fingerprint.NBYTES
    places = {0, nbytes - 1, *(chance.randrange(nbytes) for _ in range(40))}
    for place in places:
        for bit in range(8):
            values[place] ^= 1 << bit
            assert table.compute() != [before]
            values[place] ^= 1 << bit
    assert table.compute() == [before]


@pytest.mark.parametrize("step", [1, 2, 4, 8, 16, BLOCK, CHUNK])
@pytest.mark.parametrize("fill", ["random", "zeros"])
def test_places_count(fingerprinter, step, fill):
    values = bytes_of(4 * CHUNK) if fill == "random" else np.zeros(4 * CHUNK, np.uint8)
    seen = set()
    for place in (0, step, 2 * step, 3 * step):
        changed = values.copy()
        changed[place] ^= 0x80
        seen.add(of(fingerprinter, changed)[0])
    assert len(seen) == 4
    swapped = values.copy()
    swapped[:step], swapped[step : 2 * step] = values[step : 2 * step], values[:step]
    assert (of(fingerprinter, swapped) == of(fingerprinter, values)) == (fill == "zeros")


def test_lengths_count(fingerprinter):
    zeros = np.zeros(2 * CHUNK, np.uint8)
    lengths = (0, 1, 8, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK)
    found = [fingerprinter.table([(zeros.ctypes.data, nbytes)]).compute()[0] for nbytes in lengths]
    assert len(set(found)) == len(lengths)


def test_a_table_gives_what_each_piece_gives_alone(fingerprinter):
    arrays = [bytes_of(nbytes, nbytes) for nbytes in (*SIZES, *SIZES[::-1])]
    arrays[3:3] = [np.zeros(0, np.uint8)]
    arrays.append(np.zeros(0, np.uint8))
    assert of(fingerprinter, *arrays) == [of(fingerprinter, array)[0] for array in arrays]
    assert of(fingerprinter) == []


@pytest.mark.parametrize("shift", [0, 1, 3, 4, 12])
def test_where_the_memory_lies_does_not_count(fingerprinter, shift):
    values = bytes_of(CHUNK + 100)
    moved = np.zeros(values.nbytes + 64, np.uint8)[shift : shift + values.nbytes]
    moved[:] = values
    assert of(fingerprinter, moved) == of(fingerprinter, values)


def test_threads_do_not_count(fingerprinter):
    values, threads = bytes_of(40 * CHUNK + 3), torch.get_num_threads()
    try:
        found = []
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(of(fingerprinter, values))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_nothing_behind_the_end_is_read(fingerprinter):
    memory = ctypes.create_string_buffer(b"\1" * 4096, 4096)
    for nbytes in (1, 8, 100, BLOCK + 3):
        table = fingerprinter.table([(ctypes.addressof(memory), nbytes)])
        before = table.compute()
        memory[nbytes] = b"\2"
        assert table.compute() == before
        memory[nbytes] = b"\1"


def test_it_is_what_it_says(fingerprinter):
    """NH of every block, and the polynomials, in Python's integers."""
    prime = (1 << 61) - 1
    keys = fingerprinter._keys.tolist()
    block_keys, chunk_points, points = (keys[:256], keys[256:512]), keys[512:514], keys[514:516]

    def nh(words, key):
        total = 0
        for w, k in zip(words, key, strict=True):
            low, high = (w + k) % 2**32, ((w >> 32) + (k >> 32)) % 2**32
            total += low * high
        return total % 2**64

    def chunk(data):
        digest = [len(data)] * 2
        for at in range(0, len(data), BLOCK):
            words = np.frombuffer(data[at : at + BLOCK].ljust(BLOCK, b"\0"), np.uint64).tolist()
            values = [nh(words, key) for key in block_keys]
            for part in (0, 1):
                for value in values:
                    for half in (value >> 32, value % 2**32):
                        digest[part] = (digest[part] * chunk_points[part] + half) % prime
        return digest

    for nbytes in (5, BLOCK, CHUNK + BLOCK + 3):
        data = bytes_of(nbytes).tobytes()
        whole = [nbytes] * 2
        for at in range(0, nbytes, CHUNK):
            for part in (0, 1):
                for digest in chunk(data[at : at + CHUNK])[0:2]:
                    whole[part] = (whole[part] * points[part] + digest) % prime
        want = b"".join(value.to_bytes(8, "little") for value in whole)
        assert of(fingerprinter, np.frombuffer(data, np.uint8)) == [want]


def test_without_a_compiler_there_is_none(monkeypatch, tmp_path):
    assert find_compiler() is not None
    monkeypatch.setattr(fingerprint, "find_compiler", lambda: None)
    monkeypatch.setattr(fingerprint, "why_no_compiler", lambda: "no compiler")
    assert make_fingerprinter(tmp_path) is None


def test_only_what_may_have_changed_is_looked_at(fingerprinter):
    values = [bytes_of(3 * CHUNK + 5, 1), bytes_of(100, 2)]
    table = fingerprinter.table([(each.ctypes.data, each.nbytes) for each in values])
    before = table.compute()
    address = values[0].ctypes.data
    assert table.compute([]) is before
    values[0][2 * CHUNK] ^= 1
    assert table.compute([(address, address + 2 * CHUNK)]) is before  # it ends before that byte
    assert table.compute([(address + 3 * CHUNK, address + 3 * CHUNK + 1)]) is before
    changed = table.compute([(address + 2 * CHUNK, address + 2 * CHUNK + 1)])
    assert changed[0] != before[0]
    assert changed[1] == before[1]
    assert changed == of(fingerprinter, *values)
