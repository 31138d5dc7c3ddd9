"""Kernels of convolutions that follow each other, some lines of all of them at a time.

What a depthwise convolution reads is made for a strip of its lines, some channels at a time, which it goes over while
they are in the nearest caches. Lines that the next strip reads, too, are kept. What it makes of a strip stays in memory
of the kernel's own, until the last convolution has read it. Threads have stretches of lines each; at the seams, lines
are made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.generic import place_sums
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.direct_convolution import has_neighbours, takes_direct
from kagent_core.codegen.generic.direct_lines import Lines, call_line, clip
from kagent_core.codegen.generic.direct_planes import call_planes, takes_planes
from kagent_core.codegen.generic.epilogue import Epilogue
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.register_rows import Columns, call_rows, choose_tile, first_column, store_places
from kagent_core.codegen.generic.strip_sizes import Sizes
from kagent_core.codegen.generic.strips import Stage, is_depthwise, mixes_channels, stages_of
from kagent_core.codegen.generic.table import Wanted
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.register_tiles import RegisterTiles, Tile
from kagent_core.codegen.table import NotLoweredError
from kagent_core.specs import OpCall, TensorSpec


class Strips:
    """Writes kernels of several convolutions; see `kagent_core.codegen.generic.table.SeveralCalls`."""

    def refusal(self, calls: Sequence[OpCall], is_pointwise: Callable[[OpCall], bool]) -> str | None:
        """Return why there is none, as far as the calls tell; None when there is one."""
        stages = stages_of(calls)
        if isinstance(stages, str):
            return stages
        for stage in stages:
            for call in stage.rest:
                if not is_pointwise(call) or call.outputs[0].shape != stage.call.outputs[0].shape:
                    return f"{call.name} does not compute one element from each of {stage.call.name}"
        return None

    def source(self, name: str, calls: Sequence[OpCall], wanted: Wanted) -> KernelSource:
        """Return the kernel.

        Raises
        ------
        NotLoweredError
            When there is none.
        """
        stages = stages_of(calls)
        if isinstance(stages, str):
            raise NotLoweredError(stages)
        *inner, last = stages
        results = [*last.call.outputs, *(spec for call in last.rest for spec in call.outputs)]
        if wanted.summed is not None:
            if wanted.summed.arguments["self"] not in results:
                raise NotLoweredError(f"{wanted.summed.name} does not add up what {last.call.name} makes")
            results += wanted.summed.outputs
        if not {spec.buffer for spec in results}.issuperset(wanted.stored):
            raise NotLoweredError(f"what {inner[0].call.name} makes is also read by others")
        how = (wanted.rules, wanted.round_halves, wanted.language.wide)
        epilogues = [Epilogue(s.call, s.rest, (), *how, s.made) if s.rest else None for s in inner]
        read = {spec for stage in stages for spec in stage.call.inputs}.union(*(e.read for e in epilogues if e))
        given = (wanted.stored, wanted.language, wanted.rules, wanted.round_halves, wanted.tiles, wanted.summed)
        k = KernelBuilder(last.call, last.rest, *given, tuple(read))
        parts = [
            _Part.of(k, stage, epilogue, stage is stages[0])
            for stage, epilogue in zip(stages, [*epilogues, None], strict=True)
        ]
        _Lines.of(k, parts).write()
        return k.source(name)


@dataclass(frozen=True)
class _Part:
    """A convolution.

    Attributes
    ----------
    source, made
        What it reads and makes.
    weight, bias
        What it multiplies and adds.
    window
        How it goes over what it reads.
    epilogue
        What follows, where the result is no tensor in memory.
    mixes
        Whether it is of all channels with all channels, and of one place; or of a few planes, which are `planes` then.
    """

    k: KernelBuilder
    source: TensorSpec
    made: TensorSpec
    weight: Tensor
    bias: Tensor | None
    window: Window
    epilogue: Epilogue | None
    mixes: bool
    planes: Tensor | None

    @staticmethod
    def of(k: KernelBuilder, stage: Stage, epilogue: Epilogue | None, is_first: bool) -> _Part:
        arguments = full_arguments(stage.call)
        source, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
        geometry = (arguments[name] for name in ("stride", "padding", "dilation", "groups"))
        window, out = Window.of(weight.shape[2:], *geometry), stage.call.outputs[0]
        if not takes_direct(source, weight, out, window) or (bias is not None and bias.dtype.name != "float32"):
            raise NotLoweredError(f"{stage.call.name} has tensors that lie otherwise than a strip's")
        mixes, planes = mixes_channels(stage.call) and has_neighbours(source, 1), None
        if not mixes and not is_depthwise(stage.call):
            if not is_first or not takes_planes(source, out, window):
                raise NotLoweredError(f"{stage.call.name} reads no planes")
            planes = k.read(source)
        added = k.read(bias) if bias else None
        return _Part(k, source, out, k.read(weight), added, window, epilogue, mixes, planes)

    def value(self, value: str, channel: str) -> str:
        """Return a sum with the bias."""
        return value if self.bias is None else f"{value} + {self.bias.at(channel)}"

    def keep(self, index: Sequence[str], value: str, place: str) -> None:
        """Write what follows, and what keeps it in memory of the kernel's own."""
        found = self.value(value, index[1])
        if self.epilogue is not None:
            found = self.k.following(self.epilogue, index, found)
        self.k.add(f"{place} = {found};")

    def store(self, place: Sequence[str], channel: str, value: str) -> None:
        """Write what stores an element of the last convolution."""
        self.k.store([place[0], channel, *place[1:]], self.value(value, channel))


