"""What rules share whose elements are elements of other places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from kagent_core.codegen.dtypes import promote
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import Index
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind

At = Callable[[Indices], Element]
gathering = functools.partial(RULES.indexed, kind=LoweringKind.GATHER)


def wrapped(dim: int, ndim: int) -> int:
    """Return a dimension as a number from 0."""
    return dim % max(ndim, 1)


def between(k: Lowering, index: Index, low: int, high: int) -> Element:
    """Return whether an index is from `low` to `high` - 1, as far as its bounds do not tell already."""
    least, greatest = index.bounds
    value = k.index_value(index)
    holds = k.constant(True, "bool")
    if least < low:
        holds = holds & value.op("ge", k.size(low, "int64"))
    if greatest >= high:
        holds = holds & (value < k.size(high, "int64"))
    return k.constant(False, "bool") if greatest < low or least >= high else holds


def all_of(k: Lowering, conditions: Sequence[Element]) -> Element:
    """Return whether all of some conditions hold."""
    return functools.reduce(lambda one, other: one & other, conditions, k.constant(True, "bool"))


def known(condition: Element) -> bool | None:
    """Return what is known of a condition before anything runs."""
    return bool(condition.expr.payload) if condition.expr.op == "constant" else None


def choose(k: Lowering, condition: Element, then: Callable[[], Element], otherwise: Callable[[], Element]) -> Element:
    """Return one of two values; each reads memory only where it is the one."""
    holds = known(condition)
    if holds is not None:
        return then() if holds else otherwise()
    with k.expressions.masked((~condition).expr):
        other = otherwise()
    with k.expressions.masked(condition.expr):
        return condition.where(then(), other)


def padded(k: Lowering, condition: Element, value: Callable[[], Element], otherwise: Element) -> Element:
    """Return a value where a condition holds, which memory is only read there; else a number."""
    return otherwise if known(condition) is False else k.masked(condition, value, otherwise)


def clamped(k: Lowering, index: Index, size: int) -> Index:
    """Return the nearest index from 0 to `size` - 1."""
    low, high = index.bounds
    value = k.index_value(index)
    if low < 0:
        value = value.op("max", 0)
    if high >= size:
        value = value.op("min", k.size(size - 1, "int64"))
    return index if low >= 0 and high < size else k.place(value, size)


def settled(k: Lowering, index: Index, size: int) -> Index:
    """Return an index that a condition keeps from 0 to `size` - 1 as one that can be divided."""
    low, high = index.bounds
    return index if low >= 0 and high < size else k.place(k.index_value(index), size)


def common(*operands: Operand) -> str:
    """Return the type that operands which all have dimensions are promoted to."""
    return functools.reduce(promote, (operand.dtype for operand in operands))


def replaced(index: Sequence[Index], dim: int, part: Index | int) -> Indices:
    """Return an index with another part for one dimension."""
    return (*index[:dim], Index.of(part), *index[dim + 1 :])


def dropped(index: Sequence[Index], *dims: int) -> Indices:
    """Return an index without some dimensions."""
    return tuple(part for dim, part in enumerate(index) if dim not in dims)
