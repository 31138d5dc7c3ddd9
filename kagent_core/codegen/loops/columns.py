"""Loops whose reductions run across memory: a block of neighbouring columns is reduced at once, one per lane."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import Expr, operands, walk
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import LoopNest, Store
from kagent_core.codegen.loops.form import by_stride
from kagent_core.codegen.loops.reducing import Reducing, parts_of
from kagent_core.codegen.loops.reductions import LANES, Accumulator
from kagent_core.codegen.reduced import COLUMNS
from kagent_core.codegen.writer import loads_of

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


SHARED_BYTES = 128 * 1024
"""Most bytes for what threads find in their parts, since it is the stack that they take: more values, fewer parts."""


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
        self._width = min(COLUMNS, -(-lane.extent // LANES) * LANES)
        self.array = f"[{self._width}]"
        self.place = f"[{lane.name} - {lane.name}_0]"
        self.lane_loops = ({lane},)

    def write(self) -> None:
        """Write the function's body."""
        lane, size = self.lane, self.size(self.lane)
        rest = [axis for axis in self.nest.outer if axis is not lane]
        outer = by_stride(rest, [load.offset for load in self.loads])
        blocks = -(-lane.extent // self._width) * math.prod(axis.extent for axis in outer)
        self._shared = self.shared_axis(blocks, self._width)
        if self._shared is None:
            opened = self.open_parallel(outer, self.nest.inner, self.passes_over_rows(), [(lane, self._width)])
        else:
            opened = len(outer) + 1
            for head in (*map(self.head, outer), self.block_head(lane, self._width)):
                self.text.open(head)
        end = f"{lane.name}_0 + {self._width}"
        self.text.add(f"const {self.language.index_type} {lane.name}_end = {end} < {size} ? {end} : {size};")
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
        return f"for ({self.language.index_type} {name} = {name}_0; {name} < {name}_end; {name}++) {{"

    def _write_plain(
        self, axes: Sequence[Axis], nodes: Sequence[Expr], shared: Axis | None, cut: tuple[int, int] | None
    ) -> None:
        if axes:
            self._hoist([node.args[0] for node in nodes])
        running = self.accumulators(nodes, cut)
        parts = 0
        if shared is not None:
            parts = self.shared_parts(shared, len(running))
            size = f"[{parts}][{self._width}]"
            self.text.add(*(f"{each.running_type} {each.name}_of{size};" for each in running))
        known = set(self.statements.names)
        lines = self.statements.place([node.args[0] for node in nodes], [*({axis} for axis in axes), {self.lane}])
        self.text.add(*lines[0])
        if shared is not None:
            self.open_parts(shared, parts)
        self._declare(running)
        self.open_pass(axes, cut, running, lines, vectors=False)
        self.open_lanes(self._lanes, lines[-1])
        for each in running:
            self.text.add(*each.update(self.value_of(each.node), self.place))
        self.text.close()
        self.close_pass(axes, cut, running)
        self.forget_inside(known, {*axes, self.lane})
        if shared is not None:
            for each in running:
                self._at_every_lane(f"{each.name}_of[part][lane] = {each.found('[lane]')};")
            self.close_parts(shared)
            self._combine(running, parts)
        self._finish(running)

    def _declare(self, running: Sequence[Accumulator]) -> None:
        for each in running:
            self.text.add(f"{each.running_type} {each.name}[{self._width}];")
            first = [f"{each.name}[lane] = {each.first};"]
            if each.tracks_nan:
                self.text.add(f"i32 {each.name}_nan[{self._width}];")
                first.append(f"{each.name}_nan[lane] = 0;")
            self._at_every_lane(*first)

    def _combine(self, running: Sequence[Accumulator], parts: int) -> None:
        """Reduce what threads have found in their parts, in order."""
        self._declare(running)
        self.text.open(f"for (i64 part = 0; part < {parts}; part++) {{")
        for each in running:
            self._at_every_lane(*each.combine(f"{each.name}_of[part][lane]", "[lane]"))
        self.text.close()

    def _at_every_lane(self, *statements: str) -> None:
        self.text.add(f"for (i64 lane = 0; lane < {self._width}; lane++) {{ {' '.join(statements)} }}")

    def declare_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Declare what chunks are summed up in."""
        self.text.add(*(f"{each.type} {each.taking}[{self._width}] = {{0}};" for each in in_chunks))

    def fold_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Add the sums of chunks to the sums."""
        for each in in_chunks:
            self._at_every_lane(f"{each.name}[lane] += {each.taking}[lane];")

    def _finish(self, running: Sequence[Accumulator]) -> None:
        for each in running:
            name = self.result_name(each.node)
            self.text.add(f"{each.type} {name}[{self._width}];")
            self._at_every_lane(f"{name}[lane] = {each.result('[lane]')};")
            self.statements.name(each.node, f"{name}{self.place}")

    # -- compound reductions

    def each_lane(self, statements: Sequence[str]) -> None:
        """Write statements that each column goes through by itself."""
        self.open_lanes(self._lanes, statements)
        self.text.close()

    def declare(self, kind: str, name: str, first: str) -> None:
        """Declare a value of every column."""
        self.text.add(f"{kind} {name}{self.array};")
        self._at_every_lane(f"{name}[lane] = {first};")

    def shared_parts(self, axis: Axis, values: int) -> int:
        """Return how many parts an axis is cut into that threads share: no more than the stack has room for."""
        return min(parts_of(axis), max(SHARED_BYTES // (8 * self._width * values), 1))

    def write_block_pass(self, axes: Sequence[Axis], nodes: Sequence[Expr], may_keep: bool) -> None:
        """Write one pass over a block."""
        self._write_plain(axes, nodes, None, None)

    def skip_block(self, unchanged: str) -> None:
        """Do nothing: one column or other nearly always changes."""

    def _hoist(self, values: Sequence[Expr]) -> None:
        """Compute what every step of the loops needs, but only depends on the column, once per column."""
        fixed = {node.number: node for node in walk(*values, into_reductions=False) if self._is_of_column(node)}
        varying = [node for node in walk(*values, into_reductions=False) if any(axis.reduced for axis in node.axes)]
        used = {arg.number for node in varying if node.op != "reduce" for arg in operands(node)}
        found = [node for number, node in fixed.items() if number in used]
        if not found:
            return
        names = [self.statements.fresh_name(self.nest.labels.get(node.number) or "column") for node in found]
        for node, name in zip(found, names, strict=True):
            self.text.add(f"{self.language.value_type(node.dtype)} {name}[{self._width}];")
        known = set(self.statements.names)
        before, inside = self.statements.place(found, [{self.lane}])
        self.text.add(*before)
        self.open_lanes(self._lanes, inside)
        for node, name in zip(found, names, strict=True):
            self.text.add(f"{name}{self.place} = {self.statements.value(node)};")
        self.text.close()
        self.forget_inside(known, {self.lane})
        for node, name in zip(found, names, strict=True):
            self.statements.name(node, f"{name}{self.place}")

    def _is_of_column(self, node: Expr) -> bool:
        plain = node.op in ("load", "constant", "index", "reduce") or node.number in self.statements.names
        return not plain and self.lane in node.axes and not any(axis.reduced for axis in node.axes)

    def _write_stores(self, stores: Sequence[Store], axes: Sequence[Axis]) -> None:
        if axes:
            self._hoist([store.value for store in stores])
        known = set(self.statements.names)
        lines = self.statements.place([store.value for store in stores], [*({axis} for axis in axes), {self.lane}])
        self.text.add(*lines[0])
        shared = self._shared if self._shared in axes else None
        if shared is not None:
            self.open_parts(shared, parts_of(shared))
        for number, axis in enumerate(axes, 1):
            self.text.open(self.head(axis))
            self.text.add(*lines[number])
        self.open_lanes(self._lanes, lines[-1])
        self.store_all(stores)
        self.text.close(1 + len(axes))
        if shared is not None:
            self.close_parts(shared)
        self.forget_inside(known, {*axes, self.lane})
