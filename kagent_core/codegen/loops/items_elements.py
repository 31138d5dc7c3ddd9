"""Work-items that reduce nothing: each computes elements of its own, vectors of neighbours where that can be.

Where a work-item is a loop of a processor's, it computes a piece of a line even where there can be no vectors: what its
elements have in common is computed once, their places need no division, and the compiler finds vectors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kagent_core.codegen.indices import Axis
from kagent_core.codegen.loops.form import by_stride
from kagent_core.codegen.loops.items_form import OnItems
from kagent_core.codegen.vectors import neighbours
from kagent_core.codegen.work_items import WorkItemLanguage


class ItemElements(OnItems):
    """Every item computes its own elements; neighbours in memory are neighbouring items, lanes, or steps of a loop."""

    def write(self) -> None:
        """Write the kernel's body."""
        stores = self.nest.stores
        values = [store.value for store in stores]
        axes = by_stride(self.nest.outer, [store.offset for store in stores])
        if axes and self.takes_lanes(axes[-1], values, stores):
            self._write_pieces(axes[:-1], axes[-1], self._write_line)
            return
        if axes and self._takes_loops(axes[-1]):
            self._write_pieces(axes[:-1], axes[-1], self._write_loop)
            return
        before, inside = self.statements.place(values, [set(axes)])
        self.text.add(*before)
        opened = self.open_parallel(axes, (), 1)
        self.text.add(*inside)
        self.store_all(stores)
        self.text.close(opened)

    def _takes_loops(self, lane: Axis) -> bool:
        """Whether a work-item loops over its elements though they are no vectors."""
        looping = isinstance(self.language, WorkItemLanguage) and self.language.vectors_per_item > 1
        return looping and bool(self.width) and lane.extent >= self.width

    def _write_pieces(
        self, outer: Sequence[Axis], lane: Axis, write_line: Callable[[Sequence[Axis], Axis], None]
    ) -> None:
        """Write items that each compute a piece of a line."""
        assert isinstance(self.language, WorkItemLanguage)
        across = self._across(outer, lane)
        piece = self.width * (self.language.vectors_per_item if across is None else 1)
        pieces = -(-lane.extent // piece)
        loops = [(axis.name, self.size(axis), axis.extent) for axis in outer if axis is not across]
        name, kind = f"{lane.name}_piece", self.language.index_type
        loops.append((name, self.parameters.size(pieces), pieces))
        if across is not None:
            loops.append((across.name, self.size(across), across.extent))
        opened = self.language.open_items(self.text, loops, 1)
        if pieces > 1:
            self.parameters.fits(pieces * piece)
            first, end, size = f"{lane.name}_first", f"{lane.name}_end", self.size(lane)
            last = f"{first} + {piece}"
            if lane.extent % piece:
                last = f"{last} < {size} ? {last} : {size}"
            self.text.add(f"const {kind} {first} = {name} * {piece}, {end} = {last};")
            self.limit(lane, first, end)
        self.items = pieces
        for axis in outer:
            self.items *= axis.extent
        write_line(outer, lane)
        self.text.close(opened)

    def _across(self, outer: Sequence[Axis], lane: Axis) -> Axis | None:
        """Return the axis along which the elements of a load are neighbours, where a line goes the other way.

        Items that follow each other along it find what they read in the cache, as long as their pieces are short.
        """
        for load in self.loads:
            if lane in load.offset.axes and neighbours(load.offset, lane) != 1:
                found = next((axis for axis in outer if neighbours(load.offset, axis) == 1), None)
                if found is not None:
                    return found
        return None

    def _write_line(self, outer: Sequence[Axis], lane: Axis) -> None:
        values = [store.value for store in self.nest.stores]
        with self.statements.lanes(lane):
            before = self.statements.place(values, [{lane}])[0]
        self.text.add(*before)
        for _ in self.lines(lane):
            self.text.add(*self.statements.place(values, [{lane}])[1])
            self.store_all(self.nest.stores)

    def _write_loop(self, outer: Sequence[Axis], lane: Axis) -> None:
        stores = self.nest.stores
        before, inside = self.statements.place([store.value for store in stores], [{lane}])
        self.text.add(*before)
        self.text.open(self.head(lane))
        self.text.add(*inside)
        self.store_all(stores)
        self.text.close()
