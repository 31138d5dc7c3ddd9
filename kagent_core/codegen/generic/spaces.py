"""Loops over places that have several dimensions: rows, columns and depth of a product."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kagent_core.codegen.generic.builder import KernelBuilder


@dataclass(frozen=True)
class Segment:
    """Neighbours along a space's last dimension, between two places of it: at most `extent` of them."""

    k: KernelBuilder
    flat: str
    first: str
    start: str
    length: str
    coordinates: tuple[str, ...]
    along: int | None
    extent: int

    @contextmanager
    def steps(self) -> Iterator[Sequence[str]]:
        """Write the loop over them, whose steps are independent, and give their coordinates."""
        k, names = self.k, list(self.coordinates)
        if self.along is None or self.coordinates[self.along] == self.flat:
            with k.loop(self.flat, self.length, self.first, simd=True):
                yield names
            return
        step, names[self.along] = k.name("u"), k.name("c")
        with k.loop(step, self.length, simd=True):
            here = self.coordinates[self.along]
            k.add(f"const {k.index_type} {self.flat} = {self.start} + {step}, {names[self.along]} = {here} + {step};")
            yield names

    def vectors(self, width: int, write: Callable[[Sequence[str]], None]) -> None:
        """Write loops over them in vectors of a width, and over those that are left one by one.

        Parameters
        ----------
        width
            Elements of a vector.
        write
            Writes the steps, in lanes or not, given their coordinates.

        Raises
        ------
        NoLanesError
            When they cannot be written in vectors.
        """
        k, names = self.k, list(self.coordinates)
        plain = self.along is None or self.coordinates[self.along] == self.flat
        step, first = (self.flat, self.first) if plain else (k.name("u"), "0")
        if not plain and self.along is not None:
            here, names[self.along] = names[self.along], k.name("c")
        place = f"const {k.index_type} {self.flat} = {self.start} + {step}"
        head = f"{k.index_type} {step} = {first}"
        with k.block(f"for ({head}; {step} + {width} <= {self.length}; {step} += {width})"):
            if not plain:
                k.add(f"{place}, {names[self.along or 0]} = {here} + {step};")
            with k.lanes(step, self.flat, *({names[self.along]} if self.along is not None else ())):
                write(names)
        begin = (
            f"{self.length} / {width} * {width}"
            if first == "0"
            else f"{self.length} - ({self.length} - {first}) % {width}"
        )
        with k.loop(step, self.length, begin):
            if not plain:
                k.add(f"{place}, {names[self.along or 0]} = {here} + {step};")
            write(names)


@dataclass(frozen=True)
class Space:
    """Places that are counted by one number, the last dimension fastest.

    Attributes
    ----------
    sizes
        Of its dimensions.
    literal
        Dimensions whose sizes stand in the text: those of a convolution's window, which divide quickly.
    """

    sizes: tuple[int, ...]
    literal: Collection[int] = ()

    @property
    def extent(self) -> int:
        """How many places there are."""
        return math.prod(self.sizes)

    def coordinates(self, k: KernelBuilder, flat: str) -> list[str]:
        """Declare the coordinates of one place, and return their names."""
        names, rest = ["0"] * len(self.sizes), flat
        wide = self._wide
        for n in reversed(wide):
            if n == wide[0]:
                names[n] = rest
                break
            names[n], above = k.name("c"), k.name("r")
            size = str(self.sizes[n]) if n in self.literal else k.size(self.sizes[n])
            k.add(f"const {k.index_type} {names[n]} = {rest} % {size}, {above} = {rest} / {size};")
            rest = above
        return names

    @contextmanager
    def segments(self, k: KernelBuilder, flat: str, first: str, end: str) -> Iterator[Segment]:
        """Write a loop over the segments from one place to the one before another.

        Parameters
        ----------
        k
            Where to.
        flat
            Name of the number that counts the places, in the steps of a segment.
        first, end
            The places.
        """
        wide = self._wide
        if len(wide) <= 1:
            names = tuple(flat if n in wide else "0" for n in range(len(self.sizes)))
            yield Segment(k, flat, first, first, end, names, wide[0] if wide else None, self.extent)
            return
        start, length, last = k.name("s"), k.name("l"), wide[-1]
        with k.block(f"for ({k.index_type} {start} = {first}, {length}; {start} < {end}; {start} += {length})"):
            names = tuple(self.coordinates(k, start))
            left = f"({k.size(self.sizes[last])} - {names[last]})"
            k.add(f"{length} = {k.least(left, f'({end} - {start})')};")
            yield Segment(k, flat, "0", start, length, names, last, self.sizes[last])

    @property
    def _wide(self) -> list[int]:
        return [n for n, size in enumerate(self.sizes) if size != 1]
