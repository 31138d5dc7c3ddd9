"""Fingerprints of host memory: whether any byte has changed, for less than it costs to copy the bytes to a device.

A fingerprint has 128 bits, of two parts with keys of their own, drawn at random in each process. The bytes are taken in
blocks of 2 KiB. A block goes through NH (Black and others, *UMAC: Fast and Secure Message Authentication*, 1999), a sum
of products of 32-bit halves with a key added to each, which gives two different blocks the same value with a
probability of at most 2**-32 in each part, 2**-64 in both. The values of the blocks are coefficients of polynomials
modulo 2**61 - 1, evaluated at random points: that adds less than 2**-70 for a tensor of 1 TiB. So a change, whatever it
is, goes unseen with a probability of about 2**-64, and every byte's place counts.
"""

from __future__ import annotations

import array
import itertools
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kagent_core.errors import KagentError
from kagent_core.inspect.logs import get_logger
from kagent_core.native import find_compiler, load, why_no_compiler

log = get_logger("execute")

NBYTES = 16
"""Bytes of a fingerprint."""

_BLOCK = 2048
_CHUNK = 1 << 16
_PRIME = (1 << 61) - 1
_SPANS = 5
"""Where a table has the number of spans, and then their address."""

_OTHERS = 7
"""Where it says whether any result is another one than before."""

EVERYWHERE = ((0, (1 << 63) - 1),)
"""The span that is all memory."""

_SOURCE = r"""
#include <stdint.h>
#include <string.h>

#define BLOCK 2048
#define CHUNK 65536
#define WORDS (BLOCK / 8)
#define PRIME ((UINT64_C(1) << 61) - 1)
#define ONE_THREAD 262144

typedef uint64_t word __attribute__((aligned(1), may_alias));
typedef struct { const unsigned char *bytes; int64_t nbytes, first_chunk; } range;
typedef struct { uint64_t block[2][WORDS], chunk[2], whole[2]; } keys;

/* NH with two keys. The halves of a 64-bit word are multiplied, each with a key added to it. */
static inline void nh(const word *m, const keys *k, uint64_t *one, uint64_t *two) {
    uint64_t a = 0, b = 0;
    #pragma omp simd reduction(+ : a, b)
    for (int i = 0; i < WORDS; i++) {
        uint64_t w = m[i], p = k->block[0][i], q = k->block[1][i];
        a += (uint64_t)(uint32_t)((uint32_t)w + (uint32_t)p) * (uint32_t)((uint32_t)(w >> 32) + (uint32_t)(p >> 32));
        b += (uint64_t)(uint32_t)((uint32_t)w + (uint32_t)q) * (uint32_t)((uint32_t)(w >> 32) + (uint32_t)(q >> 32));
    }
    *one = a;
    *two = b;
}

static inline uint64_t step(uint64_t h, uint64_t r, uint64_t coefficient) {
    unsigned __int128 product = (unsigned __int128)h * r + coefficient;
    uint64_t sum = (uint64_t)(product & PRIME) + (uint64_t)(product >> 61);
    return sum >= PRIME ? sum - PRIME : sum;
}

static void chunk(const unsigned char *bytes, int64_t nbytes, const keys *k, uint64_t *digest) {
    uint64_t h[2] = {(uint64_t)nbytes, (uint64_t)nbytes};
    for (int64_t at = 0; at < nbytes; at += BLOCK) {
        unsigned char last[BLOCK];
        const unsigned char *m = bytes + at;
        if (nbytes - at < BLOCK) {
            memset(last, 0, BLOCK);
            memcpy(last, m, nbytes - at);
            m = last;
        }
        uint64_t values[2];
        nh((const word *)m, k, &values[0], &values[1]);
        /* both values go into both polynomials */
        for (int part = 0; part < 2; part++)
            for (int v = 0; v < 2; v++) {
                h[part] = step(h[part], k->chunk[part], values[v] >> 32);
                h[part] = step(h[part], k->chunk[part], (uint32_t)values[v]);
            }
    }
    digest[0] = h[0];
    digest[1] = h[1];
}

/* table: number of ranges, number of chunks, keys, digests of chunks, results, number of spans that may have changed,
   these spans, whether any result is another one than before, then the ranges */
void fingerprints(int64_t *table) {
    int64_t count = table[0], chunks = table[1], spans = table[5];
    const keys *k = (const keys *)table[2];
    uint64_t *digests = (uint64_t *)table[3], *results = (uint64_t *)table[4];
    const int64_t *changed = (const int64_t *)table[6];
    const range *ranges = (const range *)(table + 8);
    table[7] = 0;
    #pragma omp parallel for schedule(dynamic, 1) if (chunks * CHUNK > ONE_THREAD)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t low = 0, high = count - 1;
        while (low < high) {
            int64_t middle = (low + high + 1) / 2;
            if (ranges[middle].first_chunk <= c) low = middle; else high = middle - 1;
        }
        const range *r = &ranges[low];
        int64_t begin = (c - r->first_chunk) * CHUNK, rest = r->nbytes - begin;
        int64_t nbytes = rest < CHUNK ? rest : CHUNK, address = (int64_t)(r->bytes + begin);
        for (int64_t s = 0; s < spans; s++)
            if (changed[2 * s] < address + nbytes && address < changed[2 * s + 1]) {
                chunk(r->bytes + begin, nbytes, k, digests + 2 * c);
                break;
            }
    }
    for (int64_t n = 0; n < count; n++) {
        int64_t end = n + 1 < count ? ranges[n + 1].first_chunk : chunks;
        uint64_t h[2] = {(uint64_t)ranges[n].nbytes, (uint64_t)ranges[n].nbytes};
        for (int64_t c = ranges[n].first_chunk; c < end; c++)
            for (int part = 0; part < 2; part++)
                for (int d = 0; d < 2; d++) h[part] = step(h[part], k->whole[part], digests[2 * c + d]);
        if (results[2 * n] != h[0] || results[2 * n + 1] != h[1]) table[7] = 1;
        results[2 * n] = h[0];
        results[2 * n + 1] = h[1];
    }
}
"""


