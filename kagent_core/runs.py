"""Which bytes a strided tensor touches, as few runs as there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

RUN_LIMIT = 256
"""A tensor of more runs than this is taken to touch everything from its first to its last byte."""


def byte_runs(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, limit: int = RUN_LIMIT
) -> list[tuple[int, int]]:
    """Return the bytes that a tensor touches, from its first element, as (offset, length) in ascending order.

    Exact up to `limit` runs; past that one run covers all, which may order what need not be ordered, but never misses
    a byte. Dimensions of size 1 and of stride 0 touch nothing more; dimensions that overlap or join, such as an
    unfolded one, are merged.

    Parameters
    ----------
    shape, strides
        In elements; strides are not negative, as everywhere in PyTorch.
    itemsize
        Bytes of an element.
    limit
        Most runs.

    Examples
    --------
    >>> byte_runs((3, 4), (4, 1), 4)
    [(0, 48)]
    >>> byte_runs((2, 3), (8, 2), 1)
    [(0, 1), (2, 1), (4, 1), (8, 1), (10, 1), (12, 1)]
    >>> byte_runs((5, 3), (0, 1), 8), byte_runs((0, 3), (3, 1), 8)
    ([(0, 24)], [])
    """
    if 0 in shape:
        return []
    run = itemsize
    outer: list[tuple[int, int]] = []
    for stride, size in sorted((stride * itemsize, size) for size, stride in zip(shape, strides, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride <= run and not outer:
            run += (size - 1) * stride
        else:
            outer.append((stride, size))
    count = 1
    for _, size in outer:
        count *= size
    if count > limit:
        return [(0, run + sum((size - 1) * stride for stride, size in outer))]
    steps = [range(0, size * stride, stride) for stride, size in outer]
    return _merged(sorted(map(sum, itertools.product(*steps))), run)


def _merged(starts: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Join equally long runs that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for start in starts:
        if merged and start <= sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = (first, start + length - first)
        else:
            merged.append((start, length))
    return merged
