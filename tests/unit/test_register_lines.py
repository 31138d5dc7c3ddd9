"""Lines of places whose sums stay in vector registers: which tile is taken, and that there is a function for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kagent_core.codegen.register_lines import LineTile, line_functions, line_tile

REGISTERS = st.sampled_from([16, 32])


@given(REGISTERS, st.integers(1, 300), st.integers(1, 9), st.integers(1, 2))
def test_sums_and_weights_fit_into_the_registers(registers: int, length: int, taps: int, stride: int) -> None:
    tile = line_tile(16, registers, length, taps, stride)
    assert tile is not None
    assert tile.places <= length
    assert tile.places + taps + 1 <= registers
    assert (tile.taps, tile.stride, tile.lanes) == (taps, stride, 16)


def test_lines_of_common_images_are_whole_numbers_of_tiles() -> None:
    for length, places in ((7, 7), (14, 14), (28, 14), (56, 14), (112, 14), (8, 8), (16, 8), (5, 5)):
        assert line_tile(16, 32, length, 3, 1) == LineTile(places, 3, 1, 16)


def test_long_windows_and_long_steps_have_no_tile() -> None:
    assert line_tile(16, 16, 100, 15, 1) is None
    assert line_tile(16, 32, 100, 3, 3) is None


def test_texts_get_the_functions_that_they_call() -> None:
    text = "line_7_3_1_16(x); line_7_3_1_16(y); planes_14_2_3_2_8(z); airline_1_2_3_4(x); line_1_2_3(x);"
    lines = line_functions(text).splitlines()
    assert [line for line in lines if line.startswith("DEFINE_")] == [
        *("DEFINE_CHANNELS(16)", "DEFINE_CHANNELS(8)", "DEFINE_LINE(7, 3, 1, 16)", "DEFINE_PLANES(14, 2, 3, 2, 8)")
    ]


def test_a_text_without_lines_needs_no_functions() -> None:
    assert line_functions("run(x); rows_1_2_3(x);") == ""
