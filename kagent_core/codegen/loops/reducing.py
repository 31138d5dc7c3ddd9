"""What rows and columns have in common: passes over the inner loops, in chunks and blocks, that threads may share."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Collection, Sequence

from kagent_core.codegen.c_family import GRAIN, CFamily
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import LoopNest
from kagent_core.codegen.loops.form import Form, by_stride
from kagent_core.codegen.loops.reductions import CHUNK, EXTREMES, PARTS, Accumulator, chunked, passes
from kagent_core.codegen.loops.states import RunningState, is_compound, parts_by_state, scope, within_block
from kagent_core.codegen.text import bare

FEW_ROWS = 16
"""Rows below which threads share each row, if it is long, rather than take rows of their own."""


class Reducing(Form):
    """What rows and columns have in common."""

    chunk = CHUNK
    """Most elements that are summed up in their own type."""

    def __init__(self, nest: LoopNest, language: CFamily) -> None:
        super().__init__(nest, language)
        stores = self.nest.stores
        values = [store.value for store in stores]
        of_rows = [node for node in walk(*values) if node.op == "reduce" and not node.payload.in_block]
        self.passes = list(passes(of_rows))
        self._parts = parts_by_state(*values)
        self._shared: Axis | None = None
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

    def _write_pass(self, all_axes: tuple[Axis, ...], nodes: Sequence[Expr]) -> None:
        """Write one pass with its reductions, in chunks of `chunk` elements."""
        axes = self.inner_order(all_axes)
        shared = self._shared if self._shared in axes else None
        plain = [node for node in nodes if not is_compound(node)]
        if plain:
            self._write_plain(axes, plain, shared, chunked(axes, self.chunk))
        compounds = [node for node in nodes if is_compound(node)]
        if compounds:
            self.write_compounds(axes, compounds, shared, self.chunk)

    @abstractmethod
    def _write_plain(
        self, axes: Sequence[Axis], nodes: Sequence[Expr], shared: Axis | None, cut: tuple[int, int] | None
    ) -> None:
        """Write a pass with reductions that are not compound."""

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

    # -- compound reductions: block by block

    place = ""
    """What stands behind the name of a value of which each lane has its own."""

    array = ""
    """What stands behind such a name where it is declared."""

    lane_loops: Sequence[Collection[Axis]] = ()
    """The variables of the loop over lanes, where there is one."""

    @abstractmethod
    def each_lane(self, statements: Sequence[str]) -> None:
        """Write statements that each lane goes through by itself."""

    @abstractmethod
    def declare(self, kind: str, name: str, first: str) -> None:
        """Declare a value of which each lane has its own."""

    @abstractmethod
    def shared_parts(self, axis: Axis, values: int) -> int:
        """Return how many parts an axis is cut into that threads share, each of which finds some values."""

    @abstractmethod
    def write_block_pass(self, axes: Sequence[Axis], nodes: Sequence[Expr], may_keep: bool) -> None:
        """Write one pass over a block; afterwards its reductions have names.

        Parameters
        ----------
        axes
            Loops within the block.
        nodes
            The reductions.
        may_keep
            Whether costly values may be kept for later passes: every block goes through this one.
        """

    @abstractmethod
    def skip_block(self, unchanged: str) -> None:
        """Go on to the next block where, for every lane, a condition holds."""

    def write_compounds(self, axes: Sequence[Axis], nodes: Sequence[Expr], shared: Axis | None, chunk: int) -> None:
        """Write the pass of some compound reductions over the same loops; afterwards their parts have names.

        Parameters
        ----------
        axes
            Outermost first.
        nodes
            The reductions.
        shared
            The axis that threads share, if they do.
        chunk
            Most steps of a block, which is gone over as often as needed while it is in the nearest cache.
        """
        states = [RunningState(node, self.statements, self.parameters, self.language) for node in nodes]
        parts = 0
        if shared is not None:
            parts = self.shared_parts(shared, sum(len(state.names) for state in states))
            for state in states:
                self.text.add(*(f"{kind} {name}_of[{parts}]{self.array};" for kind, name in state.variables))
            self.open_parts(shared, parts)
        self._declare_states(states)
        self._write_blocks(axes, states, chunk)
        if shared is not None:
            names = [name for state in states for name in state.names]
            self.each_lane([f"{name}_of[part]{self.place} = {name}{self.place};" for name in names])
            self.close_parts(shared)
            self._combine_states(states, parts)
        for state in states:
            for node in self._parts.get(state.node.number, ()):
                self.statements.name(node, f"{state.names[node.payload]}{self.place}")

    def _write_blocks(self, axes: Sequence[Axis], states: Sequence[RunningState], chunk: int) -> None:
        """Write the loops of a pass, in a scope of their own: what is computed in them has names there only."""
        known = set(self.statements.names)
        found = [part for state in states for part in state.node.args]
        if not any(node.op == "reduce" for node in within_block(*found)):
            self.text.open("{")
            self._write_elements(axes, states, found)
            self.text.close()
        else:
            cut = chunked(axes, chunk)
            position, step = cut if cut is not None else (0, 0)
            outside, inside = axes[: position + (step == 1)], axes[position + (step == 1) :]
            for head in map(self.head, outside) if cut is not None else ("{",):
                self.text.open(head)
            if step > 1:
                self.open_block(axes[position], step)
            self._write_block(inside, states, found, may_skip=cut is not None)
            if step > 1:
                self.close_block(axes[position])
            self.text.close(len(outside) if cut is not None else 1)
        for number in [number for number in self.statements.names if number not in known]:
            del self.statements.names[number]

    def _write_elements(self, axes: Sequence[Axis], states: Sequence[RunningState], found: Sequence[Expr]) -> None:
        """Merge one element after the other."""
        before, *lines = self.statements.place(found, [*({axis} for axis in axes), *self.lane_loops])
        self.text.add(*before)
        for axis, inside in zip(axes, lines, strict=False):
            self.text.open(self.head(axis))
            self.text.add(*inside)
        merging = [line for state in states for line in self._merging(state)]
        self.each_lane([*itertools.chain(*lines[len(axes) :]), *merging])
        self.text.close(len(axes))

    def _write_block(
        self, axes: Sequence[Axis], states: Sequence[RunningState], found: Sequence[Expr], may_skip: bool
    ) -> None:
        """Reduce a block in as many passes as it takes, and merge what has been found."""
        nodes = within_block(*found)
        for node in nodes:
            if node.op == "count":
                self.statements.name(node, self.steps(axes))
        only = states[0] if may_skip and len(states) == 1 else None
        reductions = [node for node in nodes if node.op == "reduce"]
        for number, (_, together) in enumerate(passes(reductions)):
            same = only.unchanged(self.statements.value(found[0]), self.place) if only and number == 1 else None
            if same is not None:
                self.skip_block(same)
            self.write_block_pass(axes, together, may_keep=only is None or number == 0)
        before, *inside = self.statements.place(found, self.lane_loops)
        self.text.add(*before)
        merging = [line for state in states for line in self._merging(state)]
        self.each_lane([*itertools.chain(*inside), *merging])

    def _merging(self, state: RunningState) -> list[str]:
        """Return statements that merge what has been found in a block."""
        lines = [
            f"const {kind} {name} = {bare(self.statements.value(part))};"
            for (kind, _), name, part in zip(state.variables, state.found, state.node.args, strict=True)
        ]
        return [*lines, *scope(state.merge(state.found, self.place))]

    def _declare_states(self, states: Sequence[RunningState]) -> None:
        for state in states:
            for (kind, name), first in zip(state.variables, state.first(), strict=True):
                self.declare(kind, name, first)

    def _combine_states(self, states: Sequence[RunningState], parts: int) -> None:
        """Merge what threads have found in their parts, in order."""
        self._declare_states(states)
        self.text.open(f"for (i64 part = 0; part < {parts}; part++) {{")
        for state in states:
            found = [f"{name}_of[part]{self.place}" for name in state.names]
            self.each_lane(scope(state.merge(found, self.place)))
        self.text.close()

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
        return self.statements.fresh_name(self.nest.labels.get(node.number) or _short_name(node))


def parts_of(axis: Axis) -> int:
    """Return how many parts an axis is cut into that threads share."""
    return min(PARTS, axis.extent)


def _short_name(node: Expr) -> str:
    return node.payload.name if node.payload.in_block else f"row_{node.payload.name}"