class Fingerprinter:
    """Computes fingerprints, in compiled code on as many threads as torch is set to use.

    Parameters
    ----------
    function
        The compiled function.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        points = [1 + secrets.randbelow(_PRIME - 1) for _ in range(4)]
        self._keys = array.array("Q", secrets.token_bytes(2 * _BLOCK))
        self._keys.extend(points)

    def table(self, ranges: Sequence[tuple[int, int]]) -> FingerprintTable:
        """Return what computes the fingerprints of some memory again and again.

        Parameters
        ----------
        ranges
            Address and length in bytes of each piece. It must be there whenever a fingerprint is computed.
        """
        return FingerprintTable(self._function, self._keys, ranges)


class FingerprintTable:
    """Pieces of memory to take fingerprints of; made by `Fingerprinter.table`. For one thread at a time.

    Attributes
    ----------
    latest
        What `compute` has returned last.
    """

    def __init__(
        self, function: Callable[[int], None], keys: array.array[int], ranges: Sequence[tuple[int, int]]
    ) -> None:
        self._function = function
        self._keys = keys
        self._count = len(ranges)
        entries: list[int] = []
        chunks = 0
        for address, nbytes in ranges:
            entries += (address, nbytes, chunks)
            chunks += -(-nbytes // _CHUNK)
        self._digests = array.array("Q", bytes(NBYTES * max(chunks, 1)))
        self._results = array.array("Q", bytes(NBYTES * max(self._count, 1)))
        places = (each.buffer_info()[0] for each in (keys, self._digests, self._results))
        self._table = array.array("Q", [self._count, chunks, *places, 0, 0, 0, *entries])
        self.latest: list[bytes] = []

    def compute(self, changed: Sequence[tuple[int, int]] = EVERYWHERE) -> list[bytes]:
        """Return the fingerprints of what lies in the memory now; the same list where nothing has changed.

        Parameters
        ----------
        changed
            Begin and end, as addresses, of what alone may have changed since they were computed last; by default, and
            the first time, everything.
        """
        spans = array.array("Q", itertools.chain.from_iterable(changed))
        self._table[_SPANS], self._table[_SPANS + 1] = len(changed), spans.buffer_info()[0]
        torch.get_num_threads()  # tells this thread how many the compiled code may use
        self._function(self._table.buffer_info()[0])
        if self._table[_OTHERS] or not self.latest:
            found = self._results.tobytes()
            self.latest = [found[NBYTES * n : NBYTES * (n + 1)] for n in range(self._count)]
        return self.latest


def make_fingerprinter(cache_dir: Path) -> Fingerprinter | None:
    """Return what computes fingerprints; None where no C compiler works, for in Python copying is cheaper."""
    try:
        compiler = find_compiler()
        if compiler is not None:
            return Fingerprinter(load(_SOURCE, cache_dir, compiler).function("fingerprints"))
        reason = why_no_compiler()
    except KagentError as error:
        reason = str(error)
    log.warning("parameters are copied to their device at every call, as they cannot be checked: %s", reason)
    return None
