"""The bytes that a strided tensor touches, against a walk over its elements."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.runs import RUN_LIMIT, byte_runs
from kagent_core.specs import DType, TensorSpec

dimensions = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4)


def walk(shape, strides, itemsize):
    """Every byte of every element."""
    return {
        sum(i * s for i, s in zip(index, strides, strict=True)) * itemsize + byte
        for index in itertools.product(*map(range, shape))
        for byte in range(itemsize)
    }


def touched(runs):
    return {byte for offset, length in runs for byte in range(offset, offset + length)}


@settings(max_examples=1000, deadline=None)
@given(dimensions, st.sampled_from([1, 2, 4, 8, 16]))
def test_exactly_the_bytes_of_a_walk(dims, itemsize):
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    runs = byte_runs(shape, strides, itemsize, limit=10_000)
    assert touched(runs) == walk(shape, strides, itemsize)
    for (offset, length), (following, _) in itertools.pairwise(runs):
        assert length > 0
        assert offset + length < following, "neighbouring runs are one run"


@settings(max_examples=300, deadline=None)
@given(dimensions, st.integers(0, 9), st.integers(1, 6))
def test_past_the_limit_no_byte_is_missed(dims, offset, limit):
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    runs = byte_runs(shape, strides, 4, limit=limit)
    assert len(runs) <= max(1, limit)
    assert touched(runs) >= walk(shape, strides, 4)


few_pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=3)  # at most 125, within the limit


@settings(max_examples=500, deadline=None)
@given(few_pieces, st.integers(0, 9))
def test_ranges_of_a_spec(dims, offset):
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    spec = TensorSpec(DType("float32", 4), shape, strides, offset, buffer=3)
    found = {byte for span in spec.ranges for byte in range(span.offset, span.end)}
    assert found == {byte + 4 * offset for byte in walk(shape, strides, 4)}
    assert all(span.buffer == 3 for span in spec.ranges)
    assert found <= set(range(spec.range.offset, spec.range.end))


def test_a_tensor_in_very_many_pieces_is_covered():
    pieces = RUN_LIMIT + 1
    assert byte_runs((pieces,), (2,), 4) == [(0, 4 * (2 * pieces - 1))]
    assert len(byte_runs((RUN_LIMIT,), (2,), 4)) == RUN_LIMIT
