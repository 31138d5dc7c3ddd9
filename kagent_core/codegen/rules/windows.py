"""Pooling over small windows, every element of which is written out, and windows as columns."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any

from kagent_core.codegen.arguments import full_arguments, pooled_dims, spread
from kagent_core.codegen.dtypes import FLOATS, INTEGERS, NBITS, UNSIGNED, compute_dtype
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index, flatten
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.places import At, all_of, between, clamped, gathering, known, padded
from kagent_core.specs import OpCall

_POOLING = re.compile(r"aten::_?(adaptive_)?(avg|max)_pool\dd(_with_indices)?$")

LARGEST_WINDOW = 32
"""Elements of a window that is written out."""


@dataclass(frozen=True)
class Window:
    """The places along one dimension that an element of the result looks at.

    Attributes
    ----------
    start
        The first one; it may lie outside.
    length
        How many can be looked at.
    step
        From one to the next.
    count
        How many are looked at, as an index; None for all that lie inside.
    size
        The dimension's.
    """

    start: Index
    length: int
    step: int
    size: int
    count: Index | None = None

    def places(self, k: Lowering) -> Iterator[tuple[Index, Element]]:
        """Yield each place, and whether it counts."""
        for number in range(self.length):
            place = self.start + number * self.step
            inside = between(k, place, 0, self.size)
            if self.count is not None:
                inside = between(k, self.count, number + 1, self.length + 1)
            yield place, inside

    def repeated(self) -> Window:
        """Return a window with places that count instead of those that do not: fit for what does not mind repetitions.

        Vectors read from any place faster than under a condition.
        """
        return _Repeated(self.start, self.length, self.step, self.size, self.count)

    def first(self, k: Lowering) -> Element:
        """Return the first place that counts."""
        *others, (last, _) = self.places(k)
        found = k.index_value(last)
        for place, inside in reversed(others):
            found = k.index_value(place) if known(inside) is True else inside.where(k.index_value(place), found)
        return found


class _Repeated(Window):
    """A window whose places all count: beyond its ends, its first and its last one again."""

    def places(self, k: Lowering) -> Iterator[tuple[Index, Element]]:
        """Yield each place, and that it counts."""
        for number in range(self.length):
            place = self.start + number
            if self.count is not None:
                last = k.index_value(self.start + self.count - 1)
                value = k.index_value(place)
                place = k.place((value < last).where(value, last), self.size) if number else place
            yield clamped(k, place, self.size), k.constant(True, "bool")


def window_size(call: OpCall) -> int:
    """Return how many elements a call of a pooling operator reads for each of its results; 1 for other operators."""
    if not _POOLING.match(call.signature):
        return 1
    arguments = full_arguments(call)
    if "output_size" not in arguments:
        return math.prod(spread(arguments["kernel_size"], pooled_dims(call)))
    sizes, own = arguments["output_size"], arguments["self"]
    return math.prod(_longest(size, out) for size, out in zip(own.shape[-len(sizes) :], sizes, strict=True))


def _too_large(call: OpCall) -> str | None:
    if 0 in full_arguments(call).get("output_size", ()):
        return "no windows"
    count = window_size(call)
    if count > LARGEST_WINDOW:
        return f"windows of {count} elements, more than {LARGEST_WINDOW}"
    return None


def _averages_floats(call: OpCall) -> str | None:
    dtype = call.inputs[0].dtype.name
    return _too_large(call) if dtype in FLOATS else f"averages of {dtype}"


def _numbers(call: OpCall) -> str | None:
    dtype = call.inputs[0].dtype.name
    return _too_large(call) if dtype in FLOATS | INTEGERS else f"a maximum of {dtype}"


def _strided(
    index: Sequence[Index], shape: Sequence[int], kernel_size: Any, stride: Any, padding: Any, dilation: Any = 1
) -> list[Window]:
    """Return the windows of a pooling operator at an index of the spatial dimensions."""
    n = len(index)
    kernel = spread(kernel_size, n)
    each = zip(index, shape, kernel, spread(stride or kernel, n), spread(padding, n), spread(dilation, n), strict=True)
    return [Window(part * step - pad, length, apart, size) for part, size, length, step, pad, apart in each]


def _longest(size: int, result: int) -> int:
    """Return the length of the longest window of an adaptive pooling operator; 0 where there is none."""
    return max((-(-(n + 1) * size // result) - n * size // result for n in range(result)), default=0)


def _adaptive(index: Sequence[Index], shape: Sequence[int], results: Sequence[int]) -> list[Window]:
    windows = []
    for part, size, result in zip(index, shape, results, strict=True):
        start = (part * size) // result
        count = ((part + 1) * size + (result - 1)) // result - start
        windows.append(Window(start, _longest(size, result), 1, size, count))
    return windows


def _elements(k: Lowering, windows: Sequence[Window]) -> Iterator[tuple[tuple[Index, ...], Element]]:
    for chosen in itertools.product(*(list(window.places(k)) for window in windows)):
        inside = all_of(k, [condition for _, condition in chosen])
        if known(inside) is not False:
            yield tuple(place for place, _ in chosen), inside


# -- averages


def _avg_pool(
    k: Lowering,
    self: Operand,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
    *,
    dims: int,
) -> At:
    pads = spread(padding, dims) if count_include_pad else (0,) * dims

    def at(index: Indices) -> Element:
        windows = _strided(index[-dims:], self.shape[-dims:], kernel_size, stride, padding)
        total = _total(k, self, index[:-dims], windows)
        counts = [_counted(k, window, pad) for window, pad in zip(windows, pads, strict=True)]
        count = math.prod(counts[1:], start=counts[0])
        return total / (count.to(total.dtype) if divisor_override is None else divisor_override)

    return at


for dims in (1, 2, 3):
    gathering(f"aten::avg_pool{dims}d", accepts=_averages_floats)(functools.partial(_avg_pool, dims=dims))


def _counted(k: Lowering, window: Window, pad: int) -> Element:
    """Return how many places of a window lie inside a dimension with so much around it."""
    begin, end = window.start, window.start + window.length
    if begin.bounds[0] >= -pad and end.bounds[1] <= window.size + pad:
        return k.index_value(window.length)
    return k.index_value(end).op("min", window.size + pad) - k.index_value(begin).op("max", -pad)


def _total(k: Lowering, tensor: Operand, batch: Sequence[Index], windows: Sequence[Window]) -> Element:
    zero = k.constant(0, compute_dtype(tensor.dtype))
    total: Element | None = None
    for place, inside in _elements(k, windows):
        value = padded(k, inside, lambda place=place: tensor.at((*batch, *place)).compute(), zero)  # type: ignore[misc]
        total = value if total is None else total + value
    return zero if total is None else total


@gathering(
    "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "aten::adaptive_avg_pool1d", accepts=_averages_floats
)
def adaptive_avg_pool(k: Lowering, self: Operand, output_size: Sequence[int]) -> At:
    dims = len(output_size)

    def at(index: Indices) -> Element:
        windows = _adaptive(index[-dims:], self.shape[-dims:], output_size)
        total = _total(k, self, index[:-dims], windows)
        for window in windows:  # one after the other, as ATen
            if window.count is not None:
                total = total / k.index_value(window.count, total.dtype)
        return total

    return at


# -- maxima


def _max_pool(k: Lowering, self: Operand, ceil_mode: bool, *, dims: int, **window: Any) -> tuple[At, At]:
    return _largest(k, self, lambda index: _strided(index[-dims:], self.shape[-dims:], **window), dims)


def _max_pool_values(k: Lowering, self: Operand, ceil_mode: bool, *, dims: int, **window: Any) -> At:
    """Write the greatest elements of windows, without where they are: compilers make vectors of that."""
    least = k.constant(_least(compute_dtype(self.dtype)), compute_dtype(self.dtype))

    def element(batch: Indices, place: Indices) -> Element:
        return self.at((*batch, *place)).compute()

    def at(index: Indices) -> Element:
        windows = _strided(index[-dims:], self.shape[-dims:], **window)
        windows = [window.repeated() if window.step == 1 else window for window in windows]
        values = [
            padded(k, inside, functools.partial(element, index[:-dims], place), least)
            for place, inside in _elements(k, windows)
        ]
        return _greatest(k, values) if values else least

    return at


def _pairs(values: Sequence[Element]) -> list[Sequence[Element]]:
    return [values[first : first + 2] for first in range(0, len(values), 2)]


def _greatest(k: Lowering, values: Sequence[Element]) -> Element:
    """Return the greatest of some values, NaN if one is.

    Of floats, the greatest number is found as if there were no NaN, whose place in line would matter. Whether there is
    one is asked of two values at a time, which is one comparison in C: half the time of a maximum that keeps NaN.
    """
    if not values[0].is_float:
        return functools.reduce(lambda found, value: found.op("max", value), values)
    found = functools.reduce(lambda found, value: (found > value).where(found, value), values)
    unordered = [functools.reduce(or_, (value.op("isnan") for value in pair)) for pair in _pairs(values)]
    return functools.reduce(or_, unordered).where(k.constant(math.nan, values[0].dtype), found)


for dims in (2, 3):
    gathering(f"aten::max_pool{dims}d_with_indices", accepts=_numbers)(functools.partial(_max_pool, dims=dims))
    gathering(f"aten::max_pool{dims}d", accepts=_numbers)(functools.partial(_max_pool_values, dims=dims))


@gathering("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d", "aten::adaptive_max_pool1d", accepts=_numbers)
def adaptive_max_pool(k: Lowering, self: Operand, output_size: Sequence[int]) -> tuple[At, At]:
    dims = len(output_size)
    return _largest(k, self, lambda index: _adaptive(index[-dims:], self.shape[-dims:], output_size), dims)


def _largest(k: Lowering, tensor: Operand, windows_at: Callable[[Indices], list[Window]], dims: int) -> tuple[At, At]:
    """Return the greatest elements of windows, and where they are: the last NaN, else the first of equal ones."""
    spatial = tensor.shape[-dims:]
    dtype = compute_dtype(tensor.dtype)

    def found(index: Indices) -> tuple[Element, Element]:
        windows = [window.repeated() if window.step == 1 else window for window in windows_at(index)]
        best = k.constant(_least(dtype), dtype)
        where = _position([window.first(k) for window in windows], spatial)
        for place, inside in _elements(k, windows):
            value = padded(
                k,
                inside,
                lambda place=place: tensor.at((*index[:-dims], *place)).compute(),  # type: ignore[misc]
                k.constant(_least(dtype), dtype),
            )
            better = best < value
            if value.is_float:
                better = better | value.op("isnan")
            best = better.where(value, best)
            where = better.where(k.index_value(flatten(place, spatial)), where)
        return best, where

    return (lambda index: found(index)[0]), (lambda index: found(index)[1])


def _position(parts: Sequence[Element], shape: Sequence[int]) -> Element:
    position = parts[0]
    for part, size in zip(parts[1:], shape[1:], strict=True):
        position = position * size + part
    return position


def _least(dtype: str) -> float:
    if dtype in FLOATS:
        return -math.inf
    return 0 if dtype in UNSIGNED else -(2 ** (NBITS[dtype] - 1))


# -- windows as columns


@gathering("aten::im2col")
def im2col(k: Lowering, self: Operand, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> At:
    kernel, apart, pads, steps = (spread(each, 2) for each in (kernel_size, dilation, padding, stride))
    sizes = self.shape[-2:]
    columns = (sizes[1] + 2 * pads[1] - apart[1] * (kernel[1] - 1) - 1) // steps[1] + 1

    def at(index: Indices) -> Element:
        *batch, row, column = index
        channel, y, x = row // (kernel[0] * kernel[1]), row // kernel[1] % kernel[0], row % kernel[1]
        place = (
            (column // columns) * steps[0] + y * apart[0] - pads[0],
            (column % columns) * steps[1] + x * apart[1] - pads[1],
        )
        inside = all_of(k, [between(k, part, 0, size) for part, size in zip(place, sizes, strict=True)])
        return padded(k, inside, lambda: self.at((*batch, channel, *place)), k.constant(0, self.dtype))

    return at
