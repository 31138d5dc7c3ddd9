"""Matrix products whose pieces are shared by the threads of a block: how `write_product` writes them for GPUs.

A block goes over the depth in stages. Of each it copies a piece of both operands to shared memory, with whatever
conversion, padding or transposition that takes, and each thread adds to sums that it keeps in registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_core.codegen.dtypes import compute_dtype
from kagent_core.codegen.generic.block_tiles import BlockTile, Problem, block_tile, line_of, pitch
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.staging import Copy, Registers, write_stages
from kagent_core.codegen.groups import THREAD

if TYPE_CHECKING:
    from kagent_core.codegen.generic.tiled import Product

POOL = "pool"
"""Name of the shared memory: copies of rows and of columns, and then in their place sums that several threads share."""


def write_shared_product(k: KernelBuilder, product: Product) -> None:
    """Write a product: a piece of it per block."""
    _SharedProduct.of(k, product).write()


@dataclass(frozen=True)
class _SharedProduct:
    """A product, the pieces that it is cut into, and the sums of a thread."""

    k: KernelBuilder
    product: Product
    tile: BlockTile
    sums: Registers

    @staticmethod
    def of(k: KernelBuilder, product: Product) -> _SharedProduct:
        kind = k.compute_type(product.dtype)
        problem = Problem(
            product.rows.lines.extent,
            product.columns.lines.extent,
            product.rows.depth.extent,
            batch=math.prod(extent for _, extent in product.batch),
            nbytes=int(kind.lstrip("biuf")) // 8,
            alone=len(k.call.results) == 1,
        )
        tile = block_tile(k, problem)
        sums = Registers("sum", kind, product.dtype, tile.thread_rows, tile.thread_columns)
        return _SharedProduct(k, product, tile, sums)

    @property
    def has_stretches(self) -> bool:
        """Whether so many products are summed up that the sum of each stretch of them is added to a total.

        So the error grows with the stretch, not with the depth. The total has the type that is computed in: one of
        float64 would take more registers than a thread has.
        """
        is_long = self.product.rows.depth.extent > self.k.tiles.depth * self.tile.slices
        return is_long and compute_dtype(self.product.dtype) == "float32"

    @property
    def totals(self) -> Registers:
        """Sums of stretches."""
        return Registers("total", self.sums.kind, self.product.dtype, self.sums.tall, self.sums.wide)

    def write(self) -> None:
        """Write the kernel."""
        k, tile, product = self.k, self.tile, self.product
        m, n = (operand.lines.extent for operand in (product.rows, product.columns))
        axes = [("bi", -(-m // tile.rows)), ("bj", -(-n // tile.columns))]
        with k.groups(*product.batch, *axes, threads=tile.threads):
            k.add(f"const {k.index_type} i_first = bi * {tile.rows}, j_first = bj * {tile.columns};")
            place_thread(k, ("across", tile.across), ("down", tile.down), ("slice", tile.slices))
            self.sums.declare(k)
            if self.has_stretches:
                self.totals.declare(k)
            self._multiply()
            self._store()

    def _multiply(self) -> None:
        """Write the loop over the depth."""
        k, tile, product = self.k, self.tile, self.product
        m, n = (k.size(operand.lines.extent) for operand in (product.rows, product.columns))
        rows = Copy(k, product.rows, "rows", POOL, tile.rows, tile.depth, tile.threads, "i_first", m)
        begin, threads = 2 * rows.length, tile.threads
        columns = Copy(k, product.columns, "columns", POOL, tile.columns, tile.depth, threads, "j_first", n, begin)
        row, column = (
            f"p * {pitch(tile.rows)} + {line_of(tile.thread_rows, 'down', 't', tile.down)}]",
            f"p * {pitch(tile.columns)} + {line_of(tile.thread_columns, 'across', 't', tile.across)}]",
        )
        steps, depth = tile.depth // tile.slices, f"s * {tile.slices} + slice" if tile.slices > 1 else "s"

        def multiply(begins: Sequence[str]) -> None:
            if self.has_stretches:
                self._end_stretch()
            self.sums.multiply(k, steps, depth, f"{begins[0]}{row}", f"{begins[1]}{column}")

        if self.has_stretches:
            k.add("i32 length = 0;")
        whole = ("0", k.size(product.rows.depth.extent))
        write_stages(k, self.sums.kind, [rows, columns], whole, multiply, tile.computing)

    def _end_stretch(self) -> None:
        """Write what adds the sums of a stretch to the totals, before the next one begins."""
        k, tile = self.k, self.tile
        stretch = max(k.tiles.depth * tile.slices // tile.depth, 1)
        with k.block(f"if (length == {stretch})"):
            k.add("length = 0;")
            with k.unrolled("t", self.sums.length):
                k.add("total[t] += sum[t];", "sum[t] = 0;")
        k.add("length++;")

    def _store(self) -> None:
        """Write what stores the sums."""
        k, tile, product = self.k, self.tile, self.product
        row = line_of(tile.thread_rows, "down", "r", tile.down)
        column = line_of(tile.thread_columns, "across", "c", tile.across)
        value = self.sums.place("r", "c")
        if self.has_stretches:
            value = f"({self.totals.place('r', 'c')} + {value})"
        if tile.slices > 1:
            self._share(row, column, value)
            return
        idle = f" && {THREAD} < {tile.computing}" if tile.computing < tile.threads else ""
        with k.unrolled("r", tile.thread_rows):
            k.add(f"const {k.index_type} i = i_first + {row};")
            with k.block(f"if (i < {k.size(product.rows.lines.extent)}{idle})"):
                at = product.rows.lines.coordinates(k, "i")
                with k.unrolled("c", tile.thread_columns):
                    k.add(f"const {k.index_type} j = j_first + {column};")
                    with k.block(f"if (j < {k.size(product.columns.lines.extent)})"):
                        product.store(at, product.columns.lines.coordinates(k, "j"), value)

    def _share(self, row: str, column: str, value: str) -> None:
        """Write what adds up the sums of several threads, and stores these."""
        k, tile, product = self.k, self.tile, self.product
        size = tile.rows * tile.columns
        k.shared(self.sums.kind, POOL, tile.shared_length)
        computing = k.block(f"if ({THREAD} < {tile.computing})" if tile.computing < tile.threads else "")
        with computing, k.unrolled("r", tile.thread_rows), k.unrolled("c", tile.thread_columns):
            k.add(f"{POOL}[slice * {size} + ({row}) * {tile.columns} + {column}] = {value};")
        k.barrier()
        with k.block(f"for (i32 place = {THREAD}; place < {size}; place += {tile.threads})"):
            first, second = f"i_first + place / {tile.columns}", f"j_first + place % {tile.columns}"
            k.add(f"const {k.index_type} i = {first}, j = {second};")
            m, n = (k.size(operand.lines.extent) for operand in (product.rows, product.columns))
            with k.block(f"if (i < {m} && j < {n})"):
                k.add(f"{self.sums.kind} all = 0;")
                with k.block(f"for (i32 s = 0; s < {tile.slices}; s++)"):
                    k.add(f"all += {POOL}[s * {size} + place];")
                at = product.rows.lines.coordinates(k, "i")
                product.store(at, product.columns.lines.coordinates(k, "j"), "all")
        k.barrier()  # the next piece's copies take the place of the sums


def place_thread(k: KernelBuilder, *counts: tuple[str, int]) -> None:
    """Write a thread's number along some directions, the first one fastest, given how many threads each has."""
    step = 1
    for name, count in counts:
        above = f"{THREAD} / {step}" if step > 1 else THREAD
        k.add(f"const i32 {name} = {'0' if count == 1 else f'{above} % {count}'};")
        step *= count
