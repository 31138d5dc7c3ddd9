"""Pointwise operators that parametrised kernels compute where they store their results."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.indices import Axis, Index, offset_of
from kagent_core.codegen.kernel import Store
from kagent_core.codegen.loops.items_lanes import LaneStatements
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.table import NotLoweredError, RuleTable
from kagent_core.codegen.text import Text
from kagent_core.codegen.vectors import in_lanes, neighbours
from kagent_core.codegen.writer import Parameters, loads_of
from kagent_core.specs import OpCall, TensorSpec


class NoLanesError(Exception):
    """What was to be computed in vectors cannot be."""


def lane_dimension(lanes: Collection[str], spec: TensorSpec, index: Sequence[str]) -> int | None:
    """Return the dimension along which an index, given as texts, goes one step from lane to lane; None for none.

    Parameters
    ----------
    lanes
        Variables that go from lane to lane.
    spec
        What the index is into.
    index
        A text per dimension.

    Raises
    ------
    NoLanesError
        When it goes otherwise.
    """
    found: int | None = None
    for dim, part in enumerate(index if lanes else ()):
        inside = [word for word in re.findall(r"\w+", part) if word in lanes]
        if not inside or spec.shape[dim] == 1 or spec.strides[dim] == 0:
            continue
        plain = part.removeprefix("(").removesuffix(")")
        one_step = len(inside) == 1 and (plain == inside[0] or plain.endswith(f" + {inside[0]}"))
        if found is not None or not one_step:
            raise NoLanesError(part)
        found = dim
    return found


class Epilogue:
    """Pointwise operators on each element of a result, at the place where it is stored.

    Parameters
    ----------
    call
        What makes the result.
    rest
        The operators.
    stored
        Buffers of the results that are written; None for all of them.
    rules
        Their lowering rules.
    round_halves, wide
        As for `kagent_core.codegen.expressions.Expressions`.
    kept
        A result, of theirs or of `call`, that `write` also gives to the kernel; None for none.

    Raises
    ------
    NotLoweredError
        When they cannot be computed so.
    """

    def __init__(
        self,
        call: OpCall,
        rest: Sequence[OpCall],
        stored: Collection[int] | None,
        rules: RuleTable,
        round_halves: bool,
        wide: str = "float64",
        kept: TensorSpec | None = None,
    ) -> None:
        self._made = call.outputs[0]
        wanted = None if stored is None else {*stored, *(() if kept is None else (kept.buffer,))}
        lowering = Lowering(rest, rules, wanted, round_halves, given=self._made, wide=wide)
        nest = lowering.run()
        axes = iter(nest.outer)
        self._axes: list[Axis | None] = [None if size == 1 else next(axes) for size in self._made.shape]
        self.stores = list(nest.stores)
        if wanted is not None and self._made.buffer in wanted:
            index = tuple(Index() if axis is None else Index.of(axis) for axis in self._axes)
            made = lowering.operand(self._made).at(index)
            self.stores.insert(0, Store(self._made, offset_of(index, self._made.strides), made.expr, False))
        self._kept: Expr | None = None
        if kept is not None:
            found = [store.value for store in self.stores if store.tensor == kept]
            if not found:
                raise NotLoweredError(f"{kept} is none of their results")
            self._kept = found[0]
            self.stores = [store for store in self.stores if stored is None or store.tensor.buffer in stored]
        self._labels = nest.labels
        self.read = {node.payload.tensor for node in loads_of(*self._values)}

    def stored_step(self, dim: int) -> int | None:
        """Return how far neighbours along a dimension of the first operator's result are apart where they are stored.

        None where that differs, from place to place or from one tensor to another; 0 for a dimension of one element.
        """
        axis = self._axes[dim]
        steps = {0 if axis is None else neighbours(store.offset, axis) for store in self.stores}
        return steps.pop() if len(steps) == 1 else None

    def write(
        self,
        text: Text,
        parameters: Parameters,
        language: CFamily,
        index: Sequence[str],
        value: str,
        lane: int | None = None,
        kept: str | None = None,
    ) -> None:
        """Write what follows, and what stores it.

        Parameters
        ----------
        text, parameters, language
            The kernel's.
        index
            Of the element of the result, a text per dimension.
        value
            The element's.
        lane
            The dimension of which a vector of neighbours is given; None for a single element.
        kept
            The variable that is set to what is kept.

        Raises
        ------
        NoLanesError
            When neighbours cannot be computed as a vector.
        """
        for axis, part in zip(self._axes, index, strict=True):
            if axis is not None:
                text.add(f"const {language.index_type} {axis.name} = {part};")
        statements = LaneStatements(language, parameters, self._labels)
        statements.given = value
        values = self._values
        along = None if lane is None else self._axes[lane]
        if along is not None and not self._takes(along):
            raise NoLanesError(along.name)
        with contextlib.nullcontext() if along is None else statements.lanes(along):
            text.add(*statements.place(values, [])[0])
            for store in self.stores:
                text.add(statements.stored(store))
            if kept is not None and self._kept is not None:
                text.add(f"{kept} = {statements.value(self._kept)};")

    @property
    def _values(self) -> list[Expr]:
        return [*(store.value for store in self.stores), *(() if self._kept is None else (self._kept,))]

    def _takes(self, lane: Axis) -> bool:
        values = [store.value for store in self.stores]
        return in_lanes(lane, *values) and all(neighbours(store.offset, lane) == 1 for store in self.stores)
