"""Loops whose reductions run along memory: row by row, in as many passes as the reductions need."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from kagent_core.codegen.c_family import GRAIN, CFamily
from kagent_core.codegen.dtypes import NBITS, compute_dtype
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis, Index
from kagent_core.codegen.kernel import LoopNest, Store
from kagent_core.codegen.loops.form import Form, by_stride
from kagent_core.codegen.loops.reductions import CHUNK, EXTREMES, LANES, PARTS, Accumulator, chunked, passes
from kagent_core.codegen.primitives import PRIMITIVES
from kagent_core.codegen.text import bare

ROW_CHUNK = LANES * CHUNK
"""Elements of a row that are summed up in their own type: each lane of a vector takes its share."""

FEW_ROWS = 16
"""Rows below which threads share each row, if it is long, rather than take rows of their own."""

KEPT_ELEMENTS = 8192
"""Longest row whose costly values are kept from one pass to the next, in memory of the thread's own."""

KEPT_BYTES = 128 * 1024
"""Most bytes that are kept at once, since it is the stack that they take, and a thread may have little."""

KEPT_COST = 8
"""What a value costs at least to be kept."""


class Reducing(Form):
    """What rows and columns have in common."""

    def __init__(self, nest: LoopNest, language: CFamily) -> None:
        super().__init__(nest, language)
        stores = self.nest.stores
        values = [store.value for store in stores]
        self.passes = list(passes([node for node in walk(*values) if node.op == "reduce"]))
        self.row_stores = [store for store in stores if store.per_row]
        self.full_stores = [store for store in stores if not store.per_row]

    def passes_over_rows(self) -> int:
        """Return how often the inner loops run for one row."""
        return len(self.passes) + bool(self.full_stores)

    def shared_axis(self, rows: int, lanes: int) -> Axis | None:
        """Return the axis of few, long rows of which each thread takes a part; None where threads take rows.

        Parameters
        ----------
        rows
            Rows, or blocks of columns.
        lanes
            Elements that one step of the inner loops takes.
        """
        inner = self.nest.inner
        if rows >= FEW_ROWS or lanes * math.prod(axis.extent for axis in inner) < 2 * GRAIN:
            return None
        return max(inner, key=lambda axis: axis.extent)

    def inner_order(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """Return loop variables in the order in which the loads walk memory."""
        return by_stride([axis for axis in axes if axis.extent > 1], [load.offset for load in self.loads])

    def store_order(self) -> tuple[Axis, ...]:
        """Return the inner loop variables in the order in which the stores walk memory."""
        axes = [axis for axis in self.nest.inner if axis.extent > 1]
        return by_stride(axes, [store.offset for store in self.full_stores])

    def accumulators(self, nodes: Sequence[Expr], cut: tuple[int, int] | None) -> list[Accumulator]:
        """Return a running value for each reduction of a pass."""
        names = [self.statements.fresh_name(f"{node.payload.kind}_so_far") for node in nodes]
        return [
            Accumulator(node, name, cut is not None, self.language) for node, name in zip(nodes, names, strict=True)
        ]

    def open_pass(
        self,
        axes: Sequence[Axis],
        cut: tuple[int, int] | None,
        running: Sequence[Accumulator],
        lines: Sequence[Sequence[str]],
        vectors: bool,
    ) -> None:
        """Open the loops of a pass.

        Parameters
        ----------
        axes
            Outermost first.
        cut
            Where sums are cut into chunks, as `chunked` found it.
        running
            The running values.
        lines
            Statements for before the loops, which are written already, and for inside each.
        vectors
            Whether the innermost loop's steps are lanes of a vector.
        """
        in_chunks = [each for each in running if each.in_chunks]
        position, step = cut if cut is not None and in_chunks else (-1, 0)
        for number, axis in enumerate(axes):
            head = self.head(axis)
            if number == position and step > 1:
                self.text.open(self.block_head(axis, step))
                self.declare_chunks(in_chunks)
                head = self.within_block_head(axis, step)
            if vectors and number == len(axes) - 1:
                self.open_lanes(head, lines[number + 1], "".join(each.clauses() for each in running))
                continue
            self.text.open(head)
            if number == position and step == 1:
                self.declare_chunks(in_chunks)
            self.text.add(*lines[number + 1])

    def close_pass(self, axes: Sequence[Axis], cut: tuple[int, int] | None, running: Sequence[Accumulator]) -> None:
        """Close what `open_pass` opened."""
        in_chunks = [each for each in running if each.in_chunks]
        if cut is None or not in_chunks:
            self.text.close(len(axes))
            return
        position, step = cut
        inside = len(axes) - position - (step == 1)
        self.text.close(inside)
        self.fold_chunks(in_chunks)
        self.text.close(len(axes) - inside + (step > 1))

    @abstractmethod
    def declare_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Declare what chunks are summed up in."""

    @abstractmethod
    def fold_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Add the sums of chunks to the sums."""

    def value_of(self, node: Expr) -> str:
        """Return what a reduction takes in, as a text that may be repeated."""
        value = self.statements.value(node.args[0])
        if node.payload.kind not in EXTREMES or value.isidentifier():
            return value
        name = self.statements.fresh_name("taken")
        self.text.add(f"const {self.language.value_type(node.dtype)} {name} = {bare(value)};")
        return name

    def result_name(self, node: Expr) -> str:
        """Return a name for a reduction's value."""
        return self.statements.fresh_name(self.nest.labels.get(node.number) or f"row_{node.payload.kind}")


class Rows(Reducing):
    """Every row goes through its passes while it is in cache."""

    def write(self) -> None:
        """Write the function's body."""
        outer = by_stride(self.nest.outer, [load.offset for load in self.loads])
        self._shared = self.shared_axis(math.prod(axis.extent for axis in outer), 1)
        if self._shared is None:
            opened = self.open_parallel(outer, self.nest.inner, self.passes_over_rows())
        else:
            opened = len(outer)
            for axis in outer:
                self.text.open(self.head(axis))
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
        cut = chunked(axes, ROW_CHUNK)
        values = [node.args[0] for node in nodes]
        to_keep = self._to_keep(values)
        known = set(self.statements.names)
        lines = self.statements.place([*values, *to_keep], [{axis} for axis in axes])
        self.text.add(*lines[0])
        running = self.accumulators(nodes, cut)
        shared = self._shared if self._shared in axes else None
        if shared is not None:
            self.text.add(*(f"{each.running_type} {each.name}_of[{parts_of(shared)}];" for each in running))
            self.open_parts(shared, parts_of(shared))
        self._declare(running)
        self.open_pass(axes, cut, running, lines, vectors=True)
        for value in to_keep:
            self.text.add(f"{self._kept_place(value)} = {self.statements.value(value)};")
        for each in running:
            self.text.add(*each.update(self.value_of(each.node)))
        self.close_pass(axes, cut, running)
        self.forget_inside(known, all_axes)
        if shared is not None:
            self.text.add(*(f"{each.name}_of[part] = {each.found()};" for each in running))
            self.close_parts(shared)
            self._combine(running, parts_of(shared))
        self._filled.update(node.number for node in to_keep)
        for each in running:
            name = self.result_name(each.node)
            self.text.add(f"const {each.type} {name} = {each.result()};")
            self.statements.name(each.node, name)

    def _declare(self, running: Sequence[Accumulator]) -> None:
        for each in running:
            self.text.add(f"{each.running_type} {each.name} = {each.first};")
            if each.tracks_nan:
                self.text.add(f"i32 {each.name}_nan = 0;")

    def _combine(self, running: Sequence[Accumulator], parts: int) -> None:
        """Reduce what threads have found in their parts, in order."""
        self._declare(running)
        self.text.open(f"for (i64 part = 0; part < {parts}; part++) {{")
        for each in running:
            self.text.add(*each.combine(f"{each.name}_of[part]"))
        self.text.close()

    def declare_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Declare what chunks are summed up in."""
        self.text.add(*(f"{each.type} {each.taking} = 0;" for each in in_chunks))

    def fold_chunks(self, in_chunks: Sequence[Accumulator]) -> None:
        """Add the sums of chunks to the sums."""
        self.text.add(*(f"{each.name} += {each.taking};" for each in in_chunks))

    def _write_full_stores(self, stores: Sequence[Store]) -> None:
        axes = self.store_order()
        values = [store.value for store in stores]
        self._use_kept()
        lines = self.statements.place(values, [{axis} for axis in axes])
        self.text.add(*lines[0])
        shared = self._shared if self._shared in axes else None
        if shared is not None:
            self.open_parts(shared, parts_of(shared))
        for number, axis in enumerate(axes[:-1], 1):
            self.text.open(self.head(axis))
            self.text.add(*lines[number])
        if axes:
            self.open_lanes(self.head(axes[-1]), lines[-1])
        self.store_all(stores)
        self.text.close(len(axes))
        if shared is not None:
            self.close_parts(shared)

    # -- costly values that more than one pass needs

    def _declare_kept(self) -> dict[int, tuple[str, Expr]]:
        inner = self.nest.inner
        if not 1 < math.prod(axis.extent for axis in inner) <= KEPT_ELEMENTS:
            return {}
        kept: dict[int, tuple[str, Expr]] = {}
        left = KEPT_BYTES
        for node in self._costly_in_common():
            left -= self._nbytes(node)
            if left < 0:
                break
            name = self.statements.fresh_name("kept")
            size = " * ".join(self.size(axis) for axis in self._own_axes(node))
            self.text.add(f"{self.language.value_type(node.dtype)} {name}[{size}];")
            kept[node.number] = (name, node)
        return kept

    def _costly_in_common(self) -> list[Expr]:
        """Return the largest costly expressions that several passes compute at every step."""
        roots = [[node.args[0] for node in nodes] for axes, nodes in self.passes if axes == self.nest.inner]
        roots.append([store.value for store in self.full_stores])
        computed = [{node.number: node for node in walk(*values, into_reductions=False)} for values in roots]
        found: dict[int, Expr] = {}
        for number, nodes in enumerate(computed):
            later = {key for others in computed[number + 1 :] for key in others}
            costly = [
                node
                for key, node in nodes.items()
                if key in later
                and node.axes.intersection(self.nest.inner)
                and node.op != "reduce"
                and _cost_per_step(node, found) >= KEPT_COST
            ]
            inside = {n.number for node in costly for n in walk(node, into_reductions=False) if n is not node}
            found.update((node.number, node) for node in costly if node.number not in inside)
        return list(found.values())

    def _to_keep(self, values: Sequence[Expr]) -> list[Expr]:
        """Return what a pass computes for the later ones; what is kept already it reads."""
        self._use_kept()
        here = {node.number for node in walk(*values, into_reductions=False)}
        return [node for number, (_, node) in self._kept.items() if number in here and number not in self._filled]

    def _use_kept(self) -> None:
        for number in self._filled:
            self.statements.name(self._kept[number][1], self._kept_place(self._kept[number][1]))

    def _nbytes(self, node: Expr) -> int:
        wide = NBITS[compute_dtype(node.dtype)] == 64
        return (8 if wide else 4) * math.prod(axis.extent for axis in self._own_axes(node))

    def _own_axes(self, node: Expr) -> list[Axis]:
        """Return the inner loop variables that a value depends on: it may be computed outside the other loops."""
        return [axis for axis in self.nest.inner if axis in node.axes]

    def _kept_place(self, node: Expr) -> str:
        position = Index()
        for axis in self._own_axes(node):
            position = position * axis.extent + Index.of(axis)
        return f"{self._kept[node.number][0]}[{self.parameters.index(position, self.statements.value)}]"


def parts_of(axis: Axis) -> int:
    """Return how many parts an axis is cut into that threads share."""
    return min(PARTS, axis.extent)


def _cost_per_step(node: Expr, kept: Mapping[int, Expr]) -> int:
    """Return what a value costs at each step of the inner loops, where some values are kept already."""
    free = {n.number for other in kept.values() for n in walk(other, into_reductions=False)}
    steps = (n for n in walk(node, into_reductions=False) if any(axis.reduced for axis in n.axes))
    return sum(PRIMITIVES[n.op].cost for n in steps if n.op in PRIMITIVES and n.number not in free)
