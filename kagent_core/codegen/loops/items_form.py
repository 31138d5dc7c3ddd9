"""What forms of work-items have in common: independent loops are items, and vectors are spelled out.

A line of elements along a lane is computed vector by vector, and what is left at its end one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import KernelSource, LoopNest, Store
from kagent_core.codegen.loops.form import Form
from kagent_core.codegen.loops.half_values import half_values
from kagent_core.codegen.loops.items_lanes import LaneStatements, vectors_of
from kagent_core.codegen.loops.reductions import EXTREMES
from kagent_core.codegen.text import bare
from kagent_core.codegen.vectors import begins_evenly, in_lanes, neighbours
from kagent_core.codegen.writer import loads_of


class OnItems(Form):
    """Parallel loops are items."""

    def __init__(self, nest: LoopNest, language: CFamily) -> None:
        super().__init__(nest, language)
        self.vectors = vectors_of(language)
        halves = half_values(self.nest.stores, self.vectors.half_arithmetic if self.vectors is not None else ())
        self.statements: LaneStatements = LaneStatements(language, self.parameters, self.nest.labels, halves)
        self.items: int | None = None

    def source(self, name: str) -> KernelSource:
        """Return the kernel."""
        made = super().source(name)
        return made if self.items is None else replace(made, items=self.items)

    def open_parallel(
        self, axes: Sequence[Axis], inside: Sequence[Axis], cost: int, blocked: Sequence[tuple[Axis, int]] = ()
    ) -> int:
        """Open a work-item's loop over its share of the steps."""
        if blocked:
            raise ValueError("work-items take no blocks")
        named = [(axis.name, self.size(axis), axis.extent) for axis in axes]
        return self.language.open_items(self.text, named, cost)

    def open_lanes(self, head: str, lines: Iterable[str], clauses: str = "") -> None:
        """Open an innermost loop."""
        self.text.open(head)
        self.text.add(*lines)

    # -- vectors

    @property
    def width(self) -> int:
        """Elements of a vector; 0 where there are no vectors."""
        return self.vectors.width if self.vectors is not None else 0

    def takes_lanes(self, lane: Axis, values: Sequence[Expr], stores: Sequence[Store] = ()) -> bool:
        """Whether values along an axis, and what stores them, can be vectors, of which there is at least one."""
        if not self.width or lane.extent < self.width or not in_lanes(lane, *values):
            return False
        if not all(neighbours(store.offset, lane) == 1 for store in stores):
            return False
        return not (self.vectors and self.vectors.even_lines) or self._begin_evenly(lane, values, stores)

    def _begin_evenly(self, lane: Axis, values: Sequence[Expr], stores: Sequence[Store]) -> bool:
        places = [(store.tensor, store.offset) for store in stores]
        places += [(node.payload.tensor, node.payload.offset) for node in loads_of(*values)]
        return all(
            begins_evenly(offset + tensor.storage_offset, lane, self.width)
            for tensor, offset in places
            if lane in offset.axes
        )

    def limit(self, axis: Axis, first: str, end: str) -> None:
        """Limit the loops over an axis that are opened from here on."""
        self._bounds[axis] = (first, end)

    def lines(self, lane: Axis) -> Iterator[bool]:
        """Write loops along an axis, within its block: over vectors, then over the elements that are left.

        Yields once in each loop whether its steps are vectors.
        """
        name, width, kind = lane.name, self.width, self.language.index_type
        first, end = self._ends(lane)
        self.parameters.fits(lane.extent + width)
        with self.statements.lanes(lane):
            self.text.open(f"for ({kind} {name} = {first}; {name} + {width} <= {end}; {name} += {width}) {{")
            yield True
            self.text.close()
        if lane.extent % width:
            self.text.open(f"for ({kind} {name} = {end} / {width} * {width}; {name} < {end}; {name}++) {{")
            yield False
            self.text.close()
            self.statements.forget({lane})

    def taken(self, node: Expr) -> str:
        """Return the vector that a reduction takes in, as a text that may be repeated."""
        statements = self.statements
        value = statements.vector(node.args[0])
        if node.payload.kind not in EXTREMES or value.isidentifier():
            return value
        name = statements.fresh_name("taken")
        self.text.add(f"const {statements.spelling.kind(node.dtype)} {name} = {bare(value)};")
        return name

    def store(self, store: Store) -> None:
        """Write the statement of a store."""
        self.text.add(self.statements.stored(store))
