"""Sampling at the places that a grid holds (``grid_sample``)."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.dtypes import FLOATS
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.places import At, all_of, gathering
from kagent_core.codegen.rules.resampling import cubic_weights, whole_type
from kagent_core.specs import OpCall

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


def _refusal(call: OpCall) -> str | None:
    arguments = full_arguments(call)
    if any(spec.dtype.name not in FLOATS for spec in call.inputs):
        return "elements that are no floats"
    if arguments["input"].numel == 0:
        return "nothing to read from"
    if len(arguments["input"].shape) == 5 and arguments["interpolation_mode"] == 2:
        return "cubic interpolation in three dimensions"
    return None


@gathering("aten::grid_sampler_2d", "aten::grid_sampler_3d", accepts=_refusal)
def grid_sampler(
    k: Lowering, input: Operand, grid: Operand, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> At:
    sizes = input.shape[2:]
    sampler = _Sampler(k, input, padding_mode, align_corners)

    def at(index: Indices) -> Element:
        spatial = (index[0], *index[2:])
        # the grid's last dimension begins with the place along the tensor's last one
        given = [grid.at((*spatial, len(sizes) - 1 - dim)).compute() for dim in range(len(sizes))]
        places = [sampler.unnormalized(place, size) for place, size in zip(given, sizes, strict=True)]
        if interpolation_mode == BICUBIC:
            return sampler.cubic(index[:2], places)
        places = [sampler.kept_inside(place, size) for place, size in zip(places, sizes, strict=True)]
        if interpolation_mode == NEAREST:
            return sampler.read(index[:2], [place.op("rint") for place in places])
        return sampler.linear(index[:2], places)

    return at


def _clipped(place: Element, size: int) -> Element:
    """Return the nearest place in a dimension, 0 for NaN."""
    place = place.op("gt", 0).where(place, 0)
    return (place < size - 1).where(place, size - 1)


class _Sampler:
    """Reads a tensor at places between its elements."""

    def __init__(self, k: Lowering, tensor: Operand, padding_mode: int, align_corners: bool) -> None:
        self._k = k
        self._tensor = tensor
        self._padding_mode = padding_mode
        self._align_corners = align_corners

    def unnormalized(self, place: Element, size: int) -> Element:
        """Return a place from -1 to 1 as one in elements."""
        return (place + 1) * ((size - 1) / 2) if self._align_corners else (place + 1) * (size / 2) - 0.5

    def kept_inside(self, place: Element, size: int) -> Element:
        """Return a place as the padding mode moves it."""
        if self._padding_mode == REFLECTION:
            place = self._reflected(place, size)
        return place if self._padding_mode == ZEROS else _clipped(place, size)

    def _reflected(self, place: Element, size: int) -> Element:
        low, span = (0.0, size - 1.0) if self._align_corners else (-0.5, float(size))
        if span == 0:
            return place * 0
        distance = (place - low).op("abs")
        turns = (distance / span).op("floor")
        rest = distance - turns * span
        is_even = (turns - (turns * 0.5).op("floor") * 2).equals(0)
        return is_even.where(rest + low, (span - rest) + low)

    def read(self, batch: Sequence[Index], places: Sequence[Element]) -> Element:
        """Return the element at whole places, 0 outside of the tensor."""
        k = self._k
        sizes = self._tensor.shape[2:]
        inside = all_of(k, [(place.op("ge", 0)) & (place < size) for place, size in zip(places, sizes, strict=True)])
        # also where nothing is read, an address is one of the tensor's
        near = [_clipped(place, size).to(whole_type(size)) for place, size in zip(places, sizes, strict=True)]
        index = (*batch, *(k.place(place, size) for place, size in zip(near, sizes, strict=True)))
        return k.masked(inside, lambda: self._tensor.at(index).compute(), 0)

    def linear(self, batch: Sequence[Index], places: Sequence[Element]) -> Element:
        """Return the sum over the corners around some places."""
        return self._summed(batch, [self._corners(place) for place in places])

    def cubic(self, batch: Sequence[Index], places: Sequence[Element]) -> Element:
        """Return the sum over four elements around some places along each dimension."""
        taps = []
        for place, size in zip(places, self._tensor.shape[2:], strict=True):
            below = place.op("floor")
            moved = [self.kept_inside(below + shift, size) for shift in (-1, 0, 1, 2)]
            taps.append(list(zip(moved, cubic_weights(place - below), strict=True)))
        return self._summed(batch, taps)

    @staticmethod
    def _corners(place: Element) -> list[tuple[Element, Element]]:
        below = place.op("floor")
        return [(below, (below + 1) - place), (below + 1, place - below)]

    def _summed(self, batch: Sequence[Index], taps: Sequence[Sequence[tuple[Element, Element]]]) -> Element:
        def along(number: int, places: tuple[Element, ...]) -> Element:
            if number == len(taps):
                return self.read(batch, places)
            first, *rest = (along(number + 1, (*places, place)) * weight for place, weight in taps[number])
            return sum(rest, first)

        return along(0, ())
