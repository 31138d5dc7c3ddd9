"""Loops whose reductions run along memory: row by row, in as many passes as the reductions need."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis, Index
from kagent_core.codegen.kernel import LoopNest, Store
from kagent_core.codegen.loops.form import Form, by_stride
from kagent_core.codegen.loops.reductions import CHUNK, Accumulator, passes
from kagent_core.codegen.primitives import PRIMITIVES

ROW_CHUNK = 16 * CHUNK
"""Elements of a row that are summed up in float32: each lane of a vector takes its share."""

KEPT_ELEMENTS = 8192
"""Longest row whose costly values are kept from one pass to the next, in memory of the thread's own."""

KEPT_COST = 8
"""What a value costs at least to be kept."""


class Reducing(Form):
    """What rows and columns have in common."""

    def __init__(self, nest: LoopNest, language: CFamily) -> None:
        super().__init__(nest, language)
        values = [store.value for store in nest.stores]
        self.passes = list(passes([node for node in walk(*values) if node.op == "reduce"]))
        self.row_stores = [store for store in nest.stores if store.per_row]
        self.full_stores = [store for store in nest.stores if not store.per_row]

    def row_steps(self) -> int:
        """Steps of the inner loops of one row, all passes together."""
        steps = sum(math.prod(axis.extent for axis in axes) for axes, _ in self.passes)
        return steps + (math.prod(axis.extent for axis in self.nest.inner) if self.full_stores else 0)

    def inner_order(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """Return loop variables in the order in which the loads walk memory."""
        return by_stride([axis for axis in axes if axis.extent > 1], [load.offset for load in self.loads])

    def store_order(self) -> tuple[Axis, ...]:
        """Return the inner loop variables in the order in which the stores walk memory."""
        axes = [axis for axis in self.nest.inner if axis.extent > 1]
        return by_stride(axes, [store.offset for store in self.full_stores])

    def accumulators(self, nodes: Sequence[Expr]) -> list[Accumulator]:
        """Return a running value for each reduction of a pass."""
        names = [self.statements.fresh_name(f"{node.payload.kind}_so_far") for node in nodes]
        return [Accumulator(node, name, self.language) for node, name in zip(nodes, names, strict=True)]

    def value_of(self, node: Expr) -> str:
        """Return what a reduction takes in, as a text that may be repeated."""
        value = self.statements.value(node.args[0])
        if node.payload.kind not in ("max", "min") or value.isidentifier():
            return value
        name = self.statements.fresh_name("taken")
        self.text.add(f"const {self.language.value_type(node.dtype)} {name} = {value};")
        return name

    def result_name(self, node: Expr) -> str:
        """Return a name for a reduction's value."""
        return self.statements.fresh_name(self.nest.labels.get(node.number) or f"row_{node.payload.kind}")


class Rows(Reducing):
    """Every row goes through its passes while it is in cache."""

    def write(self) -> None:
        """Write the function's body."""
        outer = by_stride(self.nest.outer, [load.offset for load in self.loads])
        opened = self.open_parallel(outer, self.row_steps())
        self._kept = self._declare_kept()
        self._filled: set[int] = set()
        for axes, nodes in self.passes:
            self._write_pass(axes, nodes)
        if self.row_stores:
            self.text.add(*self.statements.place([store.value for store in self.row_stores], [])[0])
            self.store_all(self.row_stores)
        if self.full_stores:
            self._write_full_stores(self.full_stores)
        self.text.close(opened)

    def _write_pass(self, all_axes: tuple[Axis, ...], nodes: Sequence[Expr]) -> None:
        axes = self.inner_order(all_axes)
        values = [node.args[0] for node in nodes]
        to_keep = self._to_keep(values)
        known = set(self.statements.names)
        lines = self.statements.place([*values, *to_keep], [{axis} for axis in axes])
        self.text.add(*lines[0])
        running = self.accumulators(nodes)
        for each in running:
            self.text.add(f"{each.running_type} {each.name} = {each.first};")
            if each.tracks_nan:
                self.text.add(f"i32 {each.name}_nan = 0;")
        for number, axis in enumerate(axes[:-1], 1):
            self.text.open(self.head(axis))
            self.text.add(*lines[number])
        if axes:
            self._write_innermost(axes[-1], running, lines[-1], to_keep)
        else:
            self._take_in(running, {})
        self.text.close(max(len(axes) - 1, 0))
        self.forget_inside(known, all_axes)
        self._filled.update(node.number for node in to_keep)
        for each in running:
            name = self.result_name(each.node)
            self.text.add(f"const {each.type} {name} = {each.result()};")
            self.statements.name(each.node, name)

    def _write_innermost(
        self, axis: Axis, running: Sequence[Accumulator], lines: Sequence[str], to_keep: Sequence[Expr]
    ) -> None:
        parts = {each.name: f"{each.name}_part" for each in running if each.in_parts}
        if parts:
            self.text.open(self.block_head(axis, ROW_CHUNK))
            for each in running:
                if each.in_parts:
                    self.text.add(f"{each.type} {parts[each.name]} = 0;")
        clauses = "".join(each.clauses(parts.get(each.name, each.name)) for each in running)
        head = self.within_block_head(axis, ROW_CHUNK) if parts else self.head(axis)
        self.open_lanes(head, lines, clauses)
        for value in to_keep:
            self.text.add(f"{self._kept_place(value)} = {self.statements.value(value)};")
        self._take_in(running, parts)
        self.text.close()
        if parts:
            self.text.add(*(f"{name} += {part};" for name, part in parts.items()))
            self.text.close()

    def _take_in(self, running: Sequence[Accumulator], parts: dict[str, str]) -> None:
        for each in running:
            self.text.add(*each.update(parts.get(each.name, each.name), self.value_of(each.node)))

    def _write_full_stores(self, stores: Sequence[Store]) -> None:
        axes = self.store_order()
        values = [store.value for store in stores]
        self._use_kept(values)
        lines = self.statements.place(values, [{axis} for axis in axes])
        self.text.add(*lines[0])
        for number, axis in enumerate(axes[:-1], 1):
            self.text.open(self.head(axis))
            self.text.add(*lines[number])
        if axes:
            self.open_lanes(self.head(axes[-1]), lines[-1])
        self.store_all(stores)
        self.text.close(len(axes))

    # -- costly values that more than one pass needs

    def _declare_kept(self) -> dict[int, tuple[str, Expr]]:
        inner = self.nest.inner
        if not 1 < math.prod(axis.extent for axis in inner) <= KEPT_ELEMENTS:
            return {}
        kept: dict[int, tuple[str, Expr]] = {}
        for node in self._costly_in_common():
            name = self.statements.fresh_name("kept")
            size = " * ".join(self.size(axis) for axis in inner)
            self.text.add(f"{self.language.value_type(node.dtype)} {name}[{size}];")
            kept[node.number] = (name, node)
        return kept

    def _costly_in_common(self) -> list[Expr]:
        """Return the largest costly expressions that several passes compute at every step."""
        roots = [[node.args[0] for node in nodes] for axes, nodes in self.passes if axes == self.nest.inner]
        roots.append([store.value for store in self.full_stores])
        computed = [{node.number: node for node in walk(*values, into_reductions=False)} for values in roots]
        common: dict[int, Expr] = {}
        for number, nodes in enumerate(computed):
            for later in computed[number + 1 :]:
                common.update((key, node) for key, node in nodes.items() if key in later)
        costly = [
            node
            for node in common.values()
            if node.axes.intersection(self.nest.inner) and node.op != "reduce" and _cost_per_step(node) >= KEPT_COST
        ]
        inside = {n.number for node in costly for n in walk(node, into_reductions=False) if n is not node}
        return [node for node in costly if node.number not in inside]

    def _to_keep(self, values: Sequence[Expr]) -> list[Expr]:
        """Return what a pass computes for the later ones; what is kept already it reads."""
        self._use_kept(values)
        here = {node.number for node in walk(*values, into_reductions=False)}
        return [node for number, (_, node) in self._kept.items() if number in here and number not in self._filled]

    def _use_kept(self, values: Sequence[Expr]) -> None:
        for number in self._filled:
            self.statements.name(self._kept[number][1], self._kept_place(self._kept[number][1]))

    def _kept_place(self, node: Expr) -> str:
        position = Index()
        for axis in self.nest.inner:
            position = position * axis.extent + Index.of(axis)
        return f"{self._kept[node.number][0]}[{self.parameters.index(position, self.statements.value)}]"


def _cost_per_step(node: Expr) -> int:
    """Return what a value costs at each step of the inner loops."""
    steps = (n for n in walk(node, into_reductions=False) if any(axis.reduced for axis in n.axes))
    return sum(PRIMITIVES[n.op].cost for n in steps if n.op in PRIMITIVES)
