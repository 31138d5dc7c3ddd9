"""Tiles of sums in vector registers: which one is taken, and that there is a function for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kagent_core.codegen.register_lines import pairs_of_rows
from kagent_core.codegen.register_tiles import RegisterTiles, Tile

PROCESSORS = [RegisterTiles(16, 32), RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)]

SIZES = st.integers(1, 70)


@given(st.sampled_from(PROCESSORS), st.sampled_from(["rows", "places"]), SIZES | st.just(0), SIZES, SIZES)
def test_tile_is_no_larger_than_what_is_computed(
    processor: RegisterTiles, kind: str, rows: int, columns: int, single: int
) -> None:
    tile = processor.choose(kind, rows, columns, single)  # type: ignore[arg-type]
    assert tile.width <= columns
    assert tile.rows <= max(rows, 1)
    assert tile.lanes == min(processor.lanes, 1 << columns.bit_length() - 1)


@given(st.sampled_from(PROCESSORS), st.sampled_from(["rows", "places"]), SIZES | st.just(0), SIZES)
def test_texts_get_the_functions_that_they_call(processor: RegisterTiles, kind: str, rows: int, columns: int) -> None:
    tile = processor.choose(kind, rows, columns)  # type: ignore[arg-type]
    for height in (tile.rows, 1):
        name = tile.function(kind, height)  # type: ignore[arg-type]
        assert name == f"{kind}_{height}_{tile.vectors}_{tile.lanes}"
        lines = processor.functions(f"    {name}(x, step, made);").splitlines()
        assert f"DEFINE_LANES({tile.lanes})" in lines
        assert lines[-1] == f"DEFINE_{kind.upper()}({height}, {tile.vectors}, {tile.lanes})"


def test_text_without_tiles_needs_no_functions() -> None:
    assert RegisterTiles.functions("run(x); arrows_1_2_3(x); rows_of(x);") == ""


@given(st.sampled_from(PROCESSORS), st.sampled_from(["rows", "places"]), SIZES, SIZES)
def test_sums_and_factors_fit_into_the_registers(processor: RegisterTiles, kind: str, rows: int, columns: int) -> None:
    tile = processor.choose(kind, rows, columns)  # type: ignore[arg-type]
    assert tile.rows * tile.vectors + tile.vectors + 1 <= processor.registers


def test_whole_tiles_are_taken_where_there_are_some() -> None:
    assert RegisterTiles(16, 32).choose("rows", 49, 96) == Tile(7, 3, 16)
    assert RegisterTiles(16, 32).choose("rows", 3000, 64) == Tile(6, 4, 16)
    assert RegisterTiles(16, 32).choose("rows", 1, 1000).vectors == 4
    assert RegisterTiles(8, 16).choose("rows", 100, 16) == Tile(6, 2, 8)
    assert RegisterTiles(16, 32).choose("places", 14, 16) == Tile(14, 1, 16)


def test_rows_that_are_computed_singly_count() -> None:
    processor = RegisterTiles(16, 32)
    inside, all_single = processor.choose("places", 28, 64, 0), processor.choose("places", 0, 64, 7)
    assert inside.rows > 1
    assert (all_single.rows, all_single.vectors) == (1, 4)


@given(st.sampled_from(PROCESSORS), SIZES, SIZES)
def test_pairs_of_rows_fit_into_the_registers(processor: RegisterTiles, rows: int, columns: int) -> None:
    found = pairs_of_rows(processor.lanes, processor.registers, rows, columns)
    if found is not None:
        pairs, vectors = found
        assert 2 * columns == vectors * processor.lanes
        assert 2 * pairs <= rows
        assert (pairs + 1) * vectors < processor.registers


def test_pairs_of_rows_are_taken_where_they_compute_less() -> None:
    assert pairs_of_rows(16, 32, 56, 24) == (7, 3)
    assert pairs_of_rows(16, 32, 28, 40) == (5, 5)
    assert {pairs_of_rows(16, 32, *sizes) for sizes in ((55, 24), (56, 32), (56, 25), (56, 8), (14, 72))} == {None}
    assert pairs_of_rows(8, 16, 56, 12) is None
