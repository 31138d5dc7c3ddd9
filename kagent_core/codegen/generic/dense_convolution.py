"""Convolutions of all channels with all channels, whose sums stay in a CPU's vector registers, and that copy nothing.

Channels of what is made are neighbours in memory, in the result as in the weight, so that a vector has some of them. A
tile is some neighbouring places of a line by some neighbouring channels. Taps that see the source at all places of the
tile are added up in registers, one after the other. At the ends of a line there are others, which some places of the
tile have in the padding: each of those is added to what the tile has so far, of the places between only. So nothing is
computed for the padding, and nothing read there.

A weight in blocks lies as it is used. While the places of a block are computed, the next block is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from kagent_core.codegen.generic import place_sums
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.dense_tiles import Line, choose_tile, tile_of_width
from kagent_core.codegen.generic.direct_lines import Store
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.register_rows import first_column, store_places
from kagent_core.codegen.register_tiles import RegisterTiles, Tile
from kagent_core.specs import OpCall, TensorSpec

_NEAR = 256 * 1024
"""Bytes of the source that stay in a core's own cache while the weights of all channels go by, where they can."""

_FAR = 512 * 1024
"""Bytes of a weight from which on its blocks are fetched before they are used: half of the second cache of a core."""

_PIECES = 8
"""Pieces of work that there should be, for several threads to share out, where reading a weight again costs little."""

_ADDRESSES = 7
"""Most places of a tile, for each of its vectors, whose addresses are computed from a step that is a parameter."""


def takes_blocks(tiles: RegisterTiles | None, call: OpCall) -> bool:
    """Whether there is a kernel for a convolution whose weight lies in blocks."""
    weight = call.arguments["weight"]
    if tiles is None or not weight.is_contiguous or _refusal(call) is not None:
        return False
    return tile_of_width(tiles, 1, call.arguments["channels"], weight.shape[-1]) is not None


def _refusal(call: OpCall) -> str | None:
    if any(spec.dtype.name != "float32" for spec in (*call.inputs, *call.outputs)):
        return f"{call.name} has a tensor that is not float32"
    if any(not spec.numel for spec in (*call.inputs, *call.outputs)):
        return f"{call.name} has a tensor without elements"
    read = (call.arguments["source"], call.arguments.get("beside"))
    if not all(spec.strides[1] == 1 or spec.shape[1] == 1 for spec in read if spec is not None):
        return f"{call.name} reads a tensor whose channels are no neighbours in memory"
    return None


@GENERIC.kernel("kagent::block_convolution", epilogue=True, accepts=_refusal)
def block_convolution(
    k: KernelBuilder,
    source: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None,
    channels: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    beside: TensorSpec | None,
) -> None:
    """Write a convolution whose weight lies in blocks of channels, of one or of two tensors.

    Raises
    ------
    ValueError
        When the language has no register tiles, or none as wide as a block.
    """
    tiles, out = k.language.register_tiles, k.call.outputs[0]
    tile = None if tiles is None else tile_of_width(tiles, out.shape[3], channels, weight.shape[4])
    if tile is None:
        raise ValueError(f"the language has no register tiles of {weight.shape[4]} numbers")
    window = Window.of(weight.shape[1:3], stride, padding, dilation, 1, False)
    size, line, tap, channel, _ = weight.strides
    pointer = f"{k.read(weight).pointer} + bj * {k.size(size)}"
    factors = _Factors(pointer, (line, tap, channel), size, weight.shape[0], weight.numel * 4)
    sources = [k.read(tensor) for tensor in (source, beside) if tensor is not None]
    _Dense.of(k, tile, channels, sources, factors, window, _storing(k, bias), out.shape[2:]).write()


