"""Inputs that share memory with one that is written, checked against every pair's addresses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.capture.ranges import address_ranges, overlap_with_written

NBYTES = 96


def byte_ranges(found, base):
    """The ranges, counted from the start of `base`'s storage."""
    return [(span.offset - base.data_ptr(), span.nbytes) for span in found]


@pytest.mark.parametrize(
    ("view", "covered"),
    [
        (lambda t: t, [(0, 96)]),
        (lambda t: t[5:], [(20, 76)]),
        (lambda t: t[::8], [(0, 4), (32, 4), (64, 4)]),
        (lambda t: t.view(4, 6)[:, 2], [(8, 4), (32, 4), (56, 4), (80, 4)]),
        (lambda t: t.view(4, 6).t(), [(0, 96)]),
        (lambda t: t[:1].expand(7), [(0, 4)]),
        (lambda t: t[3], [(12, 4)]),
        (lambda t: t.view(torch.uint8)[3:4], [(3, 1)]),
        (lambda t: t.view(torch.complex64)[1:2], [(8, 8)]),
        (lambda t: t.unfold(0, 3, 2), [(0, 92)]),
    ],
)
def test_the_bytes_that_a_tensor_touches(view, covered):
    base = torch.zeros(24)
    assert byte_ranges(address_ranges(view(base)), base) == covered


@pytest.mark.parametrize("empty", [torch.zeros(0), torch.zeros(3, 0, 2), torch.zeros(24)[24:]])
def test_an_empty_tensor_touches_nothing(empty):
    assert address_ranges(empty) == []


def test_all_tensors_are_in_one_address_space():
    assert address_ranges(torch.zeros(2))[0].buffer == address_ranges(torch.zeros(2))[0].buffer


BASE = torch.zeros(24)


@pytest.mark.parametrize(
    ("args", "written", "expected"),
    [
        ([BASE[:8], BASE[8:]], {0, 1}, None),  # neighbours share nothing
        ([BASE[:9], BASE[8:]], {0}, (0, 1)),
        ([BASE[:9], BASE[8:]], {1}, (1, 0)),
        ([BASE[:9], BASE[8:]], set(), None),
        ([BASE[:9], BASE[8:], torch.zeros(2)], {2}, None),  # only others overlap
        ([BASE, BASE], {1}, (1, 0)),  # the same tensor twice
        ([BASE[::2], BASE[1::2]], {0}, None),  # interleaved
        ([BASE[::2], BASE[4::3]], {0}, (0, 1)),
        ([7, BASE[:2], None, 1.5, BASE[1:3]], {4}, (4, 1)),  # positions count everything
        ([BASE[:0], BASE], {0, 1}, None),  # an empty one overlaps nothing
        ([BASE, BASE[3:3], BASE[4:5]], {2}, (2, 0)),
        ([BASE[20:], BASE[10:12], BASE], {1}, (1, 2)),  # far apart in order of address
    ],
)
def test_the_first_pair(args, written, expected):
    assert overlap_with_written(args, written) == expected


spans = st.tuples(st.integers(0, NBYTES - 1), st.integers(0, 40)).map(lambda s: (s[0], min(s[1], NBYTES - s[0])))


@settings(max_examples=200, deadline=None)
@given(st.lists(spans, max_size=8), st.sets(st.integers(0, 7)))
def test_finds_a_pair_exactly_when_there_is_one(intervals, written):
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    args = [memory[start : start + length] for start, length in intervals]

    def share(i, j):
        one, other = intervals[i], intervals[j]
        return bool({*range(one[0], sum(one))} & {*range(other[0], sum(other))})

    pairs = {(i, j) for i in written for j in range(len(args)) if i < len(args) and i != j and share(i, j)}
    found = overlap_with_written(args, written)
    assert (found in pairs) if pairs else (found is None)
