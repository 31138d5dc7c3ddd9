"""Convolutions in which every channel of the result reads one channel only: too little to do for a matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.geometry import Window, is_channels_last
from kagent_core.specs import TensorSpec

Store = Callable[[Sequence[str], str, str], None]
"""Writes what stores an element: its place without the channel, its channel, its value."""


def write_depthwise(
    k: KernelBuilder, out: TensorSpec, source: Tensor, weight: Tensor, window: Window, store: Store
) -> None:
    """Write a convolution whose groups read one channel each: neighbours in memory side by side."""
    if is_channels_last(out):
        _channels_side_by_side(k, out, source, weight, window, store)
    else:
        _places_side_by_side(k, out, source, weight, window, store)


def _places_side_by_side(
    k: KernelBuilder, out: TensorSpec, source: Tensor, weight: Tensor, window: Window, store: Store
) -> None:
    """A line of places along the last dimension per work-item."""
    made, taps = out.shape[1] // window.groups, weight.spec.shape[2:]
    kind, width, last = k.compute_type(source.dtype), k.tiles.columns(source.dtype), len(taps) - 1
    outer = [(f"o{n}", size) for n, size in enumerate(out.shape[2:-1])]
    with k.items(("n", out.shape[0]), ("c", out.shape[1]), *outer, steps=math.prod((*taps, out.shape[-1]))):
        end = k.size(out.shape[-1])
        with k.loop("w_first", end, step=width):
            k.add(f"{kind} sum[{width}] = {{0}};")
            with ExitStack() as open_blocks:
                at = [open_blocks.enter_context(_tap(k, n, size)) for n, size in enumerate(taps)]
                conditions: list[str] = []
                pairs = zip(outer, at, strict=False)
                places = [_place(k, window, n, name, t, source, conditions) for n, ((name, _), t) in enumerate(pairs)]
                if conditions:
                    open_blocks.enter_context(k.block(f"if ({' & '.join(conditions)})"))
                k.add(f"const {kind} factor = {_factor(k, weight, window, 'c', made, at)};")
                with k.loop("e", width, simd=True):
                    here = [f"((w_first + e) < {end})"]
                    where = _place(k, window, last, "(w_first + e)", at[last], source, here)
                    value = source.at("n", _channel(k, "c", made), *places, where)
                    value = f"({' & '.join(here)} ? {value} : 0)"
                    k.add(f"sum[e] = {k.language.multiply_add('factor', value, 'sum[e]', source.dtype)};")
            k.add(f"const {k.index_type} length = {k.least(f'({end} - w_first)', str(width))};")
            with k.loop("e", "length", simd=True):
                store(["n", *(name for name, _ in outer), "(w_first + e)"], "c", "sum[e]")


def _channels_side_by_side(
    k: KernelBuilder, out: TensorSpec, source: Tensor, weight: Tensor, window: Window, store: Store
) -> None:
    """Some channels of a line of places per work-item, with their weights in memory of its own."""
    made, taps, channels = out.shape[1] // window.groups, weight.spec.shape[2:], out.shape[1]
    kind, width = k.compute_type(source.dtype), k.tiles.columns(source.dtype)
    outer = [(f"o{n}", size) for n, size in enumerate(out.shape[2:-1])]
    places = [*(name for name, _ in outer), "w"]
    axes = [("n", out.shape[0]), *outer, ("cb", -(-channels // width))]
    with k.items(*axes, steps=math.prod((*taps, out.shape[-1])) * width // 16):
        k.add(f"const {k.index_type} first = cb * {width};")
        k.add(f"const {k.index_type} length = {k.least(f'({k.size(channels)} - first)', str(width))};")
        k.array(kind, "panel", math.prod(taps) * width)
        with k.loop("t", math.prod(taps)), k.loop("e", "length"):
            factor = _factor(k, weight, window, "(first + e)", made, _coordinates("t", taps))
            k.add(f"panel[t * {width} + e] = {factor};")
        with k.loop("w", k.size(out.shape[-1])):
            for head, end in ((f"if (length == {width})", str(width)), ("else", "length")):
                with k.block(head):
                    k.add(f"{kind} sum[{width}] = {{0}};")
                    with ExitStack() as open_blocks:
                        _sum_channels(k, source, window, taps, places, end, made, open_blocks)
                    with k.loop("e", end, simd=True):
                        store(["n", *places], "(first + e)", "sum[e]")


def _sum_channels(
    k: KernelBuilder,
    source: Tensor,
    window: Window,
    taps: tuple[int, ...],
    places: Sequence[str],
    end: str,
    made: int,
    open_blocks: ExitStack,
) -> None:
    width, flat = k.tiles.columns(source.dtype), "0"
    at: list[str] = []
    where: list[str] = []
    for n, size in enumerate(taps):
        conditions: list[str] = []
        at.append(open_blocks.enter_context(_tap(k, n, size)))
        where.append(_place(k, window, n, places[n], at[n], source, conditions))
        if conditions:
            open_blocks.enter_context(k.block(f"if ({' & '.join(conditions)})"))
        flat = f"({flat}) * {size} + {at[n]}" if n else at[n]
    with k.loop("e", end, simd=True):
        value = source.at("n", _channel(k, "(first + e)", made), *where)
        factor = f"panel[({flat}) * {width} + e]"
        k.add(f"sum[e] = {k.language.multiply_add(factor, value, 'sum[e]', source.dtype)};")


@contextmanager
def _tap(k: KernelBuilder, n: int, size: int) -> Iterator[str]:
    with k.loop(f"t{n}", str(size)):
        yield f"t{n}"


def _place(k: KernelBuilder, window: Window, n: int, at: str, tap: str, source: Tensor, conditions: list[str]) -> str:
    where, inside = window.place(k, n, at, tap, source.spec.shape[2 + n])
    if inside:
        conditions.append(inside)
    return where


def _coordinates(flat: str, sizes: tuple[int, ...]) -> list[str]:
    found: list[str] = []
    for size in reversed(sizes):
        found.insert(0, f"({flat} % {size})")
        flat = f"({flat} / {size})"
    return found


def _channel(k: KernelBuilder, channel: str, made: int) -> str:
    return channel if made == 1 else f"{channel} / {k.size(made)}"


def _factor(k: KernelBuilder, weight: Tensor, window: Window, channel: str, made: int, tap: Sequence[str]) -> str:
    if not window.inverted:
        return weight.at(channel, "0", *tap)
    return weight.at(_channel(k, channel, made), f"{channel} % {k.size(made)}", *tap)
