"""Operators that read where the elements of index tensors say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index, unflatten
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.places import At, gathering, wrapped
from kagent_core.specs import OpCall, TensorSpec

INDEX_TYPES = frozenset({"int32", "int64"})
"""Types of index tensors. Boolean ones have a size that only running tells, and uint8 stands for boolean."""


class Lookup:
    """Reads a tensor at indices that other tensors hold. A wrong one is reported, and reads nothing.

    Parameters
    ----------
    k
        The lowering.
    tensor
        What is read.
    wraps
        Whether negative indices count from the end.
    error
        What eager PyTorch raises.
    """

    def __init__(self, k: Lowering, tensor: Operand, wraps: bool = False, error: type[Exception] = IndexError) -> None:
        self._k = k
        self._tensor = tensor
        self._wraps = wraps
        self._error = error

    def checked(self, value: Element, size: int) -> Element:
        """Return the place that an index means."""
        expressions = self._k.expressions
        expr = expressions.checked(value.to("int64").expr, size, self._wraps, self._error)
        return Element(expr, expressions)

    def at(self, index: Sequence[Index | None], computed: Sequence[Element]) -> Element:
        """Return the element at an index whose None parts are those in `computed`, in order."""
        k, spec = self._k, self._tensor.spec
        dims = [dim for dim, part in enumerate(index) if part is None]
        parts = list(index)
        guards = []
        for dim, value in zip(dims, computed, strict=True):
            place = self.checked(value, spec.shape[dim])
            parts[dim] = k.place(place, spec.shape[dim])
            # an index that no address depends on has to be checked all the same
            if spec.shape[dim] == 1 or spec.strides[dim] == 0 or k.is_made(spec):
                guards.append(place.op("ge", 0))
        found = self._tensor.at([part for part in parts if part is not None])
        for guard in guards:
            found = guard.where(found, 0)
        return found


def _index_refusal(call: OpCall) -> str | None:
    arguments = full_arguments(call)
    given = arguments.get("indices", arguments.get("index"))
    read = arguments.get("weight", arguments.get("self"))
    for tensor in given if isinstance(given, tuple) else (given,):
        if tensor is not None and tensor.dtype.name not in INDEX_TYPES:
            return f"indices of {tensor.dtype}"
    if read is None or read.numel == 0:
        return "nothing to read from"
    return None


@gathering("aten::embedding", accepts=_index_refusal)
def embedding(k: Lowering, weight: Operand, indices: Operand, **_: Any) -> At:
    rows = Lookup(k, weight)
    return lambda index: rows.at([None, index[-1]], [indices.at(index[:-1])])


@gathering("aten::index_select", accepts=_index_refusal)
def index_select(k: Lowering, self: Operand, dim: int, index: Operand) -> At:
    dim = wrapped(dim, len(self.shape))
    error = RuntimeError if len(self.shape) > 1 and dim == 1 else IndexError  # as ATen's kernel for that dimension
    rows = Lookup(k, self, error=error)

    def at(place: Indices) -> Element:
        if not self.shape:
            return _scalar(rows, self, index.at([Index()] * len(index.shape)))
        chosen = index.at(place[dim : dim + 1] if index.shape else ())
        return rows.at([*place[:dim], None, *place[dim + 1 :]], [chosen])

    return at


@gathering("aten::gather", accepts=_index_refusal)
def gather(k: Lowering, self: Operand, dim: int, index: Operand, sparse_grad: bool) -> At:
    dim = wrapped(dim, len(self.shape))
    rows = Lookup(k, self, error=RuntimeError)

    def at(place: Indices) -> Element:
        chosen = index.at(place)
        if not self.shape:
            return _scalar(rows, self, chosen)
        return rows.at([*place[:dim], None, *place[dim + 1 :]], [chosen])

    return at


def _scalar(rows: Lookup, tensor: Operand, chosen: Element) -> Element:
    """A tensor without dimensions is read as if it had one of size 1."""
    return rows.checked(chosen, 1).op("ge", 0).where(tensor.at(()), 0)


@gathering("aten::take", accepts=_index_refusal)
def take(k: Lowering, self: Operand, index: Operand) -> At:
    places = Lookup(k, self, wraps=True)

    def at(place: Indices) -> Element:
        position = places.checked(index.at(place), self.numel)
        found = self.at(unflatten(k.place(position, self.numel), self.shape))
        return position.op("ge", 0).where(found, 0)

    return at


def _indexed_dims(indices: Sequence[Operand | TensorSpec | None]) -> list[int]:
    return [dim for dim, index in enumerate(indices) if index is not None]


def _is_adjacent(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))


@gathering("aten::index.Tensor", "aten::_unsafe_index.Tensor", accepts=_index_refusal)
def index_tensor(k: Lowering, self: Operand, indices: tuple[Operand | None, ...]) -> At:
    rows = Lookup(k, self, wraps=True)
    return lambda index: _indexed(rows, self, indices, index)


def _indexed(rows: Lookup, tensor: Operand, indices: tuple[Operand | None, ...], index: Indices) -> Element:
    """What the index tensors are broadcast to stands where they do, or first if they are not adjacent."""
    dims = _indexed_dims(indices)
    if not dims:
        return tensor.at(index)
    given = [each for each in indices if each is not None]
    count = max(len(each.shape) for each in given)
    first = dims[0] if _is_adjacent(dims) else 0
    chosen = [each.broadcast_at(index[first : first + count]) for each in given]
    rest = iter((*index[:first], *index[first + count :]))
    return rows.at([None if dim in dims else next(rest) for dim in range(len(tensor.shape))], chosen)


@gathering("aten::_unsafe_masked_index", accepts=_index_refusal)
def masked_index(k: Lowering, self: Operand, mask: Operand, indices: tuple[Operand | None, ...], fill: Any) -> At:
    rows = Lookup(k, self, wraps=True)

    def at(index: Indices) -> Element:
        holds = mask.broadcast_at(index).to("bool")
        return k.masked(holds, lambda: _indexed(rows, self, indices, index), fill)

    return at
