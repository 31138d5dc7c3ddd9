"""Operators that put a tensor into part of another one, or of nothing but zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index, flatten
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.places import (
    At,
    all_of,
    between,
    dropped,
    gathering,
    known,
    padded,
    replaced,
    settled,
    wrapped,
)
from kagent_core.specs import OpCall


def _over(
    k: Lowering, condition: Element, part: Operand, place: Sequence[Index], around: Operand | str, index: Indices
) -> Element:
    """Return the part's element where a condition holds, else what is around it: a tensor's, or zero of a type."""
    if isinstance(around, str):
        return padded(k, condition, lambda: part.at(place).to(around), k.constant(0, around))
    if known(condition) is True:
        return part.at(place).to(around.dtype)
    outside = around.at(index)
    return padded(k, condition, lambda: part.at(place).to(around.dtype), outside)


def _in_slice(
    k: Lowering, index: Indices, dim: int, size: int, bounds: tuple[int | None, int | None], step: int
) -> tuple[Element, Indices]:
    """Return whether an index lies in a slice of a dimension, and where in it."""
    start, end, _ = slice(*bounds).indices(size)
    condition = between(k, index[dim], start, max(end, start))
    moved = index[dim] - start
    if step == 1 or known(condition) is False:
        return condition, replaced(index, dim, moved)
    moved = settled(k, moved, end - start)
    return all_of(k, [condition, k.index_value(moved % step).equals(0)]), replaced(index, dim, moved // step)


@gathering("aten::slice_scatter")
def slice_scatter(
    k: Lowering, self: Operand, src: Operand, dim: int, start: int | None, end: int | None, step: int
) -> At:
    dim = wrapped(dim, len(self.shape))

    def at(index: Indices) -> Element:
        condition, place = _in_slice(k, index, dim, self.shape[dim], (start, end), step)
        # a source of size 1 is expanded
        return _over(k, condition, src, place, self, index)

    return at


@gathering("aten::slice_backward")
def slice_backward(
    k: Lowering, grad_output: Operand, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> At:
    dim = wrapped(dim, len(input_sizes))

    def at(index: Indices) -> Element:
        condition, place = _in_slice(k, index, dim, input_sizes[dim], (start, end), step)
        return _over(k, condition, grad_output, place, grad_output.dtype, index)

    return at


@gathering("aten::select_scatter")
def select_scatter(k: Lowering, self: Operand, src: Operand, dim: int, index: int) -> At:
    dim = wrapped(dim, len(self.shape))
    chosen = index % self.shape[dim]
    return lambda place: _over(k, between(k, place[dim], chosen, chosen + 1), src, dropped(place, dim), self, place)


@gathering("aten::select_backward")
def select_backward(k: Lowering, grad_output: Operand, input_sizes: Sequence[int], dim: int, index: int) -> At:
    dim = wrapped(dim, len(input_sizes))
    chosen = index % input_sizes[dim]
    return lambda place: _over(
        k,
        between(k, place[dim], chosen, chosen + 1),
        grad_output,
        dropped(place, dim),
        grad_output.dtype,
        place,
    )


def _on_diagonal(k: Lowering, index: Indices, offset: int, row: int, column: int) -> tuple[Element, Indices]:
    """Return whether an index lies on a diagonal, and where on it: the position is the last dimension."""
    condition = between(k, index[column] - index[row], offset, offset + 1)
    along = index[row] if offset >= 0 else index[column]
    return condition, (*dropped(index, row, column), along)


@gathering("aten::diagonal_scatter")
def diagonal_scatter(k: Lowering, self: Operand, src: Operand, offset: int, dim1: int, dim2: int) -> At:
    row, column = wrapped(dim1, len(self.shape)), wrapped(dim2, len(self.shape))

    def at(index: Indices) -> Element:
        condition, place = _on_diagonal(k, index, offset, row, column)
        return _over(k, condition, src, place, self, index)

    return at


@gathering("aten::diagonal_backward")
def diagonal_backward(
    k: Lowering, grad_output: Operand, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> At:
    row, column = wrapped(dim1, len(input_sizes)), wrapped(dim2, len(input_sizes))

    def at(index: Indices) -> Element:
        condition, place = _on_diagonal(k, index, offset, row, column)
        return _over(k, condition, grad_output, place, grad_output.dtype, index)

    return at


@gathering("aten::diag_embed")
def diag_embed(k: Lowering, self: Operand, offset: int, dim1: int, dim2: int) -> At:
    ndim = len(self.shape) + 1
    row, column = wrapped(dim1, ndim), wrapped(dim2, ndim)

    def at(index: Indices) -> Element:
        condition, place = _on_diagonal(k, index, offset, row, column)
        return _over(k, condition, self, place, self.dtype, index)

    return at


def _not_regular(call: OpCall) -> str | None:
    arguments = full_arguments(call)
    own, offset = arguments["self"], arguments["storage_offset"]
    if not own.is_contiguous or own.storage_offset != 0 or (offset is not None and offset < 0):
        return "a tensor that is not contiguous from its storage's beginning"
    order = _by_stride(arguments["size"], arguments["stride"])
    room = own.numel - (offset or 0)
    for size, stride in order:  # each dimension lies in one step of the one before
        if stride <= 0 or (size - 1) * stride >= room:
            return f"strides {arguments['stride']}, by which elements overlap or lie outside"
        room = stride
    return None


def _by_stride(size: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    pairs = [(length, step) for length, step in zip(size, stride, strict=True) if length != 1]
    return sorted(pairs, key=lambda pair: -pair[1])


@gathering("aten::as_strided_scatter", accepts=_not_regular)
def as_strided_scatter(
    k: Lowering, self: Operand, src: Operand, size: Any, stride: Any, storage_offset: int | None
) -> At:
    begin = storage_offset or 0
    dims = sorted((d for d, length in enumerate(size) if length != 1), key=lambda d: -stride[d])

    def at(index: Indices) -> Element:
        position = flatten(index, self.shape) - begin
        conditions = [between(k, position, 0, self.numel - begin)]
        rest = settled(k, position, self.numel - begin)
        place = [Index()] * len(size)
        for dim in dims:
            part = rest // stride[dim]
            conditions.append(between(k, part, 0, size[dim]))
            place[dim], rest = part, rest % stride[dim]
        conditions.append(between(k, rest, 0, 1))
        return _over(k, all_of(k, conditions), src, place, self, index)

    return at


# -- triangles


@gathering("aten::tril")
def tril(k: Lowering, self: Operand, diagonal: int) -> At:
    return lambda index: _kept(k, self, index, index[-2] - index[-1] + diagonal)


@gathering("aten::triu")
def triu(k: Lowering, self: Operand, diagonal: int) -> At:
    return lambda index: _kept(k, self, index, index[-1] - index[-2] - diagonal)


def _kept(k: Lowering, tensor: Operand, index: Indices, within: Index) -> Element:
    """Return an element where an index is not negative, else zero."""
    condition = between(k, within, 0, within.bounds[1] + 1)
    if known(condition) is False:
        return k.constant(0, tensor.dtype)
    return condition.where(tensor.at(index), 0)
