"""Convolutions of one place that read each channel times a number of its image, as behind squeeze and excitation.

The numbers are multiplied with the weights, for some places of an image at a time: those are fewer than what is read.
"""

from __future__ import annotations

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.direct_lines import Store
from kagent_core.codegen.generic.register_rows import Columns, Rows, choose_tile, write_tiles
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.specs import TensorSpec

MOST_BYTES = 512 * 1024
"""Largest weight that is multiplied so: what is made of it stays in a core's own cache, half of the second one."""

_MANY, _FEW = 32, 4
"""Most tiles of rows, one below the other, that use the same weights: making those takes a thirtieth of the time. And
the fewest, where threads would have none otherwise."""


def write_scaled_rows(
    k: KernelBuilder, tiles: RegisterTiles, step: int, source: Tensor, weight: Tensor, scale: Tensor, store: Store
) -> None:
    """Write the convolution.

    Parameters
    ----------
    step
        How far neighbouring places of an image are apart.
    source, weight
        As `kagent_core.codegen.generic.direct_convolution.takes_direct` takes them.
    scale
        [images or 1, channels, 1, 1].
    store
        Stores an element.
    """
    count, depth, *sizes = source.spec.shape
    made, places = weight.spec.shape[0], Space((1, *sizes))
    tile = choose_tile(tiles, places.extent, made)
    below = -(-places.extent // tile.rows)
    stretches = max(-(-below // _MANY), min(-(-k.tiles.threads // count), below // _FEW))
    tall, lanes = tile.rows * -(-below // stretches), tiles.lanes
    pitch = -(-made // lanes) * lanes
    pitch += lanes if pitch % (8 * lanes) == 0 else 0  # rows a power of two apart share few sets of a cache
    steps = depth * tile.width * min(tall, places.extent) // 16
    with k.items(("n", count), ("bi", -(-places.extent // tall)), steps=steps):
        k.array("f32", "scaled", depth * pitch)
        with k.loop("p", k.size(depth)):
            k.add(f"const f32 scale = {scale.at('n', 'p', '0', '0')};")
            with k.loop("c", k.size(made), simd=True):
                k.add(f"scaled[p * {pitch} + c] = scale * {weight.at('c', 'p', '0', '0')};")
        rows = Rows(f"{source.pointer} + n * {k.size(source.spec.strides[0])}", step, places, depth)
        write_tiles(
            k, tile, tall, rows, Columns("scaled", pitch, made), lambda at, c, value: store(["n", *at[1:]], c, value)
        )


def is_scale(scale: TensorSpec, source: TensorSpec) -> bool:
    """Whether a tensor has a number for each channel of each image, or of all images, if expanded to all places."""
    if len(source.shape) != 4 or len(scale.shape) != 4:
        return False
    same = scale.shape[0] in (1, source.shape[0]) and scale.shape[1] == source.shape[1]
    return same and all(size == 1 or not step for size, step in zip(scale.shape[2:], scale.strides[2:], strict=True))
