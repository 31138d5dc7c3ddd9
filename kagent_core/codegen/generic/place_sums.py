"""Sums over all places of an image, channel by channel, by the kernel that makes the image: it is not read again.

Each line's sums are found while what it has made is in the nearest cache, and kept apart. When all lines are made, they
are added up, from the first to the last: the result is the same however many threads there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.nest import normalized_dims
from kagent_core.codegen.register_tiles import Tile
from kagent_core.codegen.table import NotLoweredError
from kagent_core.specs import OpCall, TensorSpec

_LONGEST = 1024
"""Places of a line up to which its sums are kept in float32: longer ones would be less exact than eager PyTorch's."""

_WIDE = 8
"""Values of float64 in the widest vectors that there are."""

SUM, MEAN = "aten::sum.dim_IntList", "aten::mean.dim"


def adds_up_places(call: OpCall) -> bool:
    """Whether a call adds up all places of images, of each channel by itself, in float32."""
    if call.signature not in (SUM, MEAN):
        return False
    arguments = full_arguments(call)
    source: TensorSpec = arguments["self"]
    tensors = (source, *call.outputs)
    same = all(spec.dtype.name == "float32" and not (spec.conj or spec.neg) for spec in tensors)
    return same and len(source.shape) == 4 and normalized_dims(arguments["dim"], 4) == (2, 3)


def without_sums(calls: Sequence[OpCall]) -> tuple[tuple[OpCall, ...], OpCall | None]:
    """Return some calls without the one that adds up the places of what they make, and that one."""
    sums = [call for call in calls if adds_up_places(call)]
    if len(sums) != 1:
        return tuple(calls), None
    return tuple(call for call in calls if call is not sums[0]), sums[0]


@contextmanager
def image(k: KernelBuilder, tile: Tile) -> Iterator[None]:
    """Write what makes an image inside of the block, and behind it what adds up the sums of its lines.

    Parameters
    ----------
    k
        Where to.
    tile
        In which it is made, line by line, each inside of `line`: ``n``, ``o0`` and ``j`` are its image, its line and
        its first channel.

    Raises
    ------
    NotLoweredError
        When the sums of all lines are too many to be kept, or lines are too long.
    """
    if k.summed is None:
        yield
        return
    count, channels, lines, length = k.call.outputs[0].shape
    if length > _LONGEST or 4 * count * channels * lines > k.language.item_nbytes // 2:
        raise NotLoweredError(f"{k.summed.name} has too many lines to add up, or too long ones")
    k.add(f"f32 line_sums[{k.size(count)} * {k.size(lines)} * {k.size(channels)}];")
    yield
    _add_up_lines(k, tile, k.sums_of(k.summed))


@contextmanager
def line(k: KernelBuilder, tile: Tile) -> Iterator[None]:
    """Write what makes some channels of a line inside of the block, tile by tile, each followed by `add_tile`."""
    if k.summed is None:
        yield
        return
    _, channels, lines, _ = k.call.outputs[0].shape
    k.add(f"f32 sums[{tile.width}] = {{0}};")
    yield
    with _new_channels(k, tile, channels):
        k.add(f"line_sums[(n * {k.size(lines)} + o0) * {k.size(channels)} + j + e] = sums[e];")


def add_tile(k: KernelBuilder, tile: Tile) -> None:
    """Write what adds up the places of a tile, from place ``i`` on, once ``made`` has what was stored."""
    if k.summed is None:
        return
    for first in range(0, tile.width, tile.lanes):
        at = f" + {first}" if first else ""
        k.add(f"added_{tile.lanes}(made{at}, {tile.width}, i - at, {tile.rows}, sums{at});")


def _add_up_lines(k: KernelBuilder, tile: Tile, result: Tensor) -> None:
    """Write what adds up the sums of lines, in float64."""
    count, channels, lines, length = k.call.outputs[0].shape
    assert k.summed is not None
    places = f"(f64)({k.size(lines)} * {k.size(length)})" if k.summed.signature == MEAN else "1.0"
    lanes = min(tile.lanes, _WIDE)
    k.add(f"const f64 share = 1.0 / {places};")
    with k.items(("n", count), ("bj", -(-channels // tile.width)), steps=lines * tile.width // 4):
        k.add(f"const {k.index_type} past = {k.size(channels)} - {tile.width}, begin = bj * {tile.width};")
        k.add(f"const {k.index_type} j = {k.least('begin', 'past')};")
        k.add(f"const f32 *const first = line_sums + n * {k.size(lines)} * {k.size(channels)} + j;")
        k.add(f"f32 made[{tile.width}];")
        for at in range(0, tile.width, lanes):
            k.add(f"total_{lanes}(first + {at}, {k.size(channels)}, {k.size(lines)}, share, made + {at});")
        with _new_channels(k, tile, channels):
            index = ["n", "(j + e)", "0", "0"][: len(result.spec.shape)]
            k.add(f"{result.place(*index)} = made[e];")


@contextmanager
def _new_channels(k: KernelBuilder, tile: Tile, channels: int) -> Iterator[None]:
    """Write a loop over the channels of a tile that the tile before does not have."""
    with k.loop("e", tile.width, "begin - j" if channels % tile.width else 0, simd=True):
        yield