@dataclass(frozen=True)
class _Lines:
    """All strips.

    Attributes
    ----------
    wide, deep, narrow
        The convolutions: that makes the channels, depthwise, and the one behind that.
    tiles
        Of registers.
    sizes
        Of the strips.
    """

    k: KernelBuilder
    wide: _Part | None
    deep: _Part
    narrow: _Part | None
    tiles: RegisterTiles
    sizes: Sizes

    @staticmethod
    def of(k: KernelBuilder, parts: Sequence[_Part]) -> _Lines:
        """Return them.

        Raises
        ------
        NotLoweredError
            When there can be none, or they do not pay.
        """
        wide, *rest = parts if parts[0].mixes or parts[0].planes else (None, *parts)
        deep, narrow = rest[0], rest[1] if len(rest) > 1 else None
        tiles = k.language.register_tiles
        if tiles is None or deep is None:
            raise NotLoweredError("the language has no register tiles")
        channels = 0 if narrow is None else narrow.made.shape[1]
        sizes = Sizes(tiles, k.tiles.threads, deep.source, deep.made, deep.window, wide is not None, channels)
        sizes.check()
        return _Lines(k, wide, deep, narrow, tiles, sizes)

    def write(self) -> None:
        """Write the loops over stretches of lines, and over their strips."""
        k, deep = self.k, self.deep
        count, channels, lines, length = deep.made.shape
        steps = channels * length * min(lines, self.sizes.stretch) * max(self._products, 1) // 16
        rows = Tile(self.sizes.line_tile.places, 1, self.sizes.line_tile.lanes)
        image = place_sums.image(k, rows) if self.narrow is None else nullcontext()
        with image, k.items(("n", count), ("piece", -(-lines // self.sizes.stretch)), steps=steps):
            k.add(f"const {k.index_type} o_first = piece * {k.size(self.sizes.stretch)};")
            k.add(f"const {k.index_type} o_end = {k.least(k.size(lines), f'o_first + {k.size(self.sizes.stretch)}')};")
            if self.wide is not None:
                self._memory("strip", self.sizes.blocks * self.sizes.block)
            if self.narrow is not None:
                self._memory("low", self.sizes.tall * length * self.sizes.pitch)
                if self.sizes.pairs is not None:
                    self._twice(self.narrow)
            with k.loop("ob", "o_end", "o_first", step=k.size(self.sizes.tall)):
                k.add(f"const {k.index_type} oe = {k.least('o_end', f'ob + {k.size(self.sizes.tall)}')};")
                self._channels()
                if self.narrow is not None:
                    self._last(self.narrow)

    @property
    def _products(self) -> int:
        parts = [part for part in (self.wide, self.narrow) if part is not None]
        return sum(min(part.source.shape[1], part.made.shape[1]) for part in parts)

    def _memory(self, name: str, length: int) -> None:
        self.k.claim("f32", length)
        self.k.add(f"f32 {name}[{self.k.size(length)}] __attribute__((aligned(64)));")

    def _channels(self) -> None:
        """Write the loop over channels: what is made of them, and what the depthwise convolution makes of that."""
        k, source = self.k, self.deep.source
        if self.wide is not None:
            self._declare_lines()
        with k.loop("block", self.sizes.blocks):
            k.add(f"const {k.index_type} last = {k.size(source.shape[1])} - {self.sizes.wide_tile.width};")
            k.add(f"const {k.index_type} begins = block * {self.sizes.wide_tile.width};")
            k.add(f"const {k.index_type} channel = {k.least('begins', 'last')};")
            if self.wide is not None:
                k.add(f"f32 *const lines = strip + block * {k.size(self.sizes.block)};")
                self._keep_lines()
                self._first(self.wide)
            with k.loop("v", self.sizes.wide_tile.width, step=self.sizes.line_tile.lanes), k.loop("o0", "oe", "ob"):
                self._line()

    def _declare_lines(self) -> None:
        """Declare which line the strip begins with, which ones it has from the strip before, and which are new."""
        k, window, kind = self.k, self.deep.window, self.k.index_type
        size, reach = k.size(self.deep.source.shape[2]), k.size(self.sizes.reach)
        stride, padding = k.size(window.stride[0]), k.size(window.padding[0])
        k.fits(self.deep.source.shape[2] + 2 * window.padding[0] + self.sizes.reach)
        k.add(f"const {kind} base = ob * {stride} - {padding};")
        k.add(f"const {kind} kept = base > 0 ? base : 0, before = base - {stride} + {reach};")
        k.add(f"const {kind} known = {k.least('before', size)};")
        k.add(f"const {kind} fresh = ob == o_first || known < kept ? kept : known;")
        k.add(f"const {kind} past = (oe - 1) * {stride} - {padding} + {reach};")
        k.add(f"const {kind} end = {k.least('past', size)};")

    def _keep_lines(self) -> None:
        """Write what moves lines of the strip before that this one has, too, to where it has them."""
        k, line = self.k, self.deep.source.shape[3] * self.sizes.wide_tile.width
        moved = f"(kept - base + {k.size(self.sizes.tall * self.deep.window.stride[0])}) * {k.size(line)}"
        with k.block("if (fresh > kept)"):
            target = f"lines + (kept - base) * {k.size(line)}"
            k.add(f"__builtin_memmove({target}, lines + {moved}, (fresh - kept) * {k.size(4 * line)});")

    def _first(self, part: _Part) -> None:
        """Write what makes some channels of the lines that are new."""
        k, tile, length = self.k, self.sizes.wide_tile, self.deep.source.shape[3]
        with k.loop("o0", "end", "fresh"):
            k.add(f"const {k.index_type} j = channel;")
            if part.planes is not None:
                clip(k, part.window, part.source, "line", 0, "o0")
            self._tiles_of_first(part, tile, length)

    def _tiles_of_first(self, part: _Part, tile: Tile, length: int) -> None:
        """Write what makes some channels of a line."""
        k = self.k
        columns = Columns(part.weight.pointer, part.weight.spec.strides[1], part.made.shape[1])
        with k.loop("i", k.size(length), step=tile.rows):
            k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(length)} - {tile.rows}')};")
            if part.planes is not None:
                stride, padding = k.size(part.window.stride[1]), k.size(part.window.padding[1])
                k.add(f"const {k.index_type} column = at * {stride} - {padding};")
                call_planes(k, tile, part.planes, part.weight, part.window)
            else:
                x = [k.size(stride) for stride in part.source.strides]
                source = f"{k.read(part.source).pointer} + n * {x[0]} + o0 * {x[2]} + at * {x[3]}"
                call_rows(k, tile, source, part.source.strides[3], part.source.shape[1], columns, "j")
            place = f"((o0 - base) * {k.size(length)} + at + r) * {tile.width} + e"
            with k.loop("r", tile.rows, "i - at"), k.loop("e", tile.width, simd=True):
                index = ["n", "(j + e)", "o0", "(at + r)"]
                part.keep(index, f"made[r * {tile.width} + e]", f"lines[{place}]")

    def _line(self) -> None:
        """Write what the depthwise convolution makes of a vector of channels of a line."""
        k, tile, part = self.k, self.sizes.line_tile, self.deep
        length, rows = part.made.shape[3], Tile(self.sizes.line_tile.places, 1, self.sizes.line_tile.lanes)
        k.add(f"const {k.index_type} begin = channel + v, j = begin;")
        clip(k, part.window, part.source, "line", 0, "o0")
        summed = place_sums.line(k, rows) if self.narrow is None else nullcontext()
        with summed, k.loop("i", k.size(length), step=tile.places):
            k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(length)} - {tile.places}')};")
            k.add(f"const {k.index_type} column = at * {k.size(tile.stride)} - {k.size(part.window.padding[1])};")
            call_line(k, tile, self._what_is_read(), part.weight, part.window)
            if self.narrow is None:
                store_places(k, rows, part.made.shape[1], part.store)
                return
            if self.sizes.pairs is None:
                place = f"((o0 - ob) * {k.size(length)} + at + r) * {k.size(self.sizes.pitch)} + j + e"
                with k.loop("r", rows.rows, "i - at"), k.loop("e", rows.width, simd=True):
                    part.keep(["n", "(j + e)", "o0", "(at + r)"], f"made[r * {rows.width} + e]", f"low[{place}]")
                return
            place = f"((o0 - ob) * {k.size(length)} + at + r) * {k.size(self.sizes.pitch)} + (j + e) * 2"
            with k.loop("r", rows.rows, "i - at", step=2), k.loop("e", rows.width, simd=True):
                for n in range(2):
                    index = ["n", "(j + e)", "o0", f"(at + r + {n})"]
                    part.keep(index, f"made[(r + {n}) * {rows.width} + e]", f"low[{place} + {n}]")

    def _what_is_read(self) -> Lines:
        """Return where the depthwise convolution reads: from the strip, or from memory."""
        k, source = self.k, self.deep.source
        if self.wide is not None:
            width = self.sizes.wide_tile.width
            return Lines("lines", "base", source.shape[3] * width, width, source.shape[3], "v")
        pointer = f"{k.read(source).pointer} + n * {k.size(source.strides[0])}"
        return Lines(pointer, "", source.strides[2], source.strides[3], source.shape[3], "j")

    def _twice(self, part: _Part) -> None:
        """Write what makes a weight with each of its numbers twice."""
        k, weight = self.k, part.weight
        made, depth = weight.spec.shape[:2]
        self._memory("twice", 2 * made * depth)
        with k.loop("p", k.size(depth)), k.loop("c", 2 * made, simd=True):
            k.add(f"twice[p * {2 * made} + c] = {weight.at('(c / 2)', 'p', '0', '0')};")

    def _last_in_pairs(self, part: _Part, pairs: int, vectors: int) -> None:
        """Write what the last convolution makes of the strip, whose places lie in pairs."""
        k, (_, channels, _, length) = self.k, part.made.shape
        tile = Tile(2 * pairs, 1, channels)
        with k.loop("o0", "oe", "ob"), k.loop("i", k.size(length), step=tile.rows):
            k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(length)} - {tile.rows}')};")
            k.add(f"f32 made[{tile.rows * channels}];")
            source = f"low + ((o0 - ob) * {k.size(length)} + at) * {k.size(self.sizes.pitch)}"
            passed = [source, k.size(2 * self.sizes.pitch), k.size(part.source.shape[1]), "twice", "made"]
            k.add(f"const {k.index_type} j = 0;", f"pairs_{pairs}_{vectors}({', '.join(passed)});")
            store_places(k, tile, channels, part.store)

    def _last(self, part: _Part) -> None:
        """Write what the last convolution makes of the strip."""
        if self.sizes.pairs is not None:
            self._last_in_pairs(part, *self.sizes.pairs)
            return
        k, (_, channels, _, length) = self.k, part.made.shape
        tile = choose_tile(self.tiles, length, channels)
        columns = Columns(part.weight.pointer, part.weight.spec.strides[1], channels)
        stored = tile if tile.width <= channels else Tile(tile.rows, 1, channels)  # that covers all
        with k.loop("bj", -(-channels // tile.width)):
            first_column(k, stored, channels)
            with k.loop("o0", "oe", "ob"), k.loop("i", k.size(length), step=tile.rows):
                k.add(f"const {k.index_type} at = {k.least('i', f'{k.size(length)} - {tile.rows}')};")
                source = f"low + ((o0 - ob) * {k.size(length)} + at) * {k.size(self.sizes.pitch)}"
                call_rows(k, tile, source, self.sizes.pitch, part.source.shape[1], columns, "j")
                store_places(k, stored, channels, part.store)
