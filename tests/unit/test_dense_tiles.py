"""Tiles of the places of a line: which one a convolution takes, and which taps see the source at which places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kagent_core.codegen.generic.dense_convolution import evenly
from kagent_core.codegen.generic.dense_tiles import Line, choose_tile, tile_of_width
from kagent_core.codegen.register_tiles import RegisterTiles, Tile

PROCESSORS = [RegisterTiles(16, 32), RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)]

LINES = st.builds(
    Line,
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 8),
    st.integers(1, 3),
)


def counts(line: Line, rows: int) -> list[int]:
    """Return at how many places of its tile a tap sees the source, by looking at every place."""
    found = []
    for begin in range(0, line.length, rows):
        places = range(min(begin, line.length - rows), min(begin, line.length - rows) + rows)
        for tap in range(line.taps):
            columns = [place * line.stride - line.padding + tap * line.dilation for place in places]
            found.append(sum(0 <= column < line.size for column in columns))
    return found


@given(LINES, st.integers(1, 28))
def test_taps_see_the_source_at_some_places(line: Line, rows: int) -> None:
    rows = min(rows, line.length)
    seen = counts(line, rows)
    assert line.partial(rows) == sorted({count for count in seen if 0 < count < rows})
    assert line.is_whole(rows) == all(count == rows for count in seen)
    assert line.whole(rows) == seen.count(rows)


@given(st.sampled_from(PROCESSORS), st.integers(1, 300), st.integers(1, 200))
def test_tiles_fit_into_registers_and_into_what_is_computed(processor: RegisterTiles, length: int, made: int) -> None:
    tile = choose_tile(processor, length, made)
    assert tile.rows * tile.vectors + tile.vectors + 1 <= processor.registers
    assert tile.rows <= length
    assert tile.width <= made
    assert tile_of_width(processor, length, made, tile.width) == tile
    # places are dealt out evenly: a tile less would not do, and of the last one little is computed twice
    assert -(-length // tile.rows) * tile.rows - length < -(-length // tile.rows)


def test_the_fastest_tile_is_taken() -> None:
    processor = RegisterTiles(16, 32)
    assert choose_tile(processor, 56, 64) == Tile(14, 2, 16)
    assert choose_tile(processor, 7, 512) == Tile(7, 2, 16)
    assert choose_tile(processor, 128, 16) == Tile(26, 1, 16)
    assert choose_tile(processor, 32, 64) == Tile(11, 2, 16)
    assert choose_tile(RegisterTiles(8, 16), 14, 64) == Tile(14, 1, 8)
    assert tile_of_width(processor, 7, 512, 40) is None


@given(st.integers(1, 300), st.integers(1, 300))
def test_stretches_of_lines_are_as_few_as_fit_and_about_equal(length: int, most: int) -> None:
    stretch = evenly(length, most)
    count = -(-length // stretch)
    assert stretch <= most
    assert count == -(-length // most)
    assert length - (count - 1) * stretch > stretch - count
