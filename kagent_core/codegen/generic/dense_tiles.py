"""Which tiles of a line of places a convolution keeps in a CPU's vector registers, and what their taps see."""

from __future__ import annotations

from dataclasses import dataclass

from kagent_core.codegen.register_tiles import RegisterTiles, Tile

_TALLEST = 28
"""Most places of a tile."""

_WIDEST = 4
"""Most vectors of a tile."""

_LOADED = 0.25
"""Cycles that each vector of the weight adds to a step of a tile: most of them come from the second cache."""

_LATENCY = 4.5
"""Cycles that a step takes at least, since the next one adds to the same sums: four of each, and some waiting."""


@dataclass(frozen=True)
class Line:
    """How a window goes along a line of places.

    Attributes
    ----------
    length
        Places.
    size
        Of the source, along the line.
    taps, stride, padding, dilation
        The window's.
    """

    length: int
    size: int
    taps: int
    stride: int
    padding: int
    dilation: int

    def partial(self, rows: int) -> list[int]:
        """Return how many of a tile's places see the source through a tap that others of them have in the padding."""
        return sorted({count for count in self._counts(rows) if 0 < count < rows})

    def is_whole(self, rows: int) -> bool:
        """Whether all places see the source through all taps."""
        return all(count == rows for count in self._counts(rows))

    def whole(self, rows: int) -> int:
        """Return how many taps see the source at all places of their tile, of all tiles together."""
        return sum(count == rows for count in self._counts(rows))

    def _counts(self, rows: int) -> list[int]:
        """Return at how many places of its tile a tap sees the source, for the taps of all tiles."""
        starts = [min(first, self.length - rows) for first in range(0, self.length, rows)]
        return [self._inside(start, tap, rows) for start in starts for tap in range(self.taps)]

    def _inside(self, start: int, tap: int, rows: int) -> int:
        column = start * self.stride - self.padding + tap * self.dilation
        first = max(0, -(column // self.stride))
        end = min(rows, -((column - self.size) // self.stride))
        return max(0, end - first)


def choose_tile(tiles: RegisterTiles, length: int, channels: int) -> Tile:
    """Return the tile that computes lines of some places fastest, of some channels."""
    return min(_fitting(tiles, length, channels), key=lambda tile: (time_of(tile, length, channels), -tile.vectors))


def tile_of_width(tiles: RegisterTiles, length: int, channels: int, width: int) -> Tile | None:
    """Return the tile that is as wide as the blocks of a weight; None for none."""
    return next((tile for tile in _fitting(tiles, length, channels) if tile.width == width), None)


def time_of(tile: Tile, length: int, channels: int) -> float:
    """Return roughly how many cycles a line takes, for each number that a place reads."""
    sums = tile.rows * tile.vectors
    step = max(sums / 2, (tile.rows + tile.vectors) / 2, _LATENCY) + tile.vectors * _LOADED
    return -(-length // tile.rows) * -(-channels // tile.width) * step


def _fitting(tiles: RegisterTiles, length: int, channels: int) -> list[Tile]:
    """Return tiles that fit into the registers, beside a vector of numbers and those of the weight.

    Places are dealt out evenly to as few tiles as a line needs.
    """
    lanes = min(tiles.lanes, 1 << channels.bit_length() - 1)
    found = []
    for vectors in range(1, _WIDEST + 1):
        most = min((tiles.registers - 1) // vectors - 1, _TALLEST)
        if vectors == 1 or vectors * lanes <= channels:
            found.append(Tile(-(-length // -(-length // most)), vectors, lanes))
    return found
