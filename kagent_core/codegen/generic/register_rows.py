"""Products with a matrix whose columns are neighbours in memory: sums stay in a CPU's vector registers.

A tile is some rows by some neighbouring columns. Where rows or columns are no whole number of tiles, the last tile
overlaps the one before, and stores what is new. Nothing is copied, and nothing is read beyond a tensor's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.place_sums import add_tile
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.register_lines import covering_tile
from kagent_core.codegen.register_tiles import RegisterTiles, Tile

_SETS = 1024
"""Numbers that are as far apart as the sets of a nearest cache reach, 4 KiB: they share one set."""

StoreRow = Callable[[Sequence[str], str, str], None]
"""Writes what stores an element: the coordinates of its row, its column, its value."""

GAP = 16
"""Elements that are left out between two rows of a matrix.

Rows that are a power of two of bytes apart would lie in few sets of a cache.
"""

TALL = 8
"""Tiles of rows, one below the other, that use the same columns."""


@dataclass(frozen=True)
class Rows:
    """Rows of numbers that are neighbours in memory.

    Attributes
    ----------
    pointer
        To the first one.
    step
        How far neighbouring rows are apart.
    space
        Which rows there are, in the order in which they lie.
    depth
        Numbers of each.
    """

    pointer: str
    step: int
    space: Space
    depth: int


@dataclass(frozen=True)
class Columns:
    """A matrix whose columns are neighbours in memory.

    Attributes
    ----------
    pointer
        To the first number.
    step
        How far the numbers of a column are apart.
    count
        Columns.
    """

    pointer: str
    step: int
    count: int


def choose_tile(tiles: RegisterTiles, rows: int, columns: int) -> Tile:
    """Return the tile that computes some rows and columns fastest; it may be wider than they are, to cover them all."""
    tile = tiles.choose("rows", rows, columns)
    covering = covering_tile(tiles.lanes, tiles.registers, rows, columns)
    return tile if covering is None or tile.time(rows, columns) <= covering.time(rows, columns) else covering


def write_rows(k: KernelBuilder, tiles: RegisterTiles, rows: Rows, columns: Columns, store: StoreRow) -> None:
    """Write the product: some tiles of rows by one of columns per work-item."""
    extent = rows.space.extent
    tile = choose_tile(tiles, extent, columns.count)
    tall = tile.rows * TALL
    axes = [("bi", -(-extent // tall)), ("bj", -(-columns.count // tile.width))]
    # whichever of the two is read again for each block of the other one
    again_right = rows.depth * (extent + columns.count * axes[0][1])
    again_left = rows.depth * (columns.count + extent * axes[1][1])
    ordered = axes if again_right <= again_left else axes[::-1]
    with k.items(*ordered, steps=rows.depth * tile.width * min(tall, extent) // 16):
        _write_column_of_tiles(k, tile, tall, rows, columns, store)


def write_tiles(k: KernelBuilder, tile: Tile, tall: int, rows: Rows, columns: Columns, store: StoreRow) -> None:
    """Write the loops over all tiles of columns, and those of rows from ``bi * tall`` on, inside of a work-item."""
    with k.loop("bj", -(-columns.count // tile.width)):
        _write_column_of_tiles(k, tile, tall, rows, columns, store)


def _write_column_of_tiles(
    k: KernelBuilder, tile: Tile, tall: int, rows: Rows, columns: Columns, store: StoreRow
) -> None:
    extent, width = rows.space.extent, min(tile.width, columns.count)
    if width == tile.width:
        first_column(k, tile, columns.count)
    k.add(f"const {k.index_type} i_first = bi * {tall};")
    k.add(f"const {k.index_type} i_end = {k.least(k.size(extent), f'i_first + {tall}')};")
    with k.loop("i", "i_end", "i_first", step=tile.rows):
        k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(extent)} - {tile.rows}')};")
        source = f"{rows.pointer} + at * {k.size(rows.step)}"
        call_rows(k, tile, source, rows.step, rows.depth, columns, "j")
        _store_tile(k, tile, rows.space, columns.count, store)


def call_rows(k: KernelBuilder, tile: Tile, source: str, step: int, depth: int, columns: Columns, column: str) -> None:
    """Write the call of what computes a tile, in ``made``.

    Parameters
    ----------
    tile
        Its rows and columns; it may be wider than the matrix, to cover all of that.
    source
        Pointer to the first row.
    step, depth
        How far rows are apart, and numbers of each.
    columns
        The matrix.
    column
        The tile's first column.
    """
    width = min(tile.width, columns.count)
    k.add(f"f32 made[{tile.rows * width}];")
    passed = [source, k.size(step)]
    if width < tile.width:
        passed += [k.size(depth), columns.pointer, k.size(columns.step), str(width)]
        k.add(f"cover_{tile.rows}_{tile.vectors}_{tile.lanes}({', '.join(passed)}, made);")
    else:
        passed += ["1", "0", "1", "0", k.size(depth), f"{columns.pointer} + {column}", "0", "0", k.size(columns.step)]
        k.add(f"{tile.function('rows')}({', '.join(passed)}, made);")


def first_column(k: KernelBuilder, tile: Tile, columns: int) -> None:
    """Declare ``j``, a tile's first column, and ``begin``, the first one that the tile before does not have."""
    k.add(f"const {k.index_type} past = {k.size(columns)} - {tile.width}, begin = bj * {tile.width};")
    k.add(f"const {k.index_type} j = {k.least('begin', 'past')};")


