"""Upsampling: elements between elements."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from kagent_core.codegen.dtypes import FLOATS, compute_dtype
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.places import At, gathering
from kagent_core.specs import OpCall

Tap = tuple[Index, Element]
"""An index into one dimension, and the weight of what is there."""

_SCALES = ("scales", "scales_d", "scales_h", "scales_w")


def _not_float(call: OpCall) -> str | None:
    dtype = call.inputs[0].dtype.name
    return None if dtype in FLOATS else f"elements of {dtype}"


def _sizes(given: dict[str, Any], shape: Sequence[int]) -> tuple[tuple[int, ...], list[float | None]]:
    """Return the spatial sizes of a result and the scales that its caller gave."""
    if "scale_factors" in given:
        factors = given["scale_factors"]
        if factors is None:
            return tuple(given["output_size"]), [None] * (len(shape) - 2)
        return tuple(int(size * factor) for size, factor in zip(shape[2:], factors, strict=True)), list(factors)
    return tuple(given["output_size"]), [given[name] for name in _SCALES if name in given]


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _step(size: int, result: int, scale: float | None) -> float:
    """Return how far apart the sources of neighbouring elements are (ATen's ``compute_scales_value``)."""
    return 1.0 / scale if scale is not None and scale > 0 else size / result


# -- nearest


@gathering(*(f"aten::upsample_nearest{n}d{form}" for n in (1, 2, 3) for form in ("", ".vec")), accepts=_not_float)
def upsample_nearest(k: Lowering, **given: Any) -> At:
    return _nearest(k, given, 0.0)


@gathering(
    *(f"aten::_upsample_nearest_exact{n}d{form}" for n in (1, 2, 3) for form in ("", ".vec")), accepts=_not_float
)
def upsample_nearest_exact(k: Lowering, **given: Any) -> At:
    return _nearest(k, given, 0.5)


def _nearest(k: Lowering, given: dict[str, Any], middle: float) -> At:
    self: Operand = given["self"] if "self" in given else given["input"]
    results, scales = _sizes(given, self.shape)

    def at(index: Indices) -> Element:
        spatial = zip(index[2:], self.shape[2:], results, scales, strict=True)
        return self.at((*index[:2], *(_nearest_place(k, *each, middle) for each in spatial)))

    return at


def _nearest_place(k: Lowering, index: Index, size: int, result: int, scale: float | None, middle: float) -> Index:
    step = _float32(_step(size, result, scale))
    if result % size == 0:
        factor = result // size
        sources = (int(_float32((place + middle) * step)) for place in range(result))
        if all(min(source, size - 1) == place // factor for place, source in enumerate(sources)):
            return index // factor
    place = (k.index_value(index, "float32") + middle) * step
    return k.place(place.to(whole_type(size)).op("min", size - 1), size)


# -- linear and cubic


@gathering(
    *("aten::upsample_linear1d", "aten::upsample_linear1d.vec", "aten::upsample_bilinear2d"),
    *("aten::upsample_bilinear2d.vec", "aten::upsample_trilinear3d", "aten::upsample_trilinear3d.vec"),
    accepts=_not_float,
)
def upsample_linear(k: Lowering, **given: Any) -> At:
    return _upsampled(k, given, _linear_taps)


@gathering("aten::upsample_bicubic2d", "aten::upsample_bicubic2d.vec", accepts=_not_float)
def upsample_bicubic2d(k: Lowering, **given: Any) -> At:
    return _upsampled(k, given, _cubic_taps)


def _upsampled(k: Lowering, given: dict[str, Any], taps_at: Callable[..., list[Tap]]) -> At:
    self: Operand = given["self"] if "self" in given else given["input"]
    results, scales = _sizes(given, self.shape)
    dtype, aligned = compute_dtype(self.dtype), given["align_corners"]

    def at(index: Indices) -> Element:
        taps = [
            taps_at(k, part, size, result, _source_step(size, result, scale, aligned), aligned, dtype)
            for part, size, result, scale in zip(index[2:], self.shape[2:], results, scales, strict=True)
        ]
        return weighted(lambda places: self.at((*index[:2], *places)).compute(), taps)

    return at


def _source_step(size: int, result: int, scale: float | None, aligned: bool) -> float:
    if aligned:
        return (size - 1) / (result - 1) if result > 1 else 0.0
    return _step(size, result, scale)


def _source(k: Lowering, index: Index, step: float, aligned: bool, dtype: str) -> Element:
    """Return where an element comes from (ATen's ``area_pixel_compute_source_index``)."""
    place = k.index_value(index, dtype)
    return place * step if aligned else (place + 0.5) * step - 0.5


def _linear_taps(
    k: Lowering, index: Index, size: int, result: int, step: float, aligned: bool, dtype: str
) -> list[Tap]:
    if result == size:  # as ATen: infinities times zero are NaN
        return [(index, k.constant(1, dtype)), (index, k.constant(0, dtype))]
    source = _source(k, index, step, aligned, dtype)
    source = source.op("gt", 0).where(source, 0)
    first, part = _below(source, source.to(whole_type(size)), size)
    second = first + (first < size - 1).to(first.dtype)
    return [(k.place(first, size), 1 - part), (k.place(second, size), part)]


def whole_type(size: int) -> str:
    """Return a type for places in a dimension: the smaller one converts faster."""
    return "int32" if size < 2**28 else "int64"


def _below(source: Element, place: Element, size: int) -> tuple[Element, Element]:
    """Return the whole number below a source that is in the tensor, and how far the source is from it."""
    place = place.op("min", size - 1)
    part = source - place.to(source.dtype)
    return place, (part < 1).where(part, 1)


def _cubic_taps(k: Lowering, index: Index, size: int, result: int, step: float, aligned: bool, dtype: str) -> list[Tap]:
    source = _source(k, index, step, aligned, dtype)
    first, part = _below(source, source.op("floor").to(whole_type(size)), size)
    places = [(first + shift).op("max", 0).op("min", size - 1) for shift in (-1, 0, 1, 2)]
    return [(k.place(at, size), weight) for at, weight in zip(places, cubic_weights(part), strict=True)]


def cubic_weights(part: Element) -> list[Element]:
    """Return the weights of the four elements around a place (Keys' cubic convolution with a = -0.75)."""
    a = -0.75

    def near(x: Element) -> Element:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Element) -> Element:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(part + 1), near(part), near(1 - part), far((1 - part) + 1)]


def weighted(read: Callable[[tuple[Index, ...]], Element], taps: Sequence[list[Tap]]) -> Element:
    """Return the sum of elements times their weights, the last dimension's sums innermost."""

    def along(number: int, places: tuple[Index, ...]) -> Element:
        if number == len(taps):
            return read(places)
        total: Element | None = None
        for place, weight in taps[number]:
            part = along(number + 1, (*places, place)) * weight
            total = part if total is None else total + part
        if total is None:
            raise ValueError("a sum of nothing")
        return total

    return along(0, ())
