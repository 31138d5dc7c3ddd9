"""Convolutions of any number of dimensions, transposed ones, and their gradients, as products in tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

from kagent_core.codegen.dtypes import HALVES
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.depthwise import write_depthwise
from kagent_core.codegen.generic.geometry import Window, is_channels_last
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.generic.tiled import Coordinates, Operand, Places, Product, write_product
from kagent_core.specs import OpCall, TensorSpec


def _refusal(call: OpCall) -> str | None:
    dtype, rank = call.outputs[0].dtype.name, len(call.inputs[0].shape)
    if any(spec.dtype.name != dtype for spec in (*call.inputs, *call.outputs)):
        return f"{call.name} has tensors of several types"
    if dtype == "bool":
        return f"{call.name} is a convolution of booleans, which PyTorch does not have"
    return None if rank > 2 else f"{call.name} has no spatial dimension"


@GENERIC.kernel("aten::convolution", epilogue=True, accepts=_refusal)
def convolution(
    k: KernelBuilder,
    input: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> None:
    """Write a convolution. `output_padding` only says how large the result is."""
    window = _window(weight.shape[2:], stride, padding, dilation, groups, transposed)
    _over_windows(k, k.call.outputs[0], k.read(input), k.read(weight), window, bias)


@GENERIC.kernel("aten::convolution_backward", accepts=_refusal)
def convolution_backward(
    k: KernelBuilder,
    grad_output: TensorSpec,
    input: TensorSpec,
    weight: TensorSpec,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> None:
    """Write the gradients of a convolution that are wanted: of its input, its weight and its bias."""
    grad = k.read(grad_output)
    if k.gives(0):
        window = _window(weight.shape[2:], stride, padding, dilation, groups, not transposed)
        _over_windows(k, k.result(0).spec, grad, k.read(weight), window, None, number=0)
    if k.gives(1):
        window = _window(weight.shape[2:], stride, padding, dilation, groups, False)
        still, moving = (k.read(input), grad) if transposed else (grad, k.read(input))
        _over_places(k, still, moving, window)
    if k.gives(2):
        _bias_gradient(k, grad)


def _window(
    size: tuple[int, ...],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    inverted: bool,
) -> Window:
    def each(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values) * len(size) if len(values) == 1 else tuple(values)

    return Window(size, each(stride), each(padding), each(dilation), groups, inverted)


def _over_windows(
    k: KernelBuilder,
    out: TensorSpec,
    source: Tensor,
    weight: Tensor,
    window: Window,
    bias: TensorSpec | None,
    number: int = 0,
) -> None:
    """Write, for each place of `out`, the sum over channels and taps of `source` times `weight`.

    A weight's first dimension belongs to the channels of what its convolution makes; where places are followed
    backwards, those are the channels of `source`.
    """
    groups, taps = window.groups, weight.spec.shape[2:]
    made, read = out.shape[1] // groups, source.spec.shape[1] // groups
    last = is_channels_last(source.spec)
    pixels, channels = Space((out.shape[0], *window.of_phase(out.shape[2:]))), Space((made,))
    depth = _window_space(window.of_phase(taps), read, last)
    batch = [("g", groups), *((f"r{n}", phases) for n, phases in enumerate(window.phases) if phases > 1)]

    def split(at: Coordinates) -> tuple[str, Coordinates]:
        return (at[-1], at[:-1]) if last else (at[0], at[1:])

    def patch(pixel: Coordinates, at: Coordinates) -> str:
        channel, tap = split(at)
        return _patch(k, source, window, pixel, _channel("g", read, channel, k), tap)

    def factor(line: Coordinates, at: Coordinates) -> str:
        channel, tap = split(at)
        tap = [window.tap_of_phase(k, n, step) for n, step in enumerate(tap)]
        there = _there(window, tap)
        value = weight.at(*_weight_index(k, window, made, read, line[0], channel), *tap)
        return f"({there} ? {value} : 0)" if there else value

    def step(at: Coordinates) -> str:
        channel, tap = split(at)
        tap = [window.tap_of_phase(k, n, step) for n, step in enumerate(tap)]
        there = _there(window, tap)
        place = weight.offset(*_weight_index(k, window, made, read, "0", channel), *tap)
        return f"({there} ? {place} : -1)" if there else place

    def placed(line: str, place: str) -> str:
        shift = weight.offset(*(("0", line) if window.inverted else (line, "0")), *("0" for _ in taps))
        value = weight.flat(f"{shift} + {place}")
        return f"({place} < 0 ? 0 : {value})" if any(phases > 1 for phases in window.phases) else value

    def store(pixel: Coordinates, channel: str, value: str) -> None:
        if bias is not None:
            value = f"({k.compute_type(source.dtype)})({value} + {k.read(bias).at(channel)})"
        k.store([pixel[0], channel, *pixel[1:]], value, number)

    def store_line(pixel: Coordinates, line: Coordinates, value: str) -> None:
        places = [window.whole_place(n, at) for n, at in enumerate(pixel[1:])]
        past = [f"{at} < {k.size(out.shape[2 + n])}" for n, at in enumerate(places) if window.phases[n] > 1]
        with k.block(f"if ({' && '.join(past)})") if past else nullcontext():
            store([pixel[0], *places], _channel("g", made, line[0], k), value)

    if read == 1 and groups > 1:
        write_depthwise(k, out, source, weight, window, store)
        return

    patches = Operand(pixels, depth, patch, along_depth=last)
    along = last and _weight_along_depth(weight.spec, window)
    factors = Operand(channels, depth, factor, along, Places(placed, step))
    if is_channels_last(out):
        product = Product(source.dtype, batch, patches, factors, store_line)
    else:
        if not window.inverted and not last and weight.spec.is_contiguous and source.dtype not in HALVES:
            factors = _rows_in_place(k, weight, made)
        product = Product(
            source.dtype, batch, factors, patches, lambda line, pixel, value: store_line(pixel, line, value)
        )
    write_product(k, product)


def _rows_in_place(k: KernelBuilder, weight: Tensor, made: int) -> Operand:
    """Return a contiguous weight as a matrix, a row for each channel that is made, whose rows need no copy."""
    length = math.prod(weight.spec.shape[1:])

    def value(line: str, depth: str) -> str:
        return weight.flat(f"({_channel('g', made, line, k)}) * {k.size(length)} + {depth}")

    lines, along = Space((made,)), Space((length,))
    return Operand(lines, along, lambda line, depth: value(line[0], depth[0]), True, Places(value))


def _there(window: Window, tap: Sequence[str]) -> str:
    """Return when the taps of a phase are not past the window; ``""`` for always."""
    return " & ".join(f"({at} < {window.size[n]})" for n, at in enumerate(tap) if window.phases[n] > 1)


def _weight_index(k: KernelBuilder, window: Window, made: int, read: int, line: str, channel: str) -> tuple[str, str]:
    """Return the first two indices into a weight, for channels of group ``g`` of what is made and read."""
    if window.inverted:
        return _channel("g", read, channel, k), line
    return _channel("g", made, line, k), channel


def _over_places(k: KernelBuilder, still: Tensor, moving: Tensor, window: Window) -> None:
    """Write the gradient of a weight: for each tap, the sum over places of `still` times what it met of `moving`."""
    out = k.result(1).spec
    made, read = out.shape[0] // window.groups, out.shape[1]
    places = Space((still.spec.shape[0], *still.spec.shape[2:]))
    last = is_channels_last(moving.spec)
    taps = _window_space(out.shape[2:], read, last)

    def split(at: Coordinates) -> tuple[str, Coordinates]:
        return (at[-1], at[:-1]) if last else (at[0], at[1:])

    def value(line: Coordinates, place: Coordinates) -> str:
        return still.at(place[0], _channel("g", made, line[0], k), *place[1:])

    def patch(line: Coordinates, place: Coordinates) -> str:
        channel, tap = split(line)
        return _patch(k, moving, window, place, _channel("g", read, channel, k), tap)

    def store(line: Coordinates, at: Coordinates, value: str) -> None:
        channel, tap = split(at)
        k.store([_channel("g", made, line[0], k), channel, *tap], value, 1)

    rows = Operand(Space((made,)), places, value, along_depth=not is_channels_last(still.spec))
    columns = Operand(taps, places, patch, along_depth=not last)
    write_product(k, Product(still.dtype, [("g", window.groups)], rows, columns, store))


def _bias_gradient(k: KernelBuilder, grad: Tensor) -> None:
    """Write the sum over all places, for each channel."""
    kind = k.compute_type(grad.dtype)
    wide = k.language.value_type(k.tiles.total_dtype(grad.dtype))
    places = Space((grad.spec.shape[0], *grad.spec.shape[2:-1]))
    with k.items(("c", grad.spec.shape[1]), steps=places.extent * grad.spec.shape[-1]):
        k.add(f"{wide} total = 0;")
        with k.loop("p", k.size(places.extent)):
            place = places.coordinates(k, "p")
            with k.loop("q", grad.size(len(grad.spec.shape) - 1)):
                k.add(f"total += {grad.at(place[0], 'c', *place[1:], 'q')};")
        k.store(["c"], f"({kind})total", 2)


def _patch(k: KernelBuilder, source: Tensor, window: Window, pixel: Coordinates, channel: str, tap: Coordinates) -> str:
    """Return what a tap reads at a place: 0 outside."""
    where: list[str] = []
    conditions: list[str] = []
    for n, (at, by) in enumerate(zip(pixel[1:], tap, strict=True)):
        place, inside = window.place_of_phase(k, n, at, by, source.spec.shape[2 + n])
        where.append(place)
        conditions += [inside] if inside else []
    value = source.at(pixel[0], channel, *where)
    return f"({' & '.join(conditions)} ? {value} : 0)" if conditions else value


def _window_space(taps: tuple[int, ...], channels: int, last: bool) -> Space:
    """Return the places of a window: channels innermost, or outermost."""
    if last:
        return Space((*taps, channels), range(len(taps)))
    return Space((channels, *taps), range(1, len(taps) + 1))


def _channel(group: str, size: int, channel: str, k: KernelBuilder) -> str:
    return f"{group} * {k.size(size)} + {channel}"


def _weight_along_depth(spec: TensorSpec, window: Window) -> bool:
    """Whether neighbouring channels of what is read are closer in a weight than those of what is made."""
    read, made = (0, 1) if window.inverted else (1, 0)
    return spec.strides[read] <= spec.strides[made]
