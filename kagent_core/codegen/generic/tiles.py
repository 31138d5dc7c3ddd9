"""How large the pieces are that the work-items of matrix products compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kagent_core.codegen.dtypes import NBITS, compute_dtype
from kagent_core.specs.tiles import Tiles as LaunchTiles


@dataclass(frozen=True)
class Tiles:
    """Sizes of the pieces of a matrix product. The defaults suit the caches and vector registers of CPUs.

    A work-item computes `rows` × `blocks` by `columns` elements. It copies a stretch of the second operand into memory
    of its own, `depth` by `columns` values, and multiplies it with `rows` rows at a time, whose sums stay in registers.

    Attributes
    ----------
    rows
        Rows of a register tile.
    column_bits
        Columns of a register tile, in bits of the type that is computed in: a few vector registers.
    column_count
        Columns of a register tile, whatever the type is; None leaves them to `column_bits`.
    depth
        Products that are summed up in the type that is computed in, before the sum goes to a wider one.
    blocks
        Register tiles, one below the other, of a work-item.
    queries, keys
        Attention: queries of a work-item, and keys that it takes at a time.
    lanes
        Separate sums of a dot product.
    block_rows, block_columns, block_depth
        Where the threads of a block share a piece of a product: its rows and columns, and the depth of what they copy
        to shared memory at a time. None leaves each to the problem.
    thread_rows, thread_columns
        Of these rows and columns, how many one thread computes. None leaves them to the problem, too.
    wide
        The type in which sums of float32 products are added up.
    threads
        That share out pieces of work which overlap: there are no more of these than that takes.
    """

    rows: int = 8
    column_bits: int = 1024
    column_count: int | None = None
    depth: int = 256
    blocks: int = 8
    queries: int = 24
    keys: int = 32
    lanes: int = 64
    block_rows: int | None = None
    block_columns: int | None = None
    block_depth: int | None = None
    thread_rows: int | None = None
    thread_columns: int | None = None
    wide: str = "float64"
    threads: int = 1

    def columns(self, dtype: str) -> int:
        """Return the columns of a register tile that is computed in what `compute_dtype` says."""
        return self.column_count or max(self.column_bits // max(NBITS[compute_dtype(dtype)], 32), 1)

    def total_dtype(self, dtype: str) -> str:
        """Return the type in which sums over stretches of the depth are added up."""
        compute = compute_dtype(dtype)
        return self.wide if compute == "float32" else compute

    def with_sizes(self, sizes: LaunchTiles) -> Tiles:
        """Return tiles with the sizes that a launch config has; what it leaves out stays."""
        named = {"column_count" if name == "columns" else name: size for name, size in sizes}
        return replace(self, **named)  # type: ignore[arg-type]


DEFAULT_TILES = Tiles()
"""What is taken where no launch config says otherwise."""
