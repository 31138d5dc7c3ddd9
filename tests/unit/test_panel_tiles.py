"""Tiles of products with panels: they fit into the registers, and what is left is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kagent_core.codegen.panel_tiles import PanelTile, choose_tile
from kagent_core.codegen.register_tiles import RegisterTiles

PROCESSORS = [RegisterTiles(16, 32), RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)]

SIZES = st.integers(1, 300)


@given(st.sampled_from(PROCESSORS), SIZES, SIZES)
def test_sums_and_factors_fit_into_the_registers(processor: RegisterTiles, rows: int, columns: int) -> None:
    tile = choose_tile(processor, rows, columns)
    assert tile.rows * tile.vectors + tile.vectors + 1 <= processor.registers
    assert tile.rows <= rows
    assert tile.lanes == processor.lanes


@given(st.sampled_from(PROCESSORS), SIZES, SIZES)
def test_what_is_left_is_computed_once(processor: RegisterTiles, rows: int, columns: int) -> None:
    tile = choose_tile(processor, rows, columns)
    assert tile.rest_rows == rows % tile.rows
    assert tile.rest_vectors == -(-columns // tile.lanes) % tile.vectors
    assert (tile.vectors - 1) * tile.lanes < columns  # a panel is no wider than needed


@given(st.sampled_from(PROCESSORS), SIZES, SIZES, SIZES)
def test_panels_that_are_there_are_taken_for_any_number_of_rows(
    processor: RegisterTiles, planned: int, rows: int, columns: int
) -> None:
    width = choose_tile(processor, planned, columns).width
    assert choose_tile(processor, rows, columns, width).width == width


def test_whole_tiles_are_taken_where_there_are_some() -> None:
    assert choose_tile(RegisterTiles(16, 32), 49, 384) == PanelTile(7, 3, 16, 0, 0)
    assert choose_tile(RegisterTiles(16, 32), 256, 384) == PanelTile(8, 3, 16, 0, 0)
    assert choose_tile(RegisterTiles(16, 32), 6, 64) == PanelTile(6, 4, 16, 0, 0)


def test_texts_get_the_functions_that_they_call() -> None:
    tile = choose_tile(RegisterTiles(16, 32), 6, 64)
    text = f"{tile.function(6, 4, 1)}(x); {tile.function(2, 4)}(x);"
    lines = RegisterTiles.functions(text).splitlines()
    assert {"DEFINE_LANES(16)", "DEFINE_PANEL(6, 4, 16, 1, 2)", "DEFINE_PANEL(2, 4, 16, 0, 2)"} <= set(lines)
