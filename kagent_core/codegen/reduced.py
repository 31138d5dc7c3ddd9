"""Reductions as rules write them: over some dimensions of a shape, in whatever loops the kernel has."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from kagent_core.codegen.compound import Compound, of_one
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.expressions import INTEGER_DIVISIONS, Expressions, computed_in, walk
from kagent_core.codegen.indices import Axis, Index, flatten
from kagent_core.codegen.table import NotLoweredError

COLUMNS = 128
"""Neighbouring columns that are reduced at once, at most."""

CACHED = 1 << 22
"""Elements that caches hold from one pass to the next.

Of fewer, a mean and then the differences from it are quicker than block by block, measured with one thread and 32 MiB
of cache: by 5 to 25 in a hundred. Of more, they take up to twice as long.
"""


class Lowers(Protocol):
    """What reductions need of the lowering that they are part of."""

    expressions: Expressions
    one_pass: bool

    def size(self, value: int, dtype: str) -> Element:
        """Return a number that depends on shapes."""

    def new_axes(self, sizes: Sequence[int], taken: Collection[Axis]) -> tuple[tuple[Axis, ...], Indices]:
        """Return loop variables over some sizes, and an index per size."""


class Reduced:
    """Loops over some dimensions of a shape."""

    def __init__(self, lowering: Lowers, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
        self._lowering = lowering
        self.shape = shape
        self.dims = dims

    @property
    def count(self) -> int:
        """Number of elements that become one."""
        return math.prod(self.shape[dim] for dim in self.dims)

    def share(self, total: Element) -> Element:
        """Return a sum over the dimensions divided by the number of its elements."""
        return total / self._lowering.size(self.count, total.dtype)

    def takes_one_pass(self, operand: Operand | None, limit: int) -> bool:
        """Return whether a compound reduction, which reads memory once, beats plain ones one after the other.

        Parameters
        ----------
        operand
            What is reduced, where it has the shape.
        limit
            Most elements of a row that plain reductions are better for, on a processor with caches. Where neighbours in
            memory belong to different rows, it is `CACHED`, and what counts is a block of columns.
        """
        if self._lowering.expressions.wide == "float32":
            return False  # merging states loses digits that plain sums keep
        if self.count <= 1 or self._lowering.one_pass:
            return self.count > 1
        columns = 0 if operand is None else self._columns(operand)
        return self.count * columns > CACHED if columns else self.count > limit

    def _columns(self, operand: Operand) -> int:
        """Return how many neighbouring columns are reduced at once, or 0 where rows lie along memory."""
        strides = operand.spec.strides
        neighbours = [dim for dim, size in enumerate(self.shape) if size > 1 and strides[dim] == 1]
        if set(neighbours) & set(self.dims):
            return 0
        return max((min(self.shape[dim], COLUMNS) for dim in neighbours), default=0)

    def reduce(self, kind: str, index: Sequence[Index], value: Callable[[Indices], Element]) -> Element:
        """Reduce what `value` gives over the dimensions.

        Parameters
        ----------
        kind
            One of `kagent_core.codegen.expressions.REDUCTIONS`.
        index
            Of the shape, or of what is left without the reduced dimensions, or with size 1 in their place.
        value
            Gives an element at an index of the shape.
        """
        kept = self._kept(index)
        return self._whatever_the_mask(kept, lambda: (self._reduce(kind, kept, value),))[0]

    def compound(
        self, kind: Compound, index: Sequence[Index], taken: Callable[[Indices], Sequence[Element]]
    ) -> tuple[Element, ...]:
        """Return the parts of a compound reduction over the dimensions, of which there are elements.

        Parameters
        ----------
        kind
            One of `kagent_core.codegen.compound.COMPOUNDS`.
        index
            As for `reduce`.
        taken
            Gives what it takes of an element, at an index of the shape.
        """
        kept = self._kept(index)
        return self._whatever_the_mask(kept, lambda: self._compound(kind, kept, taken))

    def _compound(
        self, kind: Compound, kept: Mapping[int, Index], taken: Callable[[Indices], Sequence[Element]]
    ) -> tuple[Element, ...]:
        axes, full = self._loops(kept)
        if self.count == 1:
            return tuple(of_one(kind, *taken(full)))
        expressions = self._lowering.expressions
        if self._lowering.one_pass:
            parts = of_one(kind, *taken(full))
        else:
            parts = kind.of_block(_LoopedBlock(expressions, axes, taken(full)))
        made = expressions.compound(kind.name, [part.expr for part in parts], axes)
        return tuple(Element(part, expressions) for part in made)

    def _whatever_the_mask(
        self, kept: Mapping[int, Index], make: Callable[[], tuple[Element, ...]]
    ) -> tuple[Element, ...]:
        """Reduce under no condition, where the row is there in any case: it may then be shared with other reads."""
        expressions = self._lowering.expressions
        if expressions.mask is not None and self._exists(kept):
            with expressions.unmasked():
                found = make()
            nodes = walk(*(element.expr for element in found))
            if not any(node.op == "checked" or node.op in INTEGER_DIVISIONS for node in nodes):
                return found
        return make()

    def _exists(self, kept: Mapping[int, Index]) -> bool:
        """Whether what is reduced lies in its tensor whatever the condition that the result is read under."""
        return all(
            part.bounds[0] >= 0 and part.bounds[1] < self.shape[dim] and not computed_in(part)
            for dim, part in kept.items()
        )

    def _loops(self, kept: Mapping[int, Index]) -> tuple[tuple[Axis, ...], Indices]:
        """Return loop variables over the dimensions, and the index of the shape that they make with the kept ones."""
        mask = self._lowering.expressions.mask
        taken = frozenset[Axis]().union(*(part.axes for part in kept.values()), () if mask is None else mask.axes)
        axes, bound = self._lowering.new_axes([self.shape[dim] for dim in self.dims], taken)
        inside = dict(zip(self.dims, bound, strict=True))
        return axes, tuple(kept[dim] if dim in kept else inside[dim] for dim in range(len(self.shape)))

    def _reduce(self, kind: str, kept: Mapping[int, Index], value: Callable[[Indices], Element]) -> Element:
        axes, full = self._loops(kept)
        element = value(full)
        if self.count <= 1:
            return self._without_loop(kind, element)
        expressions = self._lowering.expressions
        return Element(expressions.reduce(kind, element.expr, axes), expressions)

    def _without_loop(self, kind: str, element: Element) -> Element:
        if self.count == 0:
            if kind in ("max", "min", "fmax"):
                raise NotLoweredError("the greatest or least of no elements")
            return element.number(kind in ("prod", "all"))
        return element + 0 if kind == "sum" and element.is_float else element  # a sum is never -0.0

    def position(self, index: Sequence[Index]) -> Index:
        """Return the row-major position, among the reduced dimensions, of an index of the shape."""
        return flatten([index[dim] for dim in self.dims], [self.shape[dim] for dim in self.dims])

    def _kept(self, index: Sequence[Index]) -> dict[int, Index]:
        left = [dim for dim in range(len(self.shape)) if dim not in self.dims]
        if len(index) == len(self.shape):
            return {dim: index[dim] for dim in left}
        return dict(zip(left, index, strict=True))


class _LoopedBlock:
    """A block of the elements that loops go over, for a compound reduction."""

    def __init__(self, expressions: Expressions, axes: tuple[Axis, ...], taken: Sequence[Element]) -> None:
        self._expressions = expressions
        self._axes = axes
        self._taken = taken

    @property
    def count(self) -> Element:
        return Element(self._expressions.count(self._axes), self._expressions)

    def reduce(self, kind: str, value: Callable[..., Element]) -> Element:
        found = self._expressions.reduce(kind, value(*self._taken).expr, self._axes, in_block=True)
        return Element(found, self._expressions)