def store_columns(k: KernelBuilder, tile: Tile, columns: int, row: str, store: Callable[[str, str], None]) -> None:
    """Write the loop that stores a row of ``made``, from ``begin`` on.

    Parameters
    ----------
    columns
        Of all tiles.
    row
        Its number in the tile.
    store
        Writes what stores an element: its column, its value.
    """
    with k.loop("e", tile.width, "begin - j" if columns % tile.width else 0, simd=True):
        store("(j + e)", f"made[{row} * {tile.width} + e]")


def store_places(k: KernelBuilder, tile: Tile, columns: int, store: Callable[[Sequence[str], str, str], None]) -> None:
    """Write the loops that store ``made``, places of a line by columns, from place ``i`` on.

    Parameters
    ----------
    columns
        Of all tiles.
    store
        Writes what stores an element: image, line and place, its column, its value.
    """
    place, first = ["n", "o0", "(at + r)"], "begin - j" if columns % tile.width else 0
    with k.keeping(f"made[r * {tile.width} + e]"):
        if _share_a_set(k):
            with k.loop("e", tile.width, first), k.loop("r", tile.rows, "i - at", simd=True):
                store(place, "(j + e)", f"made[r * {tile.width} + e]")
        else:
            with k.loop("r", tile.rows, "i - at"):
                store_columns(k, tile, columns, "r", lambda column, value: store(place, column, value))
    add_tile(k, tile)


def _share_a_set(k: KernelBuilder) -> bool:
    """Whether the columns of a place are stored where a cache has few lines for all of them, and places side by side.

    So it is in an image that is stored contiguously and has a power of two of places. Column by column, a convolution
    of it took 0.2 to 0.6 of the time, but in other images up to 1.7 times as long.
    """
    step = k.stored_step(1) or 1
    return k.stored_step(3) == 1 and step % _SETS == 0


def _store_tile(k: KernelBuilder, tile: Tile, space: Space, columns: int, store: StoreRow) -> None:
    """Write the loop that stores the rows of a tile which the tile before does not have."""

    def write(row: Callable[[str, str], None]) -> None:
        if tile.width <= columns:
            store_columns(k, tile, columns, "r", row)
            return
        with k.loop("e", columns, simd=True):
            row("e", f"made[r * {columns} + e]")

    wide = [n for n, size in enumerate(space.sizes) if size != 1]
    if len(wide) <= 1:
        place = ["(at + r)" if n in wide else "0" for n in range(len(space.sizes))]
        with k.loop("r", tile.rows, "i - at"):
            write(lambda column, value: store(place, column, value))
        return
    counted = [f"at{n}" for n in range(len(space.sizes))]
    found = space.coordinates(k, "i")
    k.add(*(f"{k.index_type} {name} = {value};" for name, value in zip(counted, found, strict=True)))
    with k.loop("r", tile.rows, "i - at"):
        write(lambda column, value: store(counted, column, value))
        step = f"{counted[wide[0]]}++;"
        for n in wide[1:]:
            step = f"if (++{counted[n]} == {k.size(space.sizes[n])}) {{ {counted[n]} = 0; {step} }}"
        k.add(step)
