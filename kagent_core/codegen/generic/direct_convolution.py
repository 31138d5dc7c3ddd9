"""Convolutions whose sums stay in a CPU's vector registers, and that copy nothing.

Channels of what is made are neighbours in memory, in the result as in the weight, so that a vector has some of them.
A tile is some neighbouring places by some neighbouring channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.dense_convolution import write_dense
from kagent_core.codegen.generic.direct_lines import Store, clip, tile_of_lines, write_lines
from kagent_core.codegen.generic.direct_planes import takes_planes, write_planes
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.register_rows import Columns, Rows, first_column, store_columns, write_rows
from kagent_core.codegen.generic.scaled_rows import MOST_BYTES, write_scaled_rows
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.register_tiles import RegisterTiles, Tile
from kagent_core.specs import TensorSpec


def takes_direct(source: TensorSpec, weight: TensorSpec, out: TensorSpec, window: Window) -> bool:
    """Whether a convolution that is not transposed can be computed so: its tensors lie as it takes them."""
    same = all(spec.dtype.name == "float32" for spec in (source, weight, out))
    if not same or len(out.shape) != 4 or out.numel == 0 or weight.numel == 0:
        return False
    made, read = weight.shape[:2]
    innermost = weight.strides[0] == 1 and all(
        stride >= made for size, stride in zip(weight.shape[1:], weight.strides[1:], strict=True) if size > 1
    )
    if not innermost or not has_neighbours(out, 1):
        return False
    groups = window.groups
    if groups == 1 and takes_planes(source, out, window):
        return True
    return has_neighbours(source, 1) and (groups == 1 or (groups == source.shape[1] == made and read == 1))


def write_direct(
    k: KernelBuilder,
    tiles: RegisterTiles,
    out: TensorSpec,
    source: Tensor,
    weight: Tensor,
    window: Window,
    store: Store,
) -> None:
    """Write the convolution; `takes_direct` said that it can be."""
    if window.groups == 1 and not has_neighbours(source.spec, 1):
        write_planes(k, tiles, out, source, weight, window, store)
        return
    step = _flat_step(source.spec, window) if source.spec.shape[2:] == out.shape[2:] else None
    if step is not None:
        rows = Rows(source.pointer, step, Space((out.shape[0], *out.shape[2:])), source.spec.shape[1])
        write_rows(k, tiles, rows, Columns(weight.pointer, weight.spec.strides[1], out.shape[1]), store)
        return
    tile = tile_of_lines(tiles, out, source.spec, window) if window.groups > 1 else None
    if tile is not None:
        write_lines(k, tile, out, source, weight, window, store)
        return
    if window.groups == 1:
        write_dense(k, tiles, out, source, weight, window, store)
        return
    _Lines.of(k, tiles, out, source, weight, window, store).write()


def takes_scale(source: TensorSpec, weight: TensorSpec, window: Window) -> bool:
    """Whether a convolution that `takes_direct` takes can multiply each channel of what it reads with a number."""
    small = weight.numel * weight.dtype.itemsize <= MOST_BYTES
    return small and has_neighbours(source, 1) and _flat_step(_of_one_image(source), window) is not None


def write_scaled(
    k: KernelBuilder,
    tiles: RegisterTiles,
    source: Tensor,
    weight: Tensor,
    scale: Tensor,
    window: Window,
    store: Store,
) -> None:
    """Write such a convolution; `takes_scale` said that it can be."""
    write_scaled_rows(k, tiles, _flat_step(_of_one_image(source.spec), window) or 0, source, weight, scale, store)


def _of_one_image(source: TensorSpec) -> TensorSpec:
    return replace(source, shape=(1, *source.shape[1:]))


@dataclass(frozen=True)
class _Lines:
    """A depthwise convolution line by line, for windows that skip places or are long, and long steps.

    Places whose window reaches into the padding are computed one by one, over what is inside.

    Attributes
    ----------
    first, end
        Of a line's places, those whose window is inside along the line.
    """

    k: KernelBuilder
    tile: Tile
    out: TensorSpec
    source: Tensor
    weight: Tensor
    window: Window
    store: Store
    first: int
    end: int

    @staticmethod
    def of(
        k: KernelBuilder,
        tiles: RegisterTiles,
        out: TensorSpec,
        source: Tensor,
        weight: Tensor,
        window: Window,
        store: Store,
    ) -> _Lines:
        """Return it, with the tile that suits it best."""
        length, size, stride, padding = out.shape[3], source.spec.shape[3], window.stride[1], window.padding[1]
        reach = (window.size[1] - 1) * window.dilation[1]
        first = min(-(-padding // stride), length)
        end = min(max((size - 1 - reach + padding) // stride + 1, first), length)
        tile = tiles.choose("places", end - first, out.shape[1], length - end + first)
        return _Lines(k, tile, out, source, weight, window, store, first, end)

    def write(self) -> None:
        """Write the loops over lines and tiles."""
        k, tile, (count, channels, lines, length) = self.k, self.tile, self.out.shape
        steps = self.weight.spec.numel // channels * tile.width * length // 16
        with k.items(("n", count), ("o0", lines), ("bj", -(-channels // tile.width)), steps=steps):
            first_column(k, tile, channels)
            clip(self.k, self.window, self.source.spec, "line", 0, "o0")
            if self.end > self.first:
                self._tiles()
            if self.end - self.first < length:
                self._edges()

    def _tiles(self) -> None:
        """Write the loop over the tiles of a line's inner places."""
        k, tile = self.k, self.tile
        with k.loop("i", k.size(self.end), k.size(self.first), step=tile.rows):
            k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(self.end)} - {tile.rows}')};")
            k.add(f"f32 made[{tile.rows * tile.width}];")
            self._call(tile.rows, "at", "0", k.size(self.window.size[1]))
            with k.loop("r", tile.rows, "i - at"):
                self._store("r", "(at + r)")

    def _edges(self) -> None:
        """Write the loop over the places at both ends of a line."""
        k = self.k
        first, end = k.size(self.first), k.size(self.end)
        with k.loop("q", f"{first} + {k.size(self.out.shape[3])} - {end}"):
            k.add(f"const {k.index_type} i = q < {first} ? q : q - {first} + {end};")
            k.add(f"f32 made[{self.tile.width}];")
            clip(self.k, self.window, self.source.spec, "tap", 1, "i")
            self._call(1, "i", "tap_first", "tap_count")
            self._store("0", "i")

    def _store(self, row: str, place: str) -> None:
        at = ["n", "o0", place]
        store_columns(self.k, self.tile, self.out.shape[1], row, lambda channel, value: self.store(at, channel, value))

    def _call(self, rows: int, place: str, first_tap: str, taps: str) -> None:
        """Write the call of what computes a tile: its first place, and the taps of it along the line."""
        k, window = self.k, self.window
        x, w = ([k.size(stride) for stride in tensor.spec.strides] for tensor in (self.source, self.weight))
        by_line, by_tap = k.size(window.dilation[0]), k.size(window.dilation[1])
        column = f"{place} * {k.size(window.stride[1])} - {k.size(window.padding[1])} + {first_tap} * {by_tap}"
        at = [self.source.pointer, f"n * {x[0]}", f"(line_from + line_first * {by_line}) * {x[2]}"]
        at += [f"({column}) * {x[3]}", "j"]
        weight = f"{self.weight.pointer} + j + line_first * {w[2]} + {first_tap} * {w[3]}"
        passed = [" + ".join(at), f"{k.size(window.stride[1])} * {x[3]}", "line_count", f"{by_line} * {x[2]}"]
        passed += [taps, f"{by_tap} * {x[3]}", weight, w[2], w[3]]
        k.add(f"{self.tile.function('places', rows)}({', '.join(passed)}, made);")


def has_neighbours(spec: TensorSpec, dim: int) -> bool:
    """Whether elements along a dimension are neighbours in memory."""
    return spec.shape[dim] == 1 or spec.strides[dim] == 1


def _flat_step(source: TensorSpec, window: Window) -> int | None:
    """Return how far places are apart, where each is a place of the result and they are one line; None for no."""
    plain = all(n == 1 for n in (*window.size, *window.stride)) and not any(window.padding) and window.groups == 1
    if not plain:
        return None
    step, extent = 0, 1
    for dim in (3, 2, 0):
        if source.shape[dim] == 1:
            continue
        step = step or source.strides[dim]
        if source.strides[dim] != step * extent:
            return None
        extent *= source.shape[dim]
    return step
