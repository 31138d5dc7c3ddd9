"""Convolutions whose sums stay in a CPU's vector registers, and that copy nothing.

Channels of what is made are neighbours in memory, in the result as in the weight, so that a vector has some of them.
A tile is some neighbouring places by some neighbouring channels. Places whose window reaches into the padding are
computed one by one, over what is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.register_rows import Columns, Rows, first_column, store_columns, write_rows
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.register_tiles import Kind, RegisterTiles, Tile
from kagent_core.specs import TensorSpec

Store = Callable[[Sequence[str], str, str], None]
"""Writes what stores an element: its place without the channel, its channel, its value."""


def takes_direct(source: TensorSpec, weight: TensorSpec, out: TensorSpec, groups: int) -> bool:
    """Whether a convolution that is not transposed can be computed so: its tensors lie as it takes them."""
    same = all(spec.dtype.name == "float32" for spec in (source, weight, out))
    if not same or len(out.shape) != 4 or out.numel == 0 or weight.numel == 0:
        return False
    made, read = weight.shape[:2]
    innermost = weight.strides[0] == 1 and all(
        stride >= made for size, stride in zip(weight.shape[1:], weight.strides[1:], strict=True) if size > 1
    )
    if not innermost or not _has_neighbours(out, 1):
        return False
    return _has_neighbours(source, 1) and (groups == 1 or (groups == source.shape[1] == made and read == 1))


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
    step = _flat_step(source.spec, window)
    if step is not None:
        rows = Rows(source.pointer, step, Space((out.shape[0], *out.shape[2:])), source.spec.shape[1])
        write_rows(k, tiles, rows, Columns(weight.pointer, weight.spec.strides[1], out.shape[1]), store)
        return
    _Lines.of(k, tiles, out, source, weight, window, store).write()


@dataclass(frozen=True)
class _Lines:
    """A convolution line by line.

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
        kind: Kind = "places" if window.groups > 1 else "rows"
        tile = tiles.choose(kind, end - first, out.shape[1], length - end + first)
        return _Lines(k, tile, out, source, weight, window, store, first, end)

    @property
    def depthwise(self) -> bool:
        """Whether every channel reads one channel only."""
        return self.window.groups > 1

    def write(self) -> None:
        """Write the loops over lines and tiles."""
        k, tile, (count, channels, lines, length) = self.k, self.tile, self.out.shape
        steps = self.weight.spec.numel // channels * tile.width * length // 16
        with k.items(("n", count), ("o0", lines), ("bj", -(-channels // tile.width)), steps=steps):
            first_column(k, tile, channels)
            self._clip("line", 0, "o0")
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
            self._clip("tap", 1, "i")
            self._call(1, "i", "tap_first", "tap_count")
            self._store("0", "i")

    def _store(self, row: str, place: str) -> None:
        at = ["n", "o0", place]
        store_columns(self.k, self.tile, self.out.shape[1], row, lambda channel, value: self.store(at, channel, value))

    def _clip(self, name: str, n: int, place: str) -> None:
        """Declare where a window begins along a dimension, its first tap that is inside, and how many are."""
        k, window, kind = self.k, self.window, self.k.index_type
        size, by = k.size(self.source.spec.shape[2 + n]), k.size(window.dilation[n])
        k.fits(self.source.spec.shape[2 + n] + 2 * window.padding[n] + window.dilation[n])
        k.add(f"const {kind} {name}_from = {place} * {k.size(window.stride[n])} - {k.size(window.padding[n])};")
        before = f"({name}_from < 0 ? (-{name}_from + {by} - 1) / {by} : 0)" if window.padding[n] else "0"
        k.add(f"const {kind} {name}_first = {before};")
        k.add(f"const {kind} {name}_past = ({size} - {name}_from + {by} - 1) / {by};")
        k.add(f"const {kind} {name}_count = {k.least(k.size(window.size[n]), f'{name}_past')} - {name}_first;")

    def _call(self, rows: int, place: str, first_tap: str, taps: str) -> None:
        """Write the call of what computes a tile: its first place, and the taps of it along the line."""
        k, window = self.k, self.window
        x, w = ([k.size(stride) for stride in tensor.spec.strides] for tensor in (self.source, self.weight))
        by_line, by_tap = k.size(window.dilation[0]), k.size(window.dilation[1])
        column = f"{place} * {k.size(window.stride[1])} - {k.size(window.padding[1])} + {first_tap} * {by_tap}"
        at = [self.source.pointer, f"n * {x[0]}", f"(line_from + line_first * {by_line}) * {x[2]}"]
        at += [f"({column}) * {x[3]}", *(["j"] if self.depthwise else [])]
        weight = f"{self.weight.pointer} + j + line_first * {w[2]} + {first_tap} * {w[3]}"
        passed = [" + ".join(at), f"{k.size(window.stride[1])} * {x[3]}", "line_count", f"{by_line} * {x[2]}"]
        if self.depthwise:
            passed += [taps, f"{by_tap} * {x[3]}", weight, w[2], w[3]]
        else:
            channels = k.size(self.source.spec.shape[1])
            if self._taps_are_neighbours:
                passed += ["1", "0", f"{taps} * {channels}", weight, w[2], "0", w[1]]
            else:
                passed += [taps, f"{by_tap} * {x[3]}", channels, weight, w[2], w[3], w[1]]
        function = self.tile.function("places" if self.depthwise else "rows", rows)
        k.add(f"{function}({', '.join(passed)}, made);")

    @property
    def _taps_are_neighbours(self) -> bool:
        """Whether the channels of neighbouring taps follow each other, in the source and in the weight."""
        x, w = self.source.spec, self.weight.spec
        channels = x.shape[1]
        together = x.strides[3] == channels and w.strides[3] == channels * w.strides[1]
        return together and self.window.dilation[1] == 1


def _has_neighbours(spec: TensorSpec, dim: int) -> bool:
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