@GENERIC.kernel("kagent::block_transposed_convolution", epilogue=True, accepts=_refusal)
def block_transposed_convolution(
    k: KernelBuilder, source: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, channels: int
) -> None:
    """Write a transposed convolution whose stride is its window: a product for each tap.

    Raises
    ------
    ValueError
        When the language has no register tiles, or none as wide as a block.
    """
    tiles, (high, wide) = k.language.register_tiles, weight.shape[:2]
    tile = None if tiles is None else tile_of_width(tiles, source.shape[3], channels, weight.shape[4])
    if tile is None:
        raise ValueError(f"the language has no register tiles of {weight.shape[4]} numbers")
    blocks, size = weight.shape[2], weight.strides[2]
    pointer = f"{k.read(weight).pointer} + (tap * {k.size(blocks)} + bj) * {k.size(size)}"
    factors = _Factors(pointer, (0, 0, weight.strides[3]), size, high * wide * blocks, weight.numel * 4)
    store, window = _storing(k, bias), Window.of((1, 1), (1, 1), (0, 0), (1, 1), 1, False)

    def store_tap(place: Sequence[str], channel: str, value: str) -> None:
        image, line, column = place
        store([image, f"({line} * {high} + tap / {wide})", f"({column} * {wide} + tap % {wide})"], channel, value)

    _Dense.of(k, tile, channels, [k.read(source)], factors, window, store_tap, source.shape[2:], high * wide).write()


def _storing(k: KernelBuilder, bias: TensorSpec | None) -> Store:
    def store(place: Sequence[str], channel: str, value: str) -> None:
        if bias is not None:
            value = f"{value} + {k.read(bias).at(channel)}"
        k.store([place[0], channel, *place[1:]], value)

    return store


def write_dense(
    k: KernelBuilder,
    tiles: RegisterTiles,
    out: TensorSpec,
    source: Tensor,
    weight: Tensor,
    window: Window,
    store: Store,
) -> None:
    """Write a convolution of one group whose weight has neighbouring channels of what is made innermost."""
    tile = choose_tile(tiles, out.shape[3], out.shape[1])
    _, tap, line_step, tap_step = weight.spec.strides
    factors = _Factors(f"{weight.pointer} + j", (line_step, tap_step, tap), 0, 1, weight.spec.numel * 4)
    _Dense.of(k, tile, out.shape[1], [source], factors, window, store, out.shape[2:]).write()


@dataclass(frozen=True)
class _Factors:
    """A weight.

    Attributes
    ----------
    pointer
        To the first number of a block of channels.
    steps
        How far lines of the window, taps, and channels that are read are apart.
    size
        Of a block, if they lie one after the other; else 0.
    blocks
        How many there are.
    nbytes
        Of all.
    """

    pointer: str
    steps: tuple[int, int, int]
    size: int
    blocks: int
    nbytes: int


