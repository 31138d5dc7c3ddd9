"""Products with panels: which tiles of sums stay in a CPU's vector registers.

A panel is some neighbouring columns of a matrix, row by row without gaps, so that a tile reads its numbers one after
the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kagent_core.codegen.register_tiles import RegisterTiles

_MOST_ROWS = {32: {1: 14, 2: 14, 3: 8, 4: 6}, 16: {1: 12, 2: 6, 3: 4}}
"""Rows of the tallest tile, by registers and by its vectors: registers also hold a row of the panel, and a number."""

_LEAST_SHARE = 0.8
"""Rows of the lowest tile that is taken, as a part of those of the tallest: lower ones read the panels too often."""

_LATENCY = 8
"""Sums that must be computed with at once, since one depends on the one before: two at a time, four cycles each."""

_LOADING = 3.0
"""How many sums take as long as one vector of a panel that comes from the second cache."""

_ALONE, _READING = 1.2, 0.05
"""What a sum takes longer where a number is read for each, and what every number and vector that is read takes."""

_REST = 1.01
"""What a product takes longer with a function of its own for the rows or columns that are left."""


@dataclass(frozen=True)
class PanelTile:
    """A tile of sums, and what is left where a product is no whole number of them.

    Attributes
    ----------
    rows, vectors, lanes
        Its size; a vector has so many values.
    rest_rows, rest_vectors
        Rows of the last tile of rows, and vectors of the last panel, where those are fewer; else 0.
    """

    rows: int
    vectors: int
    lanes: int
    rest_rows: int
    rest_vectors: int

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.vectors * self.lanes

    def function(self, rows: int, vectors: int, fetched: int = 0, near: bool = False) -> str:
        """Return the name of what computes some rows and vectors, and fetches some vectors of what is needed next.

        Parameters
        ----------
        rows, vectors
            Of the tile, or fewer.
        fetched
            Vectors that are fetched at each step.
        near
            Whether they are needed a few steps later, and fetched into the nearest cache; else into the second one.
        """
        return f"panel_{rows}_{vectors}_{self.lanes}_{fetched}_{3 if near else 2}"


def choose_tile(registers: RegisterTiles, rows: int, columns: int, width: int | None = None) -> PanelTile:
    """Return the tile that computes a product fastest.

    Parameters
    ----------
    registers
        The processor's.
    rows, columns
        Of the product, at least 1 each.
    width
        Of its panels, where they are there already.
    """
    fitting = [tile for tile in _tiles(registers, rows, columns) if width in (None, tile.width)]
    return min(fitting, key=lambda tile: (_time(tile, rows, columns), -tile.rows * tile.vectors))


def _tiles(registers: RegisterTiles, rows: int, columns: int) -> Iterator[PanelTile]:
    needed = -(-columns // registers.lanes)
    for vectors, most in _MOST_ROWS[32 if registers.registers >= 32 else 16].items():
        if vectors > needed:
            break
        highest = min(most, rows)
        for height in range(min(math.ceil(most * _LEAST_SHARE), highest), highest + 1):
            yield PanelTile(height, vectors, registers.lanes, rows % height, needed % vectors)


def _time(tile: PanelTile, rows: int, columns: int) -> float:
    """Return roughly how long a product takes, in sums that are computed one after the other."""
    panels, vectors = divmod(-(-columns // tile.lanes), tile.vectors)

    def of_panel(vectors: int) -> float:
        whole, rest = divmod(rows, tile.rows)
        return whole * _step(tile.rows, vectors) + (_step(rest, vectors) if rest else 0)

    taken = panels * of_panel(tile.vectors) + (of_panel(vectors) if vectors else 0)
    return taken * (_REST if tile.rest_rows else 1) * (_REST if vectors else 1)


def _step(rows: int, vectors: int) -> float:
    computing = rows * vectors * (_ALONE if vectors == 1 else 1)
    return max(computing, _LATENCY, _LOADING * vectors) + _READING * (rows + vectors)
