"""Work-items that reduce nothing: each computes elements of its own, vectors of neighbours where that can be."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.codegen.indices import Axis
from kagent_core.codegen.loops.form import by_stride
from kagent_core.codegen.loops.items_form import OnItems
from kagent_core.codegen.work_items import WorkItemLanguage


class ItemElements(OnItems):
    """Every item computes elements of its own; neighbours in memory are neighbouring items, or lanes of a vector."""

    def write(self) -> None:
        """Write the kernel's body."""
        stores = self.nest.stores
        values = [store.value for store in stores]
        axes = by_stride(self.nest.outer, [store.offset for store in stores])
        if axes and self.takes_lanes(axes[-1], values, stores):
            self._write_vectors(axes[:-1], axes[-1])
            return
        before, inside = self.statements.place(values, [set(axes)])
        self.text.add(*before)
        opened = self.open_parallel(axes, (), 1)
        self.text.add(*inside)
        self.store_all(stores)
        self.text.close(opened)

    def _write_vectors(self, outer: Sequence[Axis], lane: Axis) -> None:
        """Write items that each compute a piece of a line."""
        assert isinstance(self.language, WorkItemLanguage)
        piece = self.width * self.language.vectors_per_item
        pieces = -(-lane.extent // piece)
        loops = [(axis.name, self.size(axis), axis.extent) for axis in outer]
        name, kind = f"{lane.name}_piece", self.language.index_type
        opened = self.language.open_items(self.text, [*loops, (name, self.parameters.size(pieces), pieces)], 1)
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
        self._write_line(outer, lane)
        self.text.close(opened)

    def _write_line(self, outer: Sequence[Axis], lane: Axis) -> None:
        values = [store.value for store in self.nest.stores]
        with self.statements.lanes(lane):
            before = self.statements.place(values, [{lane}])[0]
        self.text.add(*before)
        for _ in self.lines(lane):
            self.text.add(*self.statements.place(values, [{lane}])[1])
            self.store_all(self.nest.stores)
