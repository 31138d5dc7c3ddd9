"""Pads: a number around a tensor, or what is near its edge."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.numbers import fits
from kagent_core.codegen.rules.places import At, all_of, between, clamped, gathering, padded


def _before(ndim: int, pad: Sequence[int]) -> list[int]:
    """Return what is added in front of each dimension: pads come in pairs, those of the last dimension first."""
    before = [0] * ndim
    for number in range(len(pad) // 2):
        before[ndim - 1 - number] = pad[2 * number]
    return before


@gathering("aten::constant_pad_nd", accepts=fits("value"))
def constant_pad_nd(k: Lowering, self: Operand, pad: Sequence[int], value: float) -> At:
    before = _before(len(self.shape), pad)

    def at(index: Indices) -> Element:
        moved = [part - start for part, start in zip(index, before, strict=True)]
        inside = all_of(k, [between(k, part, 0, size) for part, size in zip(moved, self.shape, strict=True)])
        return padded(k, inside, lambda: self.at(moved), k.constant(value, self.dtype))

    return at


@gathering("aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d")
def reflection_pad(k: Lowering, self: Operand, padding: Sequence[int]) -> At:
    before = _before(len(self.shape), padding)

    def at(index: Indices) -> Element:
        moved = [part - start for part, start in zip(index, before, strict=True)]
        return self.at([_reflected(k, part, size) for part, size in zip(moved, self.shape, strict=True)])

    return at


def _reflected(k: Lowering, index: Index, size: int) -> Index:
    """The edge itself is not repeated; a pad is shorter than the dimension."""
    low, high = index.bounds
    if low >= 0 and high < size:
        return index
    value = k.index_value(index)
    if low < 0:
        value = value.op("abs")
    if high >= size:
        last = k.size(size - 1, "int64")
        value = last - (value - last).op("abs")
    return k.place(value, size)


@gathering("aten::replication_pad1d", "aten::replication_pad2d", "aten::replication_pad3d")
def replication_pad(k: Lowering, self: Operand, padding: Sequence[int]) -> At:
    before = _before(len(self.shape), padding)

    def at(index: Indices) -> Element:
        moved = [part - start for part, start in zip(index, before, strict=True)]
        return self.at([clamped(k, part, size) for part, size in zip(moved, self.shape, strict=True)])

    return at
