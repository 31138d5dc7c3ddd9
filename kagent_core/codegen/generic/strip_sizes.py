"""How large the pieces are that a kernel of several convolutions takes at a time: lines, channels, places."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kagent_core.codegen.generic.dense_convolution import evenly
from kagent_core.codegen.generic.direct_lines import tile_of_lines
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.scaled_rows import MOST_BYTES
from kagent_core.codegen.register_lines import LineTile, pairs_of_rows
from kagent_core.codegen.register_tiles import RegisterTiles, Tile
from kagent_core.codegen.table import NotLoweredError
from kagent_core.specs import TensorSpec

NEAR = 256 * 1024
"""Bytes of a strip with the lines that it is made of: a quarter of a core's second cache. Half of it took the same."""

_FOR_EACH = 4
"""Stretches of lines for each thread, where threads have not as many: more would make more lines twice."""

MOST_TWICE = 0.15
"""Lines that may be made twice, as a part of all; beyond, one convolution after the other takes less time."""

NEAREST = 64 * 1024
"""Bytes of a strip that is made of lines in memory."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a strip.

    Attributes
    ----------
    registers
        The CPU's.
    threads
        That share out the lines.
    source, made, window
        Of the depthwise convolution.
    is_made
        Whether a convolution makes what it reads.
    channels
        That the last convolution makes of what it makes; 0 where there is none.
    """

    registers: RegisterTiles
    threads: int
    source: TensorSpec
    made: TensorSpec
    window: Window
    is_made: bool
    channels: int

    def check(self) -> None:
        """Raise a `NotLoweredError` where there can be no strips of this kind, or threads would not gain by them."""
        if self.wide_tile.lanes != self.line_tile.lanes:
            raise NotLoweredError(f"{self.source} has fewer channels than a vector")
        if self._made_twice > MOST_TWICE:
            raise NotLoweredError(f"{self.threads} threads would make too many lines of {self.source} twice")

    @functools.cached_property
    def line_tile(self) -> LineTile:
        """The tile of the depthwise convolution."""
        tile = tile_of_lines(self.registers, self.made, self.source, self.window)
        if tile is None:
            raise NotLoweredError(f"there are no tiles of registers for a depthwise convolution of {self.source}")
        return tile

    @functools.cached_property
    def wide_tile(self) -> Tile:
        """The tile of the first convolution: so many channels go through it and the depthwise one at a time."""
        if not self.is_made:
            return Tile(1, 1, self.line_tile.lanes)
        return self.registers.choose("rows", self.source.shape[3], self.source.shape[1])

    @functools.cached_property
    def tall(self) -> int:
        """Lines of a strip."""
        return evenly(self.stretch, min(self._most, self.stretch))

    @property
    def blocks(self) -> int:
        """How many times some channels go through the first convolution and the depthwise one."""
        return -(-self.source.shape[1] // self.wide_tile.width)

    @property
    def reach(self) -> int:
        """Lines that a line of the depthwise convolution reaches over."""
        return (self.window.size[0] - 1) * self.window.dilation[0] + 1

    @property
    def lines(self) -> int:
        """Lines that a strip is made of."""
        return (self.tall - 1) * self.window.stride[0] + self.reach

    @property
    def block(self) -> int:
        """Numbers of some channels of all lines that a strip is made of."""
        return self.lines * self.source.shape[3] * self.wide_tile.width

    @property
    def pitch(self) -> int:
        """How far places are apart in what the depthwise convolution makes of a strip."""
        lanes, channels = self.line_tile.lanes, self.made.shape[1]
        return channels + (lanes if channels % (8 * lanes) == 0 else 0)  # else they would share few sets of a cache

    @property
    def _most(self) -> int:
        """Lines of a strip that fit into the caches, with the lines that they are made of; at least 1."""
        length, stride = self.source.shape[3], self.window.stride[0]
        made = 4 * self.made.shape[3] * self.pitch if self.channels else 0
        if not self.is_made:
            return max(1, NEAREST // made)
        line = 4 * self.blocks * self.wide_tile.width * length
        return max(1, (NEAR - line * (self.reach - stride)) // (line * stride + made))

    @property
    def stretch(self) -> int:
        """Lines of a work-item: all of an image, unless there are more threads than images."""
        count, _, lines, _ = self.made.shape
        threads = self.threads
        many = min(lines, -(-_FOR_EACH * threads // count))
        return evenly(lines, -(-lines // next((n for n in range(1, many) if count * n % threads == 0), many)))

    @property
    def _made_twice(self) -> float:
        """Lines that are made again for the next stretch, as a part of those that are made once."""
        stride, single = self.window.stride[0], self.stretch == self.made.shape[2]
        return 0 if not self.is_made or single else max(0, self.reach - stride) / (self.stretch * stride)

    @property
    def pairs(self) -> tuple[int, int] | None:
        """Pairs of places of a tile of the last convolution, and its vectors; None where places do not lie in pairs."""
        depth, length = self.made.shape[1], self.made.shape[3]
        if not self.channels or self.line_tile.places % 2 or 8 * depth * self.channels > MOST_BYTES:
            return None
        return pairs_of_rows(self.registers.lanes, self.registers.registers, length, self.channels)
