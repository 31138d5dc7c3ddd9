"""C texts that several compilers take at once, each a share of the functions."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

OWN = "KAGENT_OWN"
"""Stands for ``static`` before a function that functions of other pieces call."""

_FIRST, _PAST = "KAGENT_FIRST", "KAGENT_PAST"

LEAST = 8_000
"""Characters of a share. gcc took 11 ms for a thousand characters of kernels, and 14 ms for a text without any."""


@dataclass(frozen=True)
class PiecedText:
    """A C text in pieces. As it is, a compiler takes all of it; with the flags of a share, only some of the pieces.

    Parameters
    ----------
    head
        What every piece needs: types, declarations, `OWN` functions' among them, and functions that are static.
    pieces
        Definitions of functions, in any order.
    """

    head: str
    pieces: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"#ifdef {_FIRST}",
            f'#define {OWN} __attribute__((visibility("hidden")))',
            "#else",
            f"#define {OWN} static",
            f"#define {_FIRST} 0",
            f"#define {_PAST} {len(self.pieces)}",
            "#endif",
            self.head,
        ]
        for number, piece in enumerate(self.pieces):
            lines += [f"#if {_FIRST} <= {number} && {number} < {_PAST}", piece, "#endif"]
        return "\n".join(lines) + "\n"

    def shares(self, most: int) -> list[tuple[str, ...]]:
        """Return the flags of each share: about equally long, `LEAST` characters or more, and not more than so many."""
        lengths = [len(piece) for piece in self.pieces]
        count = max(1, min(most, sum(lengths) // LEAST, len(lengths)))
        ends = _ends(lengths, count)
        return [(f"-D{_FIRST}={first}", f"-D{_PAST}={past}") for first, past in zip([0, *ends[:-1]], ends, strict=True)]


def _ends(lengths: Sequence[int], count: int) -> list[int]:
    """Return where each of some stretches of a list ends, whose sums are about equal; none is empty."""
    middles = [end - length / 2 for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)]
    ends = [0]
    for share in range(1, count):
        wanted = bisect.bisect(middles, sum(lengths) * share / count)
        ends.append(min(max(wanted, ends[-1] + 1), len(lengths) - (count - share)))
    return [*ends[1:], len(lengths)]


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
