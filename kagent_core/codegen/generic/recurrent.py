"""The steps of an LSTM on a CPU: what depends on the state before, since the products with its input are made at once.

An item has as many sequences of the batch as a register tile has rows, and keeps their state from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.register_tiles import RegisterTiles, Tile
from kagent_core.specs import OpCall, TensorSpec

GATES = 4
"""Of an LSTM: input, forget, cell, output."""


def lstm_tile(tiles: RegisterTiles, batch: int, width: int) -> Tile:
    """Return the tile that computes the gates of some sequences whose state has so many numbers."""
    return tiles.choose("rows", batch, GATES * width)


def packed_shape(tile: Tile, width: int) -> tuple[int, int, int]:
    """Return the shape of a recurrent weight that was laid out tile by tile: tiles, depth, columns of a tile."""
    return -(-GATES * width // tile.width), width, tile.width


def takes_steps(tiles: RegisterTiles | None, hx: TensorSpec, weight: TensorSpec) -> bool:
    """Whether there is a kernel: the weight was laid out for these registers and so many sequences."""
    if tiles is None or hx.dtype.name != "float32" or not hx.numel or not weight.is_contiguous:
        return False
    return weight.shape == packed_shape(lstm_tile(tiles, *hx.shape[1:]), hx.shape[2])


def _refusal(call: OpCall) -> str | None:
    if any(spec.dtype.name != "float32" for spec in call.inputs):
        return f"{call.name} has a tensor that is not float32"
    if not call.arguments["hx"].numel or not call.arguments["projected"].numel:
        return f"{call.name} has no elements"
    return None


@GENERIC.kernel("kagent::lstm_steps", accepts=_refusal)
def lstm_steps(
    k: KernelBuilder, projected: TensorSpec, weight: TensorSpec, hx: TensorSpec, cx: TensorSpec, reverse: bool
) -> None:
    """Write all steps of some sequences per item.

    Raises
    ------
    ValueError
        When the language has no register tiles.
    """
    if k.language.register_tiles is None:
        raise ValueError("the language has no register tiles")
    steps, batch, _ = projected.shape
    width = hx.shape[2]
    tile = lstm_tile(k.language.register_tiles, batch, width)
    if weight.shape != packed_shape(tile, width):
        raise ValueError(f"the weight was laid out as {weight.shape}, not as {packed_shape(tile, width)}")
    states, cells = k.read(hx), k.read(cx)
    with k.items(("bi", -(-batch // tile.rows)), steps=tile.rows * steps * GATES * width * width // 16):
        begin = f"bi * {tile.rows}"
        k.add(f"const {k.index_type} at = {k.least(begin, f'{k.size(batch)} - {tile.rows}')};")
        for name in ("state", "cell"):
            k.array("f32", name, tile.rows * width)
        k.array("f32", "gates", tile.rows * GATES * width)

        def each(write: Callable[[str, str, str], None], first: str = "0") -> None:
            with k.loop("r", tile.rows, first), k.loop("e", width, simd=True):
                write("(at + r)", "e", f"r * {width} + e")

        each(lambda row, e, own: k.add(f"state[{own}] = {states.at('0', row, e)};"))
        each(lambda row, e, own: k.add(f"cell[{own}] = {cells.at('0', row, e)};"))
        with k.loop("n", k.size(steps)):
            k.add(f"const {k.index_type} t = {f'{k.size(steps)} - 1 - n' if reverse else 'n'};")
            _write_gates(k, tile, k.read(projected), k.read(weight))
            _write_state(k, tile, width)
            each(lambda row, e, own: k.store(["t", row, e], f"state[{own}]"), f"{begin} - at")
        for number, name in ((1, "state"), (2, "cell")):
            if k.gives(number):
                each(lambda row, e, own: k.store(["0", row, e], f"{name}[{own}]", number), f"{begin} - at")  # noqa: B023


def _write_gates(k: KernelBuilder, tile: Tile, projected: Tensor, weight: Tensor) -> None:
    """Write ``gates``: what is made of the input and of the state, a tile of columns at a time."""
    count, depth, wide = weight.spec.shape
    columns = GATES * depth
    with k.loop("b", count):
        k.add(f"f32 made[{tile.rows * wide}];")
        passed: Sequence[str] = ("state", str(depth), "1", "0", "1", "0", str(depth))
        place = f"{weight.pointer} + b * {depth * wide}"
        k.add(f"{tile.function('rows')}({', '.join(passed)}, {place}, 0, 0, {wide}, made);")
        end = k.least(str(wide), f"{columns} - b * {wide}") if columns % wide else wide
        if columns % wide:
            k.add(f"const {k.index_type} end = {end};")
        with k.loop("r", tile.rows), k.loop("e", "end" if columns % wide else wide, simd=True):
            given = projected.at("t", "(at + r)", f"(b * {wide} + e)")
            k.add(f"gates[r * {columns} + b * {wide} + e] = made[r * {wide} + e] + {given};")


def _write_state(k: KernelBuilder, tile: Tile, width: int) -> None:
    """Write what the gates make of the state."""
    exp, tanh = k.language.function("exp", "float32"), k.language.function("tanh", "float32")

    def sigmoid(name: str) -> str:
        return f"1.0f / (1.0f + {exp}(-{name}[e]))"

    with k.loop("r", tile.rows):
        k.add(f"const f32 *put = gates + r * {GATES * width}, *kept = put + {width}, *new = kept + {width};")
        k.add(f"const f32 *shown = new + {width};", f"f32 *s = state + r * {width}, *c = cell + r * {width};")
        with k.loop("e", width, simd=True):
            k.add(f"c[e] = {sigmoid('kept')} * c[e] + {sigmoid('put')} * {tanh}(new[e]);")
            k.add(f"s[e] = {sigmoid('shown')} * {tanh}(c[e]);")
