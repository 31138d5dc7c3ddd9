"""Operators that put whole tensors elsewhere: joined, turned, repeated, copied from a view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.dtypes import NBITS, name_of
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index, flatten, unflatten
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.places import At, between, choose, common, dropped, gathering, replaced, settled, wrapped
from kagent_core.specs import OpCall, TensorSpec

MOST_JOINED = 16
"""Tensors that one kernel joins: each is a choice at every element."""


def _many(call: OpCall) -> str | None:
    count = len(full_arguments(call)["tensors"])
    return f"{count} tensors, more than {MOST_JOINED}" if count > MOST_JOINED else None


@gathering("aten::cat", accepts=_many)
def cat(k: Lowering, tensors: tuple[Operand, ...], dim: int) -> At:
    dtype = common(*tensors)
    tensors = tuple(tensor for tensor in tensors if tensor.shape != (0,))  # those have always been skipped
    dim = wrapped(dim, len(tensors[0].shape))
    return lambda index: _joined(k, tensors, dim, index, dtype)


def _joined(k: Lowering, tensors: Sequence[Operand], dim: int, index: Indices, dtype: str) -> Element:
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.shape[dim])

    def part(number: int) -> Element:
        return tensors[number].at(replaced(index, dim, index[dim] - ends[number])).to(dtype)

    def rest(number: int) -> Element:
        """What is at the index, which does not lie in the tensors before."""
        low, high = index[dim].bounds
        if number == len(tensors) - 1 or high < ends[number + 1]:
            return part(number)
        if low >= ends[number + 1] or tensors[number].shape[dim] == 0:
            return rest(number + 1)
        condition = k.index_value(index[dim]) < k.size(ends[number + 1], "int64")
        return choose(k, condition, lambda: part(number), lambda: rest(number + 1))

    return rest(next(n for n, tensor in enumerate(tensors) if tensor.shape[dim]))


@gathering("aten::stack", accepts=_many)
def stack(k: Lowering, tensors: tuple[Operand, ...], dim: int) -> At:
    dtype = common(*tensors)
    dim = wrapped(dim, len(tensors[0].shape) + 1)

    def at(index: Indices) -> Element:
        def rest(number: int) -> Element:
            if number == len(tensors) - 1:
                return tensors[number].at(dropped(index, dim)).to(dtype)
            here = between(k, index[dim], number, number + 1)
            mine = tensors[number].at(dropped(index, dim)).to(dtype)
            return choose(k, here, lambda: mine, lambda: rest(number + 1))

        return rest(0)

    return at


@gathering("aten::flip")
def flip(k: Lowering, self: Operand, dims: Sequence[int]) -> At:
    flipped = {wrapped(dim, len(self.shape)) for dim in dims}
    return lambda index: self.at(_turned(index, self.shape, flipped))


def _turned(index: Indices, shape: Sequence[int], dims: set[int]) -> Indices:
    return tuple(Index.of(shape[d] - 1) - part if d in dims else part for d, part in enumerate(index))


@gathering("aten::rot90")
def rot90(lowering: Lowering, /, self: Operand, k: int, dims: Sequence[int]) -> At:
    one, other = (wrapped(dim, len(self.shape)) for dim in dims)
    turns = k % 4

    def at(index: Indices) -> Element:
        moved = list(index)
        if turns % 2:
            moved[one], moved[other] = index[other], index[one]
        flipped: tuple[set[int], ...] = (set(), {other}, {one, other}, {one})
        return self.at(_turned(tuple(moved), self.shape, flipped[turns]))

    return at


@gathering("aten::roll")
def roll(k: Lowering, self: Operand, shifts: Sequence[int], dims: Sequence[int]) -> At:
    if not dims:  # as one row

        def from_row(row: Indices) -> Element:
            return self.at(unflatten(settled(k, row[0], self.numel), self.shape))

        def in_row(index: Indices) -> Element:
            return _rolled(k, (flatten(index, self.shape),), (self.numel,), {0: shifts[0]}, from_row)

        return in_row
    by_dim: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        dim = wrapped(dim, len(self.shape))
        by_dim[dim] = by_dim.get(dim, 0) + shift
    return lambda index: _rolled(k, index, self.shape, by_dim, self.at)


def _rolled(k: Lowering, index: Indices, shape: Sequence[int], shifts: dict[int, int], read: At) -> Element:
    """Each rolled dimension has two pieces; in each, what is read lies a fixed distance away."""
    moving = {dim: shift % shape[dim] for dim, shift in shifts.items() if shift % shape[dim]}
    if not moving:
        return read(index)
    dim, distance = next(iter(moving.items()))
    left = {d: s for d, s in moving.items() if d != dim}

    def piece(by: int) -> Element:
        return _rolled(k, replaced(index, dim, index[dim] - by), shape, left, read)

    here = between(k, index[dim], distance, shape[dim])
    return choose(k, here, lambda: piece(distance), lambda: piece(distance - shape[dim]))


def _copies(call: OpCall) -> Sequence[int]:
    """Return the shape with the number of copies in front of each dimension."""
    shape, own = call.outputs[0].shape, call.inputs[0].shape
    own = (1,) * (len(shape) - len(own)) + own
    return [part for size, copied in zip(shape, own, strict=True) for part in (size // copied, copied)]


@gathering("aten::repeat", loops=_copies)
def repeat(k: Lowering, self: Operand, repeats: Sequence[int]) -> At:
    return lambda index: _tiled(self, index)


@gathering("aten::tile", loops=_copies)
def tile(k: Lowering, self: Operand, dims: Sequence[int]) -> At:
    return lambda index: _tiled(self, index)


def _tiled(tensor: Operand, index: Indices) -> Element:
    own = index[len(index) - len(tensor.shape) :]
    return tensor.at([part % size for part, size in zip(own, tensor.shape, strict=True)])


# -- views, copied


@gathering("aten::alias_copy", "aten::detach_copy")
def alias_copy(k: Lowering, self: Operand) -> At:
    return self.at


@gathering("aten::view_copy", "aten::_reshape_copy")
def view_copy(k: Lowering, self: Operand, size: Sequence[int]) -> At:
    shape = _inferred(size, self.numel)
    return lambda index: self.at(unflatten(flatten(index, shape), self.shape))


def _inferred(size: Sequence[int], numel: int) -> tuple[int, ...]:
    given = math.prod(part for part in size if part != -1)
    return tuple(numel // given if part == -1 else part for part in size)


def _other_size(call: OpCall) -> str | None:
    arguments = full_arguments(call)
    before, after = arguments["self"].dtype.name, name_of(arguments["dtype"])
    if "bool" in (before, after) or NBITS[before] != NBITS.get(after) or "16" in before:
        return f"the bits of {before} as {after}"
    return None


@gathering("aten::view_copy.dtype", accepts=_other_size)
def view_copy_dtype(k: Lowering, self: Operand, dtype: Any) -> At:
    def at(index: Indices) -> Element:
        return Element(k.expressions.bitcast(self.at(index).expr, name_of(dtype)), k.expressions)

    return at


@gathering("aten::permute_copy")
def permute_copy(k: Lowering, self: Operand, dims: Sequence[int]) -> At:
    order = [wrapped(dim, len(self.shape)) for dim in dims]
    return lambda index: self.at([index[order.index(dim)] for dim in range(len(order))])


@gathering("aten::transpose_copy.int")
def transpose_copy(k: Lowering, self: Operand, dim0: int, dim1: int) -> At:
    order = list(range(len(self.shape)))
    if order:
        one, other = wrapped(dim0, len(order)), wrapped(dim1, len(order))
        order[one], order[other] = other, one
    return lambda index: self.at([index[dim] for dim in order])


@gathering("aten::t_copy")
def t_copy(k: Lowering, self: Operand) -> At:
    return lambda index: self.at(tuple(reversed(index)))


@gathering("aten::slice_copy.Tensor")
def slice_copy(k: Lowering, self: Operand, dim: int, start: int | None, end: int | None, step: int) -> At:
    dim = wrapped(dim, len(self.shape))
    first, _, _ = slice(start, end).indices(self.shape[dim])
    return lambda index: self.at(replaced(index, dim, index[dim] * step + first))


@gathering("aten::select_copy.int")
def select_copy(k: Lowering, self: Operand, dim: int, index: int) -> At:
    dim = wrapped(dim, len(self.shape))
    chosen = Index.of(index % self.shape[dim])
    return lambda place: self.at((*place[:dim], chosen, *place[dim:]))


@gathering("aten::unsqueeze_copy")
def unsqueeze_copy(k: Lowering, self: Operand, dim: int) -> At:
    dim = wrapped(dim, len(self.shape) + 1)
    return lambda index: self.at(dropped(index, dim))


@gathering("aten::squeeze_copy", "aten::squeeze_copy.dim", "aten::squeeze_copy.dims")
def squeeze_copy(k: Lowering, self: Operand, dim: int | Sequence[int] | None = None) -> At:
    dims = range(len(self.shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d for d in (wrapped(d, len(self.shape)) for d in dims) if self.shape and self.shape[d] == 1}

    def at(index: Indices) -> Element:
        rest = iter(index)
        return self.at([Index() if d in gone else next(rest) for d in range(len(self.shape))])

    return at


@gathering("aten::expand_copy")
def expand_copy(k: Lowering, self: Operand, size: Sequence[int], implicit: bool) -> At:
    return self.broadcast_at


@gathering("aten::diagonal_copy")
def diagonal_copy(k: Lowering, self: Operand, offset: int, dim1: int, dim2: int) -> At:
    row, column = wrapped(dim1, len(self.shape)), wrapped(dim2, len(self.shape))

    def at(index: Indices) -> Element:
        rest = iter(index[:-1])
        place = {row: index[-1] + max(-offset, 0), column: index[-1] + max(offset, 0)}
        return self.at([place[d] if d in place else next(rest) for d in range(len(self.shape))])

    return at


@gathering("aten::unfold_copy")
def unfold_copy(k: Lowering, self: Operand, dimension: int, size: int, step: int) -> At:
    if not self.shape:
        return lambda index: self.at(())
    dim = wrapped(dimension, len(self.shape))
    return lambda index: self.at(replaced(index[:-1], dim, index[dim] * step + index[-1]))


def _beyond_itself(call: OpCall) -> str | None:
    arguments = full_arguments(call)
    seen = _strided(arguments["self"], arguments["size"], arguments["stride"])
    if arguments["storage_offset"] is not None:
        return "a place in the storage, which only the caller knows"
    return None if seen.span <= arguments["self"].span else "it reads memory beyond its tensor"


def _strided(spec: TensorSpec, size: Sequence[int], stride: Sequence[int]) -> TensorSpec:
    return TensorSpec(spec.dtype, tuple(size), tuple(stride), spec.storage_offset, spec.buffer)


@gathering("aten::as_strided_copy", accepts=_beyond_itself)
def as_strided_copy(k: Lowering, self: Operand, size: Any, stride: Any, storage_offset: None) -> At:
    return k.operand(_strided(self.spec, size, stride)).at


# -- lists of copies: one kernel if all have the same size


def _pieces(self: Operand, dim: int, sizes: Sequence[int]) -> tuple[At, ...]:
    dim = wrapped(dim, len(self.shape))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def piece(start: int) -> At:
        return lambda index: self.at(replaced(index, dim, index[dim] + start))

    return tuple(piece(start) for start in starts)


@gathering("aten::split_with_sizes_copy")
def split_with_sizes_copy(k: Lowering, self: Operand, split_sizes: Sequence[int], dim: int) -> tuple[At, ...]:
    return _pieces(self, dim, split_sizes)


@gathering("aten::split_copy.Tensor")
def split_copy(k: Lowering, self: Operand, split_size: int, dim: int) -> tuple[At, ...]:
    whole = self.shape[wrapped(dim, len(self.shape))]
    starts = range(0, whole, split_size) if whole else (0,)
    return _pieces(self, dim, [min(split_size, whole - start) for start in starts])


@gathering("aten::unbind_copy.int")
def unbind_copy(k: Lowering, self: Operand, dim: int) -> tuple[At, ...]:
    dim = wrapped(dim, len(self.shape))

    def piece(number: int) -> At:
        return lambda index: self.at((*index[:dim], Index.of(number), *index[dim:]))

    return tuple(piece(number) for number in range(self.shape[dim]))


# -- channels


@gathering("aten::pixel_shuffle")
def pixel_shuffle(k: Lowering, self: Operand, upscale_factor: int) -> At:
    r = upscale_factor

    def at(index: Indices) -> Element:
        *batch, c, y, x = index
        return self.at([*batch, c * (r * r) + (y % r) * r + x % r, y // r, x // r])

    return at


@gathering("aten::pixel_unshuffle")
def pixel_unshuffle(k: Lowering, self: Operand, downscale_factor: int) -> At:
    r = downscale_factor

    def at(index: Indices) -> Element:
        *batch, c, y, x = index
        return self.at([*batch, c // (r * r), y * r + c // r % r, x * r + c % r])

    return at


@gathering("aten::channel_shuffle", "aten::native_channel_shuffle")
def channel_shuffle(k: Lowering, self: Operand, groups: int) -> At:
    per_group = self.shape[1] // groups
    return lambda index: self.at(replaced(index, 1, (index[1] % groups) * per_group + index[1] // groups))


@gathering("aten::glu")
def glu(k: Lowering, self: Operand, dim: int) -> At:
    dim = wrapped(dim, len(self.shape))
    half = self.shape[dim] // 2

    def at(index: Indices) -> Element:
        gate = self.at(replaced(index, dim, index[dim] + half)).compute()
        return self.at(index).compute() * (1 / (1 + (-gate).op("exp")))

    return at
