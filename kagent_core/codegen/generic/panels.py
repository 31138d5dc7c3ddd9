"""Products with a matrix that was laid out in panels: sums stay in a CPU's vector registers.

The panels are gone through one by one, each with all rows of a block, which stay in the second cache. While one panel
is used, the next is fetched. What is left of rows and columns has functions of its own: nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.panel_tiles import PanelTile, choose_tile
from kagent_core.specs import OpCall, TensorSpec

TALL, TALL_IF_DEEP = 8, 16
"""Tiles of rows, one below the other, that a work-item computes; more of deep products, whose panels no cache holds."""

BLOCK_NBYTES = 512 * 1024
"""Most bytes of the rows that go through all panels, one after the other: half of the second cache of a core."""

_MORE_BLOCKS = 2
"""How many blocks there may be more than the fewest, for all to have as many chunks."""

_STEPS_AHEAD, _IN_CACHES = 16, 16 * 1024 * 1024
"""Steps before it is used that each vector of a panel is fetched, where one tile has all rows, and the most bytes of
all panels for that. Reading them takes longest then: 4 MiB in a third cache of 32 MiB were read at 114 GB/s, and at 95
where the next panel is fetched into the second cache; but 50 MiB, from memory, took 5 to 10% longer."""

DEEP, STRETCH = 2048, 1024
"""Depth beyond which sums are those of stretches: one of a panel stays in the second cache, and sums are more exact."""


def takes_panels(panels: TensorSpec) -> bool:
    """Whether there is a kernel for a product with panels."""
    return panels.dtype.name == "float32" and panels.is_contiguous


def _refusal(call: OpCall) -> str | None:
    if any(spec.dtype.name != "float32" for spec in call.inputs) or not takes_panels(call.arguments["panels"]):
        return f"{call.name} has a tensor that is not float32, or panels with gaps"
    if any(not spec.numel for spec in (*call.inputs, *call.outputs)):
        return f"{call.name} has a tensor without elements"
    return None


@GENERIC.kernel("kagent::panel_product", epilogue=True, accepts=_refusal)
def panel_product(
    k: KernelBuilder, self: TensorSpec, panels: TensorSpec, columns: int, bias: TensorSpec | None
) -> None:
    """Write ``self`` times the matrix that lies in panels, and a bias.

    Raises
    ------
    ValueError
        When the language has no register tiles.
    """
    if k.language.register_tiles is None:
        raise ValueError("the language has no register tiles")
    tile = choose_tile(k.language.register_tiles, self.shape[0], columns, panels.shape[2])
    _Product(k, tile, k.read(self), k.read(panels), columns, None if bias is None else k.read(bias)).write()


@dataclass(frozen=True)
class _Product:
    """A product and what it is made of."""

    k: KernelBuilder
    tile: PanelTile
    left: Tensor
    panels: Tensor
    columns: int
    bias: Tensor | None

    def write(self) -> None:
        """Write the loops over panels and chunks of rows."""
        k, tile, (rows, depth) = self.k, self.tile, self.left.spec.shape
        tall = tile.rows * self._tall
        block, blocks = self._blocks(tall)
        axes = [("bj", self.panels.spec.shape[0]), ("bi", block)]
        with k.items(*([("bo", blocks)] if blocks > 1 else []), *axes, steps=depth * tile.width * tile.rows // 2):
            chunk = f"(bo * {k.size(block)} + bi)" if blocks > 1 else "bi"
            length = k.size(self.panels.spec.strides[0])
            k.add(f"const {k.index_type} j = bj * {tile.width}, i_first = {chunk} * {tall};")
            k.add(f"const {k.index_type} i_end = {k.least(k.size(rows), f'i_first + {tall}')};")
            if self.columns % tile.width:
                k.add(f"const {k.index_type} width = {k.least(str(tile.width), f'{k.size(self.columns)} - j')};")
            k.add(f"const f32 *const panel = {self.panels.pointer} + bj * {length};")
            k.add(f"const i32 is_last = bj + 1 == {k.size(self.panels.spec.shape[0])};")
            if depth > DEEP:
                self._write_stretches()
            else:
                if not self._is_near:
                    k.add(f"const f32 *const next = is_last ? panel : panel + {length};")
                self._write_tiles(k.size(depth), "panel", self._store)

    @property
    def _tall(self) -> int:
        return TALL_IF_DEEP if self.left.spec.shape[1] > DEEP else TALL

    def _blocks(self, tall: int) -> tuple[int, int]:
        """Return how many chunks of rows are a block, and how many blocks there are.

        Blocks that stay in a cache read all panels again; one block of all rows is read again for each panel.
        """
        rows, depth = self.left.spec.shape
        chunks = -(-rows // tall)
        block = min(chunks, max(1, BLOCK_NBYTES // (4 * depth * tall)))
        fewest = -(-chunks // block)
        # threads share out all blocks as if they were alike: the last one should not have far fewer chunks
        blocks = min(range(fewest, min(fewest + _MORE_BLOCKS, chunks) + 1), key=lambda n: (-chunks % n, n))
        block = -(-chunks // blocks)
        blocks = -(-chunks // block)
        in_blocks = blocks * self.panels.spec.numel + rows * depth
        at_once = self.panels.spec.numel + self.panels.spec.shape[0] * rows * depth
        return (block, blocks) if in_blocks < at_once else (chunks, 1)

    def _write_stretches(self) -> None:
        """Write the loop over stretches of the depth, whose sums are added up in memory of the work-item's own."""
        k, tile = self.k, self.tile
        depth = k.size(self.left.spec.shape[1])
        k.array("f32", "sums", self._tall * tile.rows * tile.width)
        with k.loop("t", self._tall * tile.rows * tile.width, simd=True):
            k.add("sums[t] = 0;")
        with k.loop("d", depth, step=STRETCH):
            k.add(f"const {k.index_type} steps = {k.least(str(STRETCH), f'{depth} - d')};")
            k.add(f"const f32 *const stretch = panel + d * {tile.width};")
            if not self._is_near:
                end = f"is_last && d + steps == {depth}"
                k.add(f"const f32 *const next = {end} ? stretch : stretch + steps * {tile.width};")
            self._write_tiles("steps", "stretch", self._add)
        with k.loop("i", "i_end", "i_first"):
            self._store_row("i", f"sums[(i - i_first) * {tile.width} + e]")

    def _write_tiles(self, steps: str, stretch: str, finish: Callable[[], None]) -> None:
        """Write the loop over the tiles of a work-item, each of which fetches its part of what is needed next."""
        k, tile, strides = self.k, self.tile, [*map(self.k.size, self.left.spec.strides)]
        fetched = -(-tile.vectors // max(1, min(self._tall, self.left.spec.shape[0] // tile.rows)))
        if not self._is_near:
            k.add(f"i32 part = bi == 0 && next != {stretch} ? 0 : {tile.width};")
        with k.loop("i", "i_end", "i_first", step=tile.rows):
            k.add(f"f32 made[{tile.rows * tile.width}] __attribute__((aligned(64)));")
            if self._is_near:
                k.add(f"const f32 *const ahead = {stretch} + {_STEPS_AHEAD * tile.width};")
            else:
                k.add(f"const f32 *const ahead = part < {tile.width} ? next + part : {stretch};")
                k.add(f"part += {fetched * tile.lanes};")
            first = f"{self.left.pointer} + i * {strides[0]}"
            if stretch != "panel":
                first += f" + d * {strides[1]}"
            passed = f"({first}, {', '.join([*strides, steps, stretch])}, {tile.width}, ahead, made, {tile.width});"
            if not tile.rest_rows:
                self._write_call(tile.rows, fetched, passed)
            else:
                k.add(f"const {k.index_type} count = {k.least(str(tile.rows), 'i_end - i')};")
                with k.block(f"if (count == {tile.rows})"):
                    self._write_call(tile.rows, fetched, passed)
                with k.block("else"):
                    self._write_call(tile.rest_rows, 0, passed)
            finish()

    @property
    def _is_near(self) -> bool:
        """Whether each vector is fetched a few steps ahead, into the nearest cache; else the next panel is."""
        panels = self.panels.spec
        return self.left.spec.shape[0] <= self.tile.rows and panels.numel * panels.dtype.itemsize <= _IN_CACHES

    @property
    def _height(self) -> str | int:
        """Rows of a tile that there are."""
        return "count" if self.tile.rest_rows else self.tile.rows

    def _write_call(self, rows: int, fetched: int, passed: str) -> None:
        """Write the call of what computes some rows of a panel."""
        k, tile, near = self.k, self.tile, self._is_near
        of_whole = tile.function(rows, tile.vectors, tile.vectors if near else fetched, near)
        if not tile.rest_vectors:
            k.add(of_whole + passed)
            return
        with k.block("if (is_last)"):
            k.add(tile.function(rows, tile.rest_vectors, tile.rest_vectors if near else 0, near) + passed)
        with k.block("else"):
            k.add(of_whole + passed)

    def _store(self) -> None:
        with self.k.loop("r", self._height):
            self._store_row("(i + r)", f"made[r * {self.tile.width} + e]")

    def _add(self) -> None:
        with self.k.loop("t", f"{self._height} * {self.tile.width}", simd=True):
            self.k.add(f"sums[(i - i_first) * {self.tile.width} + t] += made[t];")

    def _store_row(self, row: str, value: str) -> None:
        """Write the loop that stores a row of a tile."""
        with self.k.loop("e", "width" if self.columns % self.tile.width else self.tile.width, simd=True):
            column = "(j + e)"
            self.k.store([row, column], value if self.bias is None else f"{value} + {self.bias.at(column)}")
