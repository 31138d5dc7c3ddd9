"""Tile sizes of generated kernels, as launch configs carry them: names, limits, spelling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kagent_core.errors import LaunchConfigError, choices, nearest

Tiles = tuple[tuple[str, int], ...]
"""Tile sizes by name, sorted."""

GREATEST: Mapping[str, int] = {
    "rows": 64,
    "columns": 4096,
    "depth": 16384,
    "blocks": 1024,
    "queries": 4096,
    "keys": 4096,
    "lanes": 1024,
    "block_rows": 512,
    "block_columns": 512,
    "block_depth": 1024,
    "thread_rows": 16,
    "thread_columns": 16,
}
"""Names of the tile sizes, and the greatest value of each: see `kagent_core.codegen.generic.tiles.Tiles`."""

VECTORS = frozenset({"columns", "lanes"})
"""Tile sizes that are cut into vectors, and so are powers of two."""

DEALT_OUT = frozenset({"block_rows", "block_columns", "block_depth", "thread_rows", "thread_columns"})
"""Tile sizes that are dealt out to the threads of a block, and so are powers of two."""


@dataclass(frozen=True, slots=True)
class TileChoice:
    """The tile sizes that a kernel is written with, and where they came from: as those of a launch config."""

    tiles: Tiles = ()
    source: Literal["derived", "suggested", "forced"] = "derived"


def checked_tiles(sizes: Mapping[str, int] | Iterable[tuple[str, int]]) -> Tiles:
    """Return tile sizes, sorted by name.

    Raises
    ------
    LaunchConfigError
        For a name that no tile size has, and for a size that is not positive, too large, or no power of two where it
        has to be one.

    Examples
    --------
    >>> checked_tiles({"rows": 4, "columns": 16})
    (('columns', 16), ('rows', 4))
    """
    found = dict(sizes)
    for name, size in found.items():
        if name not in GREATEST:
            close = nearest(str(name), GREATEST)
            hint = f"did you mean '{close}'?" if close else "see docs/launch-configs.md for what each of them is"
            raise LaunchConfigError(f"there is no tile size {name!r}, expected {choices(GREATEST)}", hint=hint)
        if type(size) is not int or not 1 <= size <= GREATEST[name]:
            raise LaunchConfigError(
                f"the tile size '{name}' is {size!r}, expected a whole number from 1 to {GREATEST[name]}",
                hint="leave it out to get the device's default",
            )
        if name in VECTORS | DEALT_OUT and size & (size - 1):
            below = 1 << size.bit_length() - 1
            why = "cut into vectors" if name in VECTORS else "dealt out to threads"
            raise LaunchConfigError(
                f"the tile size '{name}' is {size}, expected a power of two, since it is {why}",
                hint=f"take {below} or {2 * below}" if 2 * below <= GREATEST[name] else f"take {below}",
            )
    return tuple(sorted(found.items()))


def spelled_tiles(sizes: Mapping[str, int] | Iterable[tuple[str, int]]) -> str:
    """Return tile sizes as text.

    Examples
    --------
    >>> spelled_tiles((("columns", 16), ("rows", 4)))
    'tiles: columns=16,rows=4'
    """
    return f"tiles: {','.join(f'{name}={size}' for name, size in dict(sizes).items())}"
