"""Philox4x32-10 once more, in Python's own numbers, and the seeds that kagent draws: what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the four words that a counter of four words and a key of two become."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ k, second & WORD, first >> 32 ^ d ^ m, first & WORD
        k, m = k + 0x9E3779B9 & WORD, m + 0xBB67AE85 & WORD
    return a, b, c, d


def words(seed: int, stream: int, place: int) -> tuple[int, int, int, int]:
    """Return the words of one element of what a random operator makes."""
    return philox((place & WORD, place >> 32, stream & WORD, stream >> 32), (seed & WORD, seed >> 32 & WORD))


def drawn_seed(manual_seed: int) -> int:
    """Return the seed that a program draws first after ``torch.manual_seed``, whose state is left alone."""
    generator = torch.Generator().manual_seed(manual_seed)
    return int(torch.zeros((), dtype=torch.int64).random_(-(2**63), None, generator=generator))
