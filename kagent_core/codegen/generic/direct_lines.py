"""Depthwise convolutions line by line, with their sums and weights in a CPU's vector registers.

A tile is some neighbouring places of a line by a vector of channels. What it reads is read once, and what is outside of
the source is passed over. All lines of a vector of channels follow each other, so that they stay in the nearest cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagent_core.codegen.generic import place_sums
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.register_rows import first_column, store_places
from kagent_core.codegen.register_lines import LineTile, line_tile
from kagent_core.codegen.register_tiles import RegisterTiles, Tile
from kagent_core.specs import TensorSpec

_FEW_LINES = 8
"""Lines up to which the channels of a line follow each other instead: neighbours in memory, and so are weights that no
cache holds yet. 7 by 7 places with 1,152 channels took two thirds of the time; from 14 lines on it was the other way
round."""

Store = Callable[[Sequence[str], str, str], None]
"""Writes what stores an element: its place without the channel, its channel, its value."""


def tile_of_lines(tiles: RegisterTiles, out: TensorSpec, source: TensorSpec, window: Window) -> LineTile | None:
    """Return the tile in which a depthwise convolution can be computed so; None where it cannot."""
    length = out.shape[3]
    if window.dilation[1] != 1 or not overlaps(length, source.shape[3], window):
        return None
    lanes = min(tiles.lanes, 1 << out.shape[1].bit_length() - 1)
    return line_tile(lanes, tiles.registers, length, window.size[1], window.stride[1])


def overlaps(length: int, size: int, window: Window) -> bool:
    """Whether each window of a line has its first tap before the source's end, and its last one behind the begin."""
    padding = window.padding[1]
    return padding < window.size[1] and (length - 1) * window.stride[1] - padding < size


def write_lines(
    k: KernelBuilder, tile: LineTile, out: TensorSpec, source: Tensor, weight: Tensor, window: Window, store: Store
) -> None:
    """Write the convolution, in tiles that `tile_of_lines` gave."""
    count, channels, lines, length = out.shape
    rows = Tile(tile.places, 1, tile.lanes)
    steps = weight.spec.numel // channels * tile.lanes * length // 16
    inner = [("bj", -(-channels // tile.lanes)), ("o0", lines)]
    items = (("n", count), *(inner if lines > _FEW_LINES else inner[::-1]))
    x = source.spec.strides
    read = Lines(f"{source.pointer} + n * {k.size(x[0])}", "", x[2], x[3], source.spec.shape[3], "j")
    with place_sums.image(k, rows), k.items(*items, steps=steps):
        first_column(k, rows, channels)
        clip(k, window, source.spec, "line", 0, "o0")
        with place_sums.line(k, rows), k.loop("i", k.size(length), step=tile.places):
            k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(length)} - {tile.places}')};")
            k.add(f"const {k.index_type} column = at * {k.size(tile.stride)} - {k.size(window.padding[1])};")
            call_line(k, tile, read, weight, window)
            store_places(k, rows, channels, store)


@dataclass(frozen=True)
class Lines:
    """Where lines are that a depthwise convolution reads.

    Attributes
    ----------
    pointer
        To an image.
    first
        The line that it begins with; empty for 0.
    line, place
        How far lines and places are apart.
    size
        Places of a line.
    channel
        The first channel.
    """

    pointer: str
    first: str
    line: int
    place: int
    size: int
    channel: str


def call_line(k: KernelBuilder, tile: LineTile, source: Lines, weight: Tensor, window: Window) -> None:
    """Write the call of what computes a tile of a line from ``column`` on, of channels from ``j`` on, in ``made``."""
    x_line, x_place = k.size(source.line), k.size(source.place)
    w = [k.size(stride) for stride in weight.spec.strides]
    by_line = k.size(window.dilation[0])
    line = f"line_from + line_first * {by_line}" + (f" - {source.first}" if source.first else "")
    place = [source.pointer, f"({line}) * {x_line}", f"column * {x_place}", source.channel]
    passed = [" + ".join(place), "line_count", f"{by_line} * {x_line}", x_place]
    passed += ["-column", f"{k.size(source.size)} - column"]
    passed += [f"{weight.pointer} + j + line_first * {w[2]}", w[2], w[3], "made"]
    k.add(f"f32 made[{tile.places * tile.lanes}];", f"{tile.function}({', '.join(passed)});")


def clip(k: KernelBuilder, window: Window, source: TensorSpec, name: str, n: int, place: str) -> None:
    """Declare where a window begins along a dimension, its first tap that is inside, and how many are."""
    kind, size, by = k.index_type, k.size(source.shape[2 + n]), k.size(window.dilation[n])
    k.fits(source.shape[2 + n] + 2 * window.padding[n] + window.dilation[n])
    k.add(f"const {kind} {name}_from = {place} * {k.size(window.stride[n])} - {k.size(window.padding[n])};")
    before = f"({name}_from < 0 ? (-{name}_from + {by} - 1) / {by} : 0)" if window.padding[n] else "0"
    k.add(f"const {kind} {name}_first = {before};")
    k.add(f"const {kind} {name}_past = ({size} - {name}_from + {by} - 1) / {by};")
    k.add(f"const {kind} {name}_count = {k.least(k.size(window.size[n]), f'{name}_past')} - {name}_first;")
