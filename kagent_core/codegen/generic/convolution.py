"""Convolutions of any number of dimensions, transposed ones, and their gradients, as products in tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from kagent_core.codegen.dtypes import HALVES, compute_dtype
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.depthwise import Store, write_depthwise
from kagent_core.codegen.generic.direct_convolution import takes_direct, takes_scale, write_direct, write_scaled
from kagent_core.codegen.generic.geometry import Window, is_channels_last
from kagent_core.codegen.generic.leading import SCALE
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.generic.strip_kernels import Strips
from kagent_core.codegen.generic.tiled import Coordinates, Operand, Places, Product, write_product
from kagent_core.codegen.table import NotLoweredError
from kagent_core.specs import OpCall, TensorSpec


def _refusal(call: OpCall) -> str | None:
    dtype, rank = call.inputs[0].dtype.name, len(call.inputs[0].shape)
    if any(spec.dtype.name != dtype for spec in (*call.inputs, *call.outputs)):
        return f"{call.name} has tensors of several types"
    if dtype == "bool":
        return f"{call.name} is a convolution of booleans, which PyTorch does not have"
    return None if rank > 2 else f"{call.name} has no spatial dimension"


@GENERIC.kernel("aten::convolution", epilogue=True, accepts=_refusal, several=Strips())
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
    window = Window.of(weight.shape[2:], stride, padding, dilation, groups, transposed)
    out = k.call.outputs[0]
    if not transposed:  # more may be behind the input than in front of it
        window = replace(window, leaves=_leaves(window, input.shape[2:], out.shape[2:]))
    scale = k.call.arguments.get(SCALE)
    _over_windows(k, out, k.read(input), k.read(weight), window, bias, scale=scale)


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
        window = Window.of(weight.shape[2:], stride, padding, dilation, groups, not transposed)
        _over_windows(k, k.result(0).spec, grad, k.read(weight), window, None, number=0)
    if k.gives(1):
        window = Window.of(weight.shape[2:], stride, padding, dilation, groups, False)
        still, moving = (k.read(input), grad) if transposed else (grad, k.read(input))
        _over_places(k, still, moving, window)
    if k.gives(2):
        _bias_gradient(k, grad)


def _leaves(window: Window, sizes: Sequence[int], made: Sequence[int]) -> tuple[bool, ...]:
    """Return along which dimensions the last window ends behind the input."""
    ends = [
        (places - 1) * window.stride[n] - window.padding[n] + (window.size[n] - 1) * window.dilation[n]
        for n, places in enumerate(made)
    ]
    return tuple(end >= size for end, size in zip(ends, sizes, strict=True))


def _over_windows(
    k: KernelBuilder,
    out: TensorSpec,
    source: Tensor,
    weight: Tensor,
    window: Window,
    bias: TensorSpec | None,
    number: int = 0,
    scale: TensorSpec | None = None,
) -> None:
    """Write, for each place of `out`, the sum over channels and taps of `source` times `weight`."""

    def store(place: Coordinates, channel: str, value: str) -> None:
        if bias is not None:
            value = k.converted(source.dtype, f"{value} + {k.read(bias).at(channel)}")
        k.store([place[0], channel, *place[1:]], value, number)

    tiles = k.language.register_tiles
    lies_so = not window.inverted and takes_direct(source.spec, weight.spec, out, window)
    if scale is not None:
        if tiles is None or not lies_so or not takes_scale(source.spec, weight.spec, window):
            raise NotLoweredError(f"{k.call.name} has no kernel that multiplies what it reads")
        write_scaled(k, tiles, source, weight, k.read(scale), window, store)
        return
    if tiles is not None and lies_so:
        write_direct(k, tiles, out, source, weight, window, store)
        return
    made, read = out.shape[1] // window.groups, source.spec.shape[1] // window.groups
    if read == 1 and window.groups > 1:
        write_depthwise(k, out, source, weight, window, store)
        return
    sweep = _Sweep(k, out, source, weight, window, made, read)
    patches, factors = sweep.patches(), sweep.factors()
    if is_channels_last(out):
        product = Product(source.dtype, sweep.batch, patches, factors, sweep.storing(store))
    else:
        if not window.inverted and not sweep.last and weight.spec.is_contiguous and source.dtype not in HALVES:
            factors = _rows_in_place(k, weight, made)
        by_place = sweep.storing(store)
        product = Product(
            source.dtype, sweep.batch, factors, patches, lambda line, place, value: by_place(place, line, value)
        )
    write_product(k, product)


@dataclass(frozen=True)
class _Sweep:
    """A window that goes over `source`, for each phase and group: what the product of patches and weights needs.

    A weight's first dimension belongs to the channels of what its convolution makes; where places are followed
    backwards, those are the channels of `source`. `made` and `read` are channels of a group.
    """

    k: KernelBuilder
    out: TensorSpec
    source: Tensor
    weight: Tensor
    window: Window
    made: int
    read: int

    @property
    def last(self) -> bool:
        """Whether channels are the innermost part of the depth."""
        return is_channels_last(self.source.spec)

    @property
    def batch(self) -> list[tuple[str, int]]:
        """The groups and phases."""
        phases = [(f"r{n}", phases) for n, phases in enumerate(self.window.phases) if phases > 1]
        return [("g", self.window.groups), *phases]

    @property
    def depth(self) -> Space:
        """The channels and taps."""
        return _window_space(self.window.of_phase(self.window.size), self.read, self.last)

    def patches(self) -> Operand:
        """Return what the window sees at each place."""
        k = self.k

        def value(place: Coordinates, at: Coordinates) -> str:
            channel, tap = _split(at, self.last)
            return _patch(k, self.source, self.window, place, _channel("g", self.read, channel, k), tap)

        places = Space((self.out.shape[0], *self.window.of_phase(self.out.shape[2:])))
        return Operand(places, self.depth, value, along_depth=self.last)

    def factors(self) -> Operand:
        """Return the weights of each channel that is made; 0 for taps of a phase that are past the window."""
        phased = any(phases > 1 for phases in self.window.phases)

        def value(line: Coordinates, at: Coordinates) -> str:
            index, there = self._weight_index(line[0], at)
            return f"({there} ? {self.weight.at(*index)} : 0)" if there else self.weight.at(*index)

        def step(at: Coordinates) -> str:
            index, there = self._weight_index("0", at)
            return f"({there} ? {self.weight.offset(*index)} : -1)" if there else self.weight.offset(*index)

        def placed(line: str, place: str) -> str:
            pair = ("0", line) if self.window.inverted else (line, "0")
            found = self.weight.flat(f"{self.weight.offset(*pair, *('0' for _ in self.window.size))} + {place}")
            return f"({place} < 0 ? 0 : {found})" if phased else found

        along = self.last and _weight_along_depth(self.weight.spec, self.window)
        return Operand(Space((self.made,)), self.depth, value, along, Places(placed, step))

    def storing(self, store: Store) -> Callable[[Coordinates, Coordinates, str], None]:
        """Return what stores an element, given the coordinates of its place and its channel in the group."""
        k, window = self.k, self.window

        def store_line(place: Coordinates, line: Coordinates, value: str) -> None:
            at = [window.whole_place(n, step) for n, step in enumerate(place[1:])]
            past = [f"{step} < {k.size(self.out.shape[2 + n])}" for n, step in enumerate(at) if window.phases[n] > 1]
            with k.block(f"if ({' && '.join(past)})") if past else nullcontext():
                store([place[0], *at], _channel("g", self.made, line[0], k), value)

        return store_line

    def _weight_index(self, line: str, at: Coordinates) -> tuple[list[str], str]:
        """Return an index into the weight, and when it is inside; ``""`` for always."""
        channel, steps = _split(at, self.last)
        taps = [self.window.tap_of_phase(self.k, n, step) for n, step in enumerate(steps)]
        there = " & ".join(f"({t} < {self.window.size[n]})" for n, t in enumerate(taps) if self.window.phases[n] > 1)
        if self.window.inverted:
            return [_channel("g", self.read, channel, self.k), line, *taps], there
        return [_channel("g", self.made, line, self.k), channel, *taps], there


def _rows_in_place(k: KernelBuilder, weight: Tensor, made: int) -> Operand:
    """Return a contiguous weight as a matrix, a row for each channel that is made, whose rows need no copy."""
    length = math.prod(weight.spec.shape[1:])

    def value(line: str, depth: str) -> str:
        return weight.flat(f"({_channel('g', made, line, k)}) * {k.size(length)} + {depth}")

    lines, along = Space((made,)), Space((length,))
    return Operand(lines, along, lambda line, depth: value(line[0], depth[0]), True, Places(value))


def _over_places(k: KernelBuilder, still: Tensor, moving: Tensor, window: Window) -> None:
    """Write the gradient of a weight: for each tap, the sum over places of `still` times what it met of `moving`."""
    out = k.result(1).spec
    made, read = out.shape[0] // window.groups, out.shape[1]
    places = Space((still.spec.shape[0], *still.spec.shape[2:]))
    last = is_channels_last(moving.spec)
    taps = _window_space(out.shape[2:], read, last)

    def value(line: Coordinates, place: Coordinates) -> str:
        return still.at(place[0], _channel("g", made, line[0], k), *place[1:])

    def patch(line: Coordinates, place: Coordinates) -> str:
        channel, tap = _split(line, last)
        return _patch(k, moving, window, place, _channel("g", read, channel, k), tap)

    def store(line: Coordinates, at: Coordinates, value: str) -> None:
        channel, tap = _split(at, last)
        k.store([_channel("g", made, line[0], k), channel, *tap], value, 1)

    rows = Operand(Space((made,)), places, value, along_depth=not is_channels_last(still.spec))
    columns = Operand(taps, places, patch, along_depth=not last)
    write_product(k, Product(still.dtype, [("g", window.groups)], rows, columns, store))


def _bias_gradient(k: KernelBuilder, grad: Tensor) -> None:
    """Write the sum over all places, for each channel."""
    if k.work_groups is not None:
        _shared_bias_gradient(k, grad)
        return
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


def _shared_bias_gradient(k: KernelBuilder, grad: Tensor) -> None:
    """Write the same where threads of a block share a sum: as the product with a column of ones."""
    shape = grad.spec.shape
    places, one = Space((shape[0], *shape[2:])), k.number(1, compute_dtype(grad.dtype))
    along = not is_channels_last(grad.spec)
    rows = Operand(Space((shape[1],)), places, lambda line, at: grad.at(at[0], line[0], *at[1:]), along_depth=along)
    columns = Operand(Space((1,)), places, lambda line, at: one, along_depth=True)
    write_product(k, Product(grad.dtype, [], rows, columns, lambda row, column, value: k.store([*row], value, 2)))


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


def _split(at: Coordinates, last: bool) -> tuple[str, Coordinates]:
    """Return the channel and the tap at a place of a window."""
    return (at[-1], at[:-1]) if last else (at[0], at[1:])


def _channel(group: str, size: int, channel: str, k: KernelBuilder) -> str:
    return f"{group} * {k.size(size)} + {channel}"


def _weight_along_depth(spec: TensorSpec, window: Window) -> bool:
    """Whether neighbouring channels of what is read are closer in a weight than those of what is made."""
    read, made = (0, 1) if window.inverted else (1, 0)
    return spec.strides[read] <= spec.strides[made]
