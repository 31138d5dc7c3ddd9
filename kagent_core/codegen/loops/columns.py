"""Loops whose reductions run across memory: a block of neighbouring columns is reduced at once, one per lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import LoopNest, Store
from kagent_core.codegen.loops.form import by_stride
from kagent_core.codegen.loops.reductions import CHUNK, Accumulator
from kagent_core.codegen.loops.rows import Reducing
from kagent_core.codegen.writer import loads_of

COLUMNS = 128
"""Columns of a block."""

LEAST_COLUMNS = 4
"""Fewest columns that are worth lanes of their own."""


def column_axis(nest: LoopNest) -> Axis | None:
    """Return the outer axis along which memory is contiguous where the reductions read across it, or None."""
    along, across = 0, Counter[Axis]()
    for node in loads_of(*(store.value for store in nest.stores)):
        offset = node.payload.offset
        if offset.axes.intersection(nest.inner):
            along += any(offset.factor(axis) == 1 for axis in offset.axes if axis.reduced)
            across.update(axis for axis in nest.outer if offset.factor(axis) == 1)
    if along >= across.total():
        return None
    found = max(across, key=lambda axis: (across[axis], axis.extent))
    return found if found.extent >= LEAST_COLUMNS else None


class Columns(Reducing):
    """Blocks of neighbouring columns.

    Parameters
    ----------
    nest, language
        As for every form.
    lane
        The outer axis whose values are the columns.
    """

    def __init__(self, nest: LoopNest, language: CFamily, lane: Axis) -> None:
        super().__init__(nest, language)
        self.lane = lane

    def write(self) -> None:
        """Write the function's body."""
        lane, size = self.lane, self.size(self.lane)
        rest = [axis for axis in self.nest.outer if axis is not lane]
        outer = by_stride(rest, [load.offset for load in self.loads])
        opened = self.open_parallel(outer, self.row_steps() * lane.extent, [(lane, COLUMNS)])
        end = f"{lane.name}_0 + {COLUMNS}"
        self.text.add(f"const i64 {lane.name}_end = {end} < {size} ? {end} : {size};")
        for axes, nodes in self.passes:
            self._write_pass(axes, nodes)
        if self.row_stores:
            self._write_stores(self.row_stores, ())
        if self.full_stores:
            self._write_stores(self.full_stores, self.store_order())
        self.text.close(opened)

    @property
    def _lanes(self) -> str:
        name = self.lane.name
        return f"for (i64 {name} = {name}_0; {name} < {name}_end; {name}++) {{"

    @property
    def _place(self) -> str:
        return f"[{self.lane.name} - {self.lane.name}_0]"

    def _write_pass(self, all_axes: tuple[Axis, ...], nodes: Sequence[Expr]) -> None:
        axes = self.inner_order(all_axes)
        running = self.accumulators(nodes)
        for each in running:
            self._declare(each)
        known = set(self.statements.names)
        lines = self.statements.place([node.args[0] for node in nodes], [*({axis} for axis in axes), {self.lane}])
        self.text.add(*lines[0])
        in_parts = [each for each in running if each.in_parts and axes]
        for number, axis in enumerate(axes, 1):
            if number == len(axes) and in_parts:
                self._open_chunk(axis, in_parts)
            else:
                self.text.open(self.head(axis))
            self.text.add(*lines[number])
        self.open_lanes(self._lanes, lines[-1])
        for each in running:
            name = f"{each.name}_part" if each in in_parts else each.name
            self.text.add(*each.update(name, self.value_of(each.node), self._place))
        self.text.close()
        if in_parts:
            self.text.close()
            self._fold(in_parts)
        self.text.close(len(axes))
        self.forget_inside(known, {*all_axes, self.lane})
        self._finish(running)

    def _declare(self, each: Accumulator) -> None:
        self.text.add(f"{each.running_type} {each.name}[{COLUMNS}];")
        first = f"{each.name}[lane] = {each.first};"
        if each.tracks_nan:
            self.text.add(f"i32 {each.name}_nan[{COLUMNS}];")
            first += f" {each.name}_nan[lane] = 0;"
        self.text.add(f"for (i64 lane = 0; lane < {COLUMNS}; lane++) {{ {first} }}")

    def _open_chunk(self, axis: Axis, in_parts: Sequence[Accumulator]) -> None:
        self.text.open(self.block_head(axis, CHUNK))
        for each in in_parts:
            self.text.add(f"{each.type} {each.name}_part[{COLUMNS}];")
            self.text.add(f"for (i64 lane = 0; lane < {COLUMNS}; lane++) {{ {each.name}_part[lane] = 0; }}")
        self.text.open(self.within_block_head(axis, CHUNK))

    def _fold(self, in_parts: Sequence[Accumulator]) -> None:
        for each in in_parts:
            added = f"{each.name}[lane] += {each.name}_part[lane];"
            self.text.add(f"for (i64 lane = 0; lane < {COLUMNS}; lane++) {{ {added} }}")

    def _finish(self, running: Sequence[Accumulator]) -> None:
        for each in running:
            name = self.result_name(each.node)
            self.text.add(f"{each.type} {name}[{COLUMNS}];")
            result = each.result("[lane]")
            self.text.add(f"for (i64 lane = 0; lane < {COLUMNS}; lane++) {{ {name}[lane] = {result}; }}")
            self.statements.name(each.node, f"{name}{self._place}")

    def _write_stores(self, stores: Sequence[Store], axes: Sequence[Axis]) -> None:
        known = set(self.statements.names)
        lines = self.statements.place([store.value for store in stores], [*({axis} for axis in axes), {self.lane}])
        self.text.add(*lines[0])
        for number, axis in enumerate(axes, 1):
            self.text.open(self.head(axis))
            self.text.add(*lines[number])
        self.open_lanes(self._lanes, lines[-1])
        self.store_all(stores)
        self.text.close(1 + len(axes))
        self.forget_inside(known, {*axes, self.lane})
