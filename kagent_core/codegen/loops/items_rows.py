"""Work-items that reduce: each goes over rows of its own, or over a vector of neighbouring columns.

Where a row lies along memory, its elements are dealt out to the lanes of a vector, whose running values are put
together at the end, halves with halves. Where rows lie across memory, every lane has a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import Store
from kagent_core.codegen.loops.columns import column_axis
from kagent_core.codegen.loops.form import by_stride
from kagent_core.codegen.loops.items_form import OnItems
from kagent_core.codegen.loops.items_lanes import LaneAccumulator, holds_rows_of, lane_accumulators
from kagent_core.codegen.loops.reductions import CHUNK, Accumulator, chunked
from kagent_core.codegen.loops.rows import Rows
from kagent_core.codegen.loops.states import is_compound
from kagent_core.codegen.vectors import sums_lanes


class ItemRows(OnItems, Rows):
    """Every item goes over rows of its own, in as many passes as their reductions need."""

    def write(self) -> None:
        """Write the kernel's body."""
        lane = self._column()
        rest = [axis for axis in self.nest.outer if axis is not lane]
        outer = by_stride(rest, [load.offset for load in self.loads])
        if lane is None:
            opened = self.open_parallel(outer, self.nest.inner, self.passes_over_rows())
            self._write_row()
            self.text.close(opened)
            return
        vectors, left = divmod(lane.extent, self.width)
        known = set(self.statements.names)
        self._open_columns(outer, lane, "0", self.width, vectors)
        with self.statements.lanes(lane):
            self._write_row()
        self.text.close()
        if left:
            for number in [number for number in self.statements.names if number not in known]:
                del self.statements.names[number]
            self._open_columns(outer, lane, self.parameters.size(vectors * self.width), 1, left)
            self._write_row()
            self.text.close()
        self.items = math.prod(axis.extent for axis in outer) * max(vectors, left)

    def shared_axis(self, rows: int, lanes: int) -> Axis | None:
        """Return None: items do not share rows."""
        return None

    def _declare_kept(self) -> dict[int, tuple[str, Expr]]:
        # a work-item has registers, and no memory of its own that would be quicker than computing a value again
        return {}

    def _write_row(self) -> None:
        self._shared, self._kept, self._filled = None, {}, set()
        for axes, nodes in self.passes:
            self._write_pass(axes, nodes)
        if self.row_stores:
            self.text.add(*self.statements.place([store.value for store in self.row_stores], [])[0])
            self.store_all(self.row_stores)
        if self.full_stores:
            self._write_full_stores(self.full_stores)

    # -- columns

    def _column(self) -> Axis | None:
        """Return the outer axis along which neighbouring rows are lanes of a vector, if there is one."""
        lane = column_axis(self.nest) if self.passes else None
        reductions = [node for _, nodes in self.passes for node in nodes]
        if lane is None or any(is_compound(node) for node in reductions):
            return None
        values = [store.value for store in self.nest.stores] + [node.args[0] for node in reductions]
        return lane if self.takes_lanes(lane, values, self.nest.stores) else None

    def _open_columns(self, outer: Sequence[Axis], lane: Axis, first: str, step: int, count: int) -> None:
        """Open the items' loop over columns, or over vectors of them."""
        name = f"{lane.name}_{'vector' if step > 1 else 'left'}"
        loops = [(axis.name, self.size(axis), axis.extent) for axis in outer]
        self.language.open_items(self.text, [*loops, (name, self.parameters.size(count), count)], 1)
        place = name if step == 1 else f"{name} * {step}"
        place = place if first == "0" else f"{first} + {place}"
        self.text.add(f"const {self.language.index_type} {lane.name} = {place};")

    def accumulators(self, nodes: Sequence[Expr], cut: tuple[int, int] | None) -> list[Accumulator]:
        """Return a running value for each reduction of a pass: of columns, one in each lane."""
        made = super().accumulators(nodes, cut)
        return [
            LaneAccumulator(each.node, each.name, cut is not None, self.language)
            if self.statements.is_vector(each.node)
            else each
            for each in made
        ]

    def _declare(self, running: Sequence[Accumulator]) -> None:
        for each in running:
            if isinstance(each, LaneAccumulator):
                self.text.add(*each.declared())
            else:
                super()._declare([each])

    def declare_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Declare what chunks are summed up in."""
        for each in in_chunks:
            if isinstance(each, LaneAccumulator):
                self.text.add(each.declared_chunk())
            else:
                super().declare_chunks([each])

    def fold_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Add the sums of chunks to the sums."""
        for each in in_chunks:
            if isinstance(each, LaneAccumulator):
                self.text.add(each.folded())
            else:
                super().fold_chunks([each])

    def value_of(self, node: Expr) -> str:
        """Return what a reduction takes in, as a text that may be repeated."""
        statements = self.statements
        of_vectors = statements.is_vector(node) or statements.is_vector(node.args[0])
        return self.taken(node) if of_vectors else super().value_of(node)

    # -- rows

    def _write_pass(self, all_axes: tuple[Axis, ...], nodes: Sequence[Expr]) -> None:
        axes = self.inner_order(all_axes)
        plain = [node for node in nodes if not is_compound(node)]
        if plain:
            lanes = self.width if self._takes_row(axes, plain) else 1
            self._write_plain(axes, plain, None, chunked(axes, CHUNK * lanes))
        compounds = [node for node in nodes if is_compound(node)]
        if compounds:
            self.write_compounds(axes, compounds, None, CHUNK * max(self.width, 1))

    def _takes_row(self, axes: Sequence[Axis], nodes: Sequence[Expr]) -> bool:
        """Whether a pass can deal out the elements of a row to lanes."""
        if not axes or self.statements.lane is not None or not all(map(sums_lanes, nodes)):
            return False
        values = [node.args[0] for node in nodes]
        return self.takes_lanes(axes[-1], values) and not holds_rows_of(axes[-1], values)

    def _write_plain(
        self,
        axes: Sequence[Axis],
        nodes: Sequence[Expr],
        shared: Axis | None,
        cut: tuple[int, int] | None,
        may_keep: bool = True,
    ) -> None:
        if not self._takes_row(axes, nodes):
            super()._write_plain(axes, nodes, shared, cut, may_keep)
            return
        known = set(self.statements.names)
        running = self.accumulators(nodes, cut)
        lanes = lane_accumulators(running, self.language)
        with self.statements.lanes(axes[-1]):
            lines = self.statements.place([node.args[0] for node in nodes], [{axis} for axis in axes])
        self.text.add(*lines[0])
        self._declare(running)
        self._declare([each for each in lanes if not each.in_chunks])
        self._write_row_loops(axes, cut, running, lanes, lines)
        self.forget_inside(known, axes)
        for each, of_lanes in zip(running, lanes, strict=True):
            if not each.in_chunks:
                self.text.add(*of_lanes.over_lanes(each))
            name = self.result_name(each.node)
            self.text.add(f"const {each.type} {name} = {each.result()};")
            self.statements.name(each.node, name)

    def _write_row_loops(
        self,
        axes: Sequence[Axis],
        cut: tuple[int, int] | None,
        running: Sequence[Accumulator],
        lanes: Sequence[LaneAccumulator],
        lines: Sequence[Sequence[str]],
    ) -> None:
        in_chunks = [each for each in (*lanes, *running) if each.in_chunks]
        has_rest = axes[-1].extent % self.width != 0
        if not has_rest:
            in_chunks = [each for each in in_chunks if isinstance(each, LaneAccumulator)]
        position, step = cut if cut is not None and in_chunks else (-1, 0)
        for number, axis in enumerate(axes):
            if number == position and step > 1:
                self.open_block(axis, step)
                self.declare_chunks(in_chunks)
            if number == len(axes) - 1:
                self._write_row_line(axis, axes, running, lanes)
                continue
            self.text.open(self.head(axis))
            if number == position and step == 1:
                self.declare_chunks(in_chunks)
            self.text.add(*lines[number + 1])
        for number in reversed(range(len(axes))):
            if number < len(axes) - 1:
                if number == position and step == 1:
                    self._fold_row(running, lanes, has_rest)
                self.text.close()
            if number == position and step > 1:
                self._fold_row(running, lanes, has_rest)
                self.close_block(axes[number])

    def _write_row_line(
        self,
        lane: Axis,
        axes: Sequence[Axis],
        running: Sequence[Accumulator],
        lanes: Sequence[LaneAccumulator],
    ) -> None:
        values = [each.node.args[0] for each in running]
        for vectors in self.lines(lane):
            self.text.add(*self.statements.place(values, [{axis} for axis in axes])[-1])
            for each in lanes if vectors else running:
                self.text.add(*each.update(self.value_of(each.node)))

    def _fold_row(self, running: Sequence[Accumulator], lanes: Sequence[LaneAccumulator], has_rest: bool) -> None:
        for each, of_lanes in zip(running, lanes, strict=True):
            if each.in_chunks:
                self.text.add(*of_lanes.over_lanes(each))
                if has_rest:
                    super().fold_chunks([each])

    def _write_full_stores(self, stores: Sequence[Store]) -> None:
        axes = self.store_order()
        values = [store.value for store in stores]
        alone = self.statements.lane is None and axes
        if not alone or not self.takes_lanes(axes[-1], values, stores) or holds_rows_of(axes[-1], values):
            super()._write_full_stores(stores)
            return
        loops = [{axis} for axis in axes]
        with self.statements.lanes(axes[-1]):
            lines = self.statements.place(values, loops)
        self.text.add(*lines[0])
        for number, axis in enumerate(axes[:-1], 1):
            self.text.open(self.head(axis))
            self.text.add(*lines[number])
        for _ in self.lines(axes[-1]):
            self.text.add(*self.statements.place(values, loops)[-1])
            self.store_all(stores)
        self.text.close(len(axes) - 1)