@dataclass(frozen=True)
class _Dense:
    """A convolution.

    Attributes
    ----------
    channels
        That are made.
    sources
        What is read: the channels of one tensor follow those of the one before.
    line, upright
        How the window goes along lines, and from line to line.
    taps
        How many products there are of each place, which are stored apart; 0 for one, which is not transposed.
    """

    k: KernelBuilder
    tile: Tile
    channels: int
    sources: Sequence[Tensor]
    factors: _Factors
    store: Store
    line: Line
    upright: Line
    taps: int

    @staticmethod
    def of(
        k: KernelBuilder,
        tile: Tile,
        channels: int,
        sources: Sequence[Tensor],
        factors: _Factors,
        window: Window,
        store: Store,
        places: Sequence[int],
        taps: int = 0,
    ) -> _Dense:
        """Return it, with so many lines and places."""
        geometry = (window.size, window.stride, window.padding, window.dilation)
        upright, line = (Line(*along) for along in zip(places, sources[0].spec.shape[2:], *geometry, strict=True))
        return _Dense(k, tile, channels, sources, factors, store, line, upright, taps)

    def write(self) -> None:
        """Write the loops over blocks of lines, and of channels, and over the tiles of a line."""
        k, tile, lines = self.k, self.tile, self.upright.length
        tall, blocks = self._lines_at_once, -(-self.channels // tile.width)
        steps = self.line.taps * self.upright.taps * self._read * tile.width * self.line.length * tall // 16
        axes = [("n", self.sources[0].spec.shape[0]), ("block", -(-lines // tall))]
        axes += [*([("tap", self.taps)] if self.taps else []), ("bj", blocks)]
        image = nullcontext() if self.taps else place_sums.image(k, tile)
        with image, k.items(*axes, steps=steps):
            first_column(k, tile, self.channels)
            k.add(f"const {k.index_type} line = block * {k.size(tall)};")
            if self._fetched:
                number = f"tap * {k.size(blocks)} + bj" if self.taps else "bj"
                k.add(f"const f32 *ahead = {self.factors.pointer};")
                k.add(f"if ({number} + 1 < {k.size(self.factors.blocks)}) {{ ahead += {k.size(self.factors.size)}; }}")
            with k.loop("o0", k.least(k.size(lines), f"line + {k.size(tall)}"), "line"):
                self._clip_lines()
                with place_sums.line(k, tile), k.loop("i", k.size(self.line.length), step=tile.rows):
                    self._tile()

    @property
    def _lines_at_once(self) -> int:
        """How many lines are computed before the next channels are: a few, or all, whatever reads less again.

        All stretches of lines are about as long: threads share them out as if they were.
        """
        line, upright = self.line, self.upright
        seen = line.length * min(line.stride, line.taps) * min(upright.stride, upright.taps)
        nbytes = max(1, self._read * seen * 4)
        blocks = -(-self.channels // self.tile.width)
        few = max(1, min(_NEAR // nbytes, upright.length))
        if self.factors.nbytes <= _NEAR:  # it stays in the caches, too
            pieces = self.sources[0].spec.shape[0] * blocks
            return evenly(upright.length, min(few, -(-upright.length * pieces // _PIECES)))
        weight_again = self.factors.nbytes * (-(-upright.length // few) - 1)
        source_again = nbytes * upright.length * (blocks - 1)
        return evenly(upright.length, few) if weight_again <= source_again else upright.length

    @property
    def _read(self) -> int:
        """Channels that are read."""
        return sum(source.spec.shape[1] for source in self.sources)

    @property
    def _fetched(self) -> int:
        """How many numbers of the next block are fetched with each number that a tile reads: a power of 2, or 0."""
        if not self.factors.size or self.factors.nbytes < _FAR:
            return 0
        blocks = -(-self.upright.length // self._lines_at_once)
        taps = self.line.whole(self.tile.rows) * self.upright.whole(1)
        least = self.factors.size * blocks // max(1, taps * self._read)
        return min(1 << least.bit_length(), 16)

    def _tile(self) -> None:
        k, tile, line = self.k, self.tile, self.line
        last = f"{k.size(line.length)} - {tile.rows}"
        k.add(f"const {k.index_type} at = {k.least('i', last) if line.length % tile.rows else 'i'};")
        k.add(f"f32 made[{tile.rows * tile.width}] __attribute__((aligned(64)));")
        if line.is_whole(tile.rows):
            k.add(f"const {k.index_type} from = at * {k.size(line.stride)} - {k.size(line.padding)};")
            self._call(tile.rows, "from", "0", k.size(line.taps), "0")
        else:
            self._clip_taps()
            self._call(tile.rows, "from", "whole", "whole_count", "0")
            self._add_partial(line.partial(tile.rows))
        store_places(k, tile, self.channels, self.store)

    def _clip_lines(self) -> None:
        """Declare which lines of the window are inside."""
        k, upright, kind = self.k, self.upright, self.k.index_type
        by = k.size(upright.dilation)
        k.fits(upright.size + 2 * upright.padding + upright.dilation)
        k.add(f"const {kind} above = o0 * {k.size(upright.stride)} - {k.size(upright.padding)};")
        k.add(f"const {kind} top = above < 0 ? (-above + {by} - 1) / {by} : 0;")
        k.add(f"const {kind} below = ({k.size(upright.size)} - above + {by} - 1) / {by};")
        k.add(f"const {kind} high = {k.least('below', k.size(upright.taps))} - top;")

    def _clip_taps(self) -> None:
        """Declare which taps see the source at all places of a tile."""
        k, line, kind = self.k, self.line, self.k.index_type
        by, taps = k.size(line.dilation), k.size(line.taps)
        k.fits(line.size + 2 * line.padding + line.dilation)
        k.add(f"const {kind} from = at * {k.size(line.stride)} - {k.size(line.padding)};")
        k.add(f"const {kind} whole = from < 0 ? (-from + {by} - 1) / {by} : 0;")
        room = f"({k.size(line.size)} - from - {self.tile.rows - 1} * {k.size(line.stride)} + {by} - 1)"
        k.add(f"const {kind} past = {room} < 0 ? 0 : {room} / {by};")
        k.add(f"const {kind} whole_end = {k.least('past', taps)};")
        k.add(f"const {kind} whole_count = whole_end > whole ? whole_end - whole : 0;")

    def _add_partial(self, counts: Sequence[int]) -> None:
        """Write what adds the taps that see the source at some places of a tile only."""
        k, line, kind = self.k, self.line, self.k.index_type
        if not counts:
            return
        step = k.size(line.stride)
        with k.loop("t", k.size(line.taps)):
            k.add("if (t >= whole && t < whole + whole_count) { t = whole + whole_count - 1; continue; }")
            k.add(f"const {kind} column = from + t * {k.size(line.dilation)};")
            k.add(f"const {kind} first = column < 0 ? (-column + {step} - 1) / {step} : 0;")
            room = f"({k.size(line.size)} - column + {step} - 1) / {step}"
            k.add(f"const {kind} count = {k.least(room, str(self.tile.rows))} - first;")
            for count in counts:
                with k.block(f"if (count == {count})"):
                    made = f"made + first * {self.tile.width}"
                    self._call(count, f"column + first * {step}", "t", "1", "1", made)

    def _call(self, rows: int, column: str, tap: str, taps: str, more: str, made: str = "made") -> None:
        """Write the calls of what adds up taps of a line, at some places, of each tensor that is read.

        Parameters
        ----------
        rows
            Places.
        column
            Where in the source the first place has tap 0 if all taps are added up, or the one tap that is.
        tap, taps
            The first tap, and how many.
        more
            Whether they are added to what there is.
        made
            Where the sums are.
        """
        k, one, fetched = self.k, more == "1", 0 if more == "1" else self._fetched
        w = [k.size(step) for step in self.factors.steps]
        by_line, by_tap, step = k.size(self.upright.dilation), k.size(self.line.dilation), k.size(self.line.stride)
        moved = column if one or tap == "0" else f"{column} + {tap} * {by_tap}"
        before = 0
        for source in self.sources:
            x, channels = [k.size(stride) for stride in source.spec.strides], k.size(source.spec.shape[1])
            place = f"{source.pointer} + n * {x[0]} + (above + top * {by_line}) * {x[2]} + ({moved}) * {x[3]}"
            weight = f"{self.factors.pointer} + top * {w[0]} + {tap} * {w[1]}"
            weight += f" + {k.size(before)} * {w[2]}" if before else ""
            if self._taps_are_neighbours(source):
                along = ["1", "0", f"{taps} * {channels}", weight, w[0], "0", w[2]]
            else:
                along = [taps, f"{by_tap} * {x[3]}", channels, weight, w[0], w[1], w[2]]
            passed = [place, f"{step} * {x[3]}", "high", f"{by_line} * {x[2]}", *along, made]
            passed += ["1" if before else more, "&ahead" if fetched else "0"]
            known = self._known_step(source)
            k.add(f"{self.tile.function('sums', rows)}_{known}_{fetched}({', '.join(passed)});")
            before += source.spec.shape[1]

    def _known_step(self, source: Tensor) -> int:
        """Return how far the places of a tile are apart, if it stands in the text; 0 if not.

        It does where a tile has so many places that the processor has no register for the address of each, and so few
        vectors that it notices.
        """
        many = self.tile.rows > _ADDRESSES * self.tile.vectors
        return self.line.stride * source.spec.strides[3] if many else 0

    def _taps_are_neighbours(self, source: Tensor) -> bool:
        """Whether the channels of neighbouring taps follow each other, in what is read and in the weight."""
        spec, (_, tap, channel) = source.spec, self.factors.steps
        together = spec.strides[3] == spec.shape[1] and tap == spec.shape[1] * channel
        return together and self.line.dilation == 1


def evenly(length: int, most: int) -> int:
    """Return how long the fewest stretches of a length are, if they are about equal and none is longer than that."""
    return -(-length // -(-length // most))
