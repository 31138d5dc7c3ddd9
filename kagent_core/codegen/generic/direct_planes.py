"""Convolutions that read a few planes, such as the colours of an image, as they lie: nothing is converted.

A place of the source is a number that is multiplied with neighbouring channels of the weight, so that its own channels
need not be neighbours: neighbouring taps of a line are.
"""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.direct_lines import Store, clip, overlaps
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.register_rows import first_column, store_places
from kagent_core.codegen.register_tiles import RegisterTiles, Tile
from kagent_core.specs import TensorSpec

FEW_PLANES = 8
"""Channels up to which a source is read as planes; of more, a line of windows touches too many pages."""

_LONGEST = 16
"""Taps of a window along a line up to which a function is written out for them: it is as long as they are many."""


def are_planes(source: TensorSpec, dilation: Sequence[int]) -> bool:
    """Whether a convolution reads few planes whose places are neighbours along a line, as its taps are."""
    together = source.shape[3] == 1 or source.strides[3] == 1
    return 1 < source.shape[1] <= FEW_PLANES and together and tuple(dilation)[-1] == 1


def takes_planes(source: TensorSpec, out: TensorSpec, window: Window) -> bool:
    """Whether a convolution of planes can be computed so: its windows are not long, and overlap the source."""
    return (
        are_planes(source, window.dilation)
        and window.size[1] <= _LONGEST
        and overlaps(out.shape[3], source.shape[3], window)
    )


def write_planes(
    k: KernelBuilder,
    tiles: RegisterTiles,
    out: TensorSpec,
    source: Tensor,
    weight: Tensor,
    window: Window,
    store: Store,
) -> None:
    """Write the convolution line by line; `takes_planes` said that it can be."""
    count, channels, lines, length = out.shape
    tile = tiles.choose("rows", length, channels)
    steps = weight.spec.numel // channels * tile.width * length // 16
    with k.items(("n", count), ("o0", lines), ("bj", -(-channels // tile.width)), steps=steps):
        first_column(k, tile, channels)
        clip(k, window, source.spec, "line", 0, "o0")
        with k.loop("i", k.size(length), step=tile.rows):
            k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(length)} - {tile.rows}')};")
            k.add(f"const {k.index_type} column = at * {k.size(window.stride[1])} - {k.size(window.padding[1])};")
            call_planes(k, tile, source, weight, window)
            store_places(k, tile, channels, store)


def call_planes(k: KernelBuilder, tile: Tile, source: Tensor, weight: Tensor, window: Window) -> None:
    """Write the call of what computes a tile of a line from ``column`` on, of channels from ``j`` on, in ``made``."""
    x, w = ([k.size(stride) for stride in tensor.spec.strides] for tensor in (source, weight))
    by_line = k.size(window.dilation[0])
    place = [source.pointer, f"n * {x[0]}", f"(line_from + line_first * {by_line}) * {x[2]}", "column"]
    passed = [" + ".join(place), "line_count", f"{by_line} * {x[2]}", k.size(source.spec.shape[1]), x[1]]
    passed += ["-column", f"{k.size(source.spec.shape[3])} - column"]
    passed += [f"{weight.pointer} + j + line_first * {w[2]}", w[2], w[1], w[3], "made"]
    sizes = (tile.rows, tile.vectors, window.size[1], window.stride[1], tile.lanes)
    k.add(f"f32 made[{tile.rows * tile.width}];", f"planes_{'_'.join(map(str, sizes))}({', '.join(passed)});")
