"""Loops whose reductions run along memory: row by row, in as many passes as the reductions need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kagent_core.codegen.dtypes import NBITS, compute_dtype
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis, Index
from kagent_core.codegen.kernel import Store
from kagent_core.codegen.loops.form import by_stride
from kagent_core.codegen.loops.kept import is_costly, values_to_keep
from kagent_core.codegen.loops.reducing import Reducing, parts_of
from kagent_core.codegen.loops.reductions import CHUNK, LANES, Accumulator
from kagent_core.codegen.loops.states import is_compound, within_block

ROW_CHUNK = LANES * CHUNK
"""Elements of a row that are summed up in their own type: each lane of a vector takes its share."""

KEPT_ELEMENTS = 8192
"""Longest row whose costly values are kept from one pass to the next, in memory of the thread's own."""

KEPT_BYTES = 128 * 1024
"""Most bytes that are kept at once, since it is the stack that they take, and a thread may have little."""

BLOCK, SMALL_BLOCK = 16, 4
"""Rows of a block, whose reductions follow each other; and where large ones would be too few for many threads."""

FEW_BLOCKS = 16
"""Large blocks that are too few."""

BLOCK_ELEMENTS = 512
"""Longest row that is computed in blocks, which stay in the nearest caches."""

WIDE_LANES, LANES_OF_MOST = 16, 8
"""Values of a wide vector, and of one that most processors have."""


class Rows(Reducing):
    """Every row goes through its passes while it is in cache.

    Short rows do so some at a time: what a pass finds of a row takes a while to be known, and other rows need not wait.
    """

    chunk = ROW_CHUNK

    def write(self) -> None:
        """Write the function's body."""
        outer = by_stride(self.nest.outer, [load.offset for load in self.loads])
        self._kept: dict[int, tuple[str, Expr]] = {}
        self._filled: set[int] = set()
        if self._is_in_blocks(outer):
            self._write_in_blocks(outer)
            return
        self._shared = self.shared_axis(math.prod(axis.extent for axis in outer), 1)
        if self._shared is None:
            opened = self.open_parallel(outer, self.nest.inner, self.passes_over_rows())
        else:
            opened = len(outer)
            for axis in outer:
                self.text.open(self.head(axis))
        self._kept = self._declare_kept()
        for axes, nodes in self.passes:
            self._write_pass(axes, nodes)
        self._write_stores()
        self.text.close(opened)

    def _write_stores(self) -> None:
        if self.row_stores:
            self.text.add(*self.statements.place([store.value for store in self.row_stores], [])[0])
            self.store_all(self.row_stores)
        if self.full_stores:
            self._write_full_stores(self.full_stores)

    # -- blocks of short rows

    def _is_in_blocks(self, outer: Sequence[Axis]) -> bool:
        """Whether blocks of rows go through each pass: short rows in several passes that keep nothing costly."""
        nodes = [node for _, nodes in self.passes for node in nodes]
        if not outer or outer[-1].extent < SMALL_BLOCK or not self.passes or not self.full_stores:
            return False
        length = math.prod(axis.extent for axis in self.nest.inner)
        if not 1 < length <= BLOCK_ELEMENTS or any(is_compound(node) or not node.payload.axes for node in nodes):
            return False
        return not self._costly_in_common()

    def _write_in_blocks(self, outer: Sequence[Axis]) -> None:
        self._shared = None
        self._settle_length()
        *others, axis = outer
        rows = math.prod(axis.extent for axis in outer)
        self._block = BLOCK if rows >= FEW_BLOCKS * BLOCK else SMALL_BLOCK
        opened = self.open_parallel(others, self.nest.inner, self.passes_over_rows(), [(axis, self._block)])
        found: dict[int, tuple[Expr, str]] = {}
        for axes, nodes in self.passes:
            arrays = [self.statements.fresh_name(f"{node.payload.name}_of") for node in nodes]
            for node, array in zip(nodes, arrays, strict=True):
                self.text.add(f"{self.language.value_type(node.dtype)} {array}[{self._block}];")
            known = self._open_rows(axis, found, [node.args[0] for node in nodes])
            self._write_pass(axes, nodes)
            for node, array in zip(nodes, arrays, strict=True):
                self.text.add(f"{array}[{_in_block(axis)}] = {self.statements.value(node)};")
                found[node.number] = (node, array)
            self._close_rows(known)
        known = self._open_rows(axis, found, [store.value for store in self.nest.stores])
        self._write_stores()
        self._close_rows(known)
        self.text.close(opened)

    def _open_rows(self, axis: Axis, found: Mapping[int, tuple[Expr, str]], values: Sequence[Expr]) -> set[int]:
        """Open the loop over a block's rows, in which what was found of them has names; return what had one before."""
        known = set(self.statements.names)
        self.text.open(self.within_block_head(axis, self._block))
        for inner in walk(*values, into_reductions=False):
            if inner.number in found:
                node, array = found[inner.number]
                name = self.result_name(node)
                self.text.add(f"const {self.language.value_type(node.dtype)} {name} = {array}[{_in_block(axis)}];")
                self.statements.name(node, name)
        return known

    def _close_rows(self, known: set[int]) -> None:
        names = self.statements.names
        for number in [number for number in names if number not in known]:
            del names[number]
        self.text.close()

    def _settle_length(self) -> None:
        """Write the length of rows as a number where a tensor has just a row's elements: it is the model's own then."""
        inner = [axis for axis in self.nest.inner if axis.extent > 1]
        if any(set(load.offset.axes) == set(inner) for load in self.loads):
            self._bounds.update((axis, ("0", str(axis.extent))) for axis in inner)
            length = math.prod(axis.extent for axis in inner)
            if length % WIDE_LANES and length % LANES_OF_MOST == 0:
                self._simd = f" simdlen({LANES_OF_MOST})"

    def _write_plain(
        self,
        axes: Sequence[Axis],
        nodes: Sequence[Expr],
        shared: Axis | None,
        cut: tuple[int, int] | None,
        may_keep: bool = True,
    ) -> None:
        values = [node.args[0] for node in nodes]
        to_keep = self._to_keep(values, may_keep)
        known = set(self.statements.names)
        lines = self.statements.place([*values, *to_keep], [{axis} for axis in axes])
        self.text.add(*lines[0])
        running = self.accumulators(nodes, cut)
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
        self.forget_inside(known, axes)
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
            self.text.add(f"{each.running_type} {each.name} = {each.first};", *each.rest())
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
        self.text.add(*(each.add(each.taking) for each in in_chunks))

    # -- compound reductions: rows have one lane

    def each_lane(self, statements: Sequence[str]) -> None:
        """Write statements."""
        self.text.add(*statements)

    def declare(self, kind: str, name: str, first: str) -> None:
        """Declare a variable."""
        self.text.add(f"{kind} {name} = {first};")

    def shared_parts(self, axis: Axis, values: int) -> int:
        """Return how many parts an axis is cut into that threads share."""
        return parts_of(axis)

    def write_block_pass(self, axes: Sequence[Axis], nodes: Sequence[Expr], may_keep: bool) -> None:
        """Write one pass over a block."""
        self._write_plain(axes, nodes, None, None, may_keep)

    def skip_block(self, unchanged: str) -> None:
        """Go on to the next block where a condition holds."""
        self.text.add(f"if ({unchanged}) {{ continue; }}")

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
        roots = [self._taken_at_steps(nodes) for axes, nodes in self.passes if axes == self.nest.inner]
        roots.append([store.value for store in self.full_stores])
        return values_to_keep(roots, is_costly)

    def _taken_at_steps(self, nodes: Sequence[Expr]) -> list[Expr]:
        """Return what reductions compute at every step of the loops."""
        reductions = [node for node in nodes if not is_compound(node)]
        for node in nodes:
            if is_compound(node):
                reductions += [inner for inner in within_block(*node.args) if inner.op == "reduce"]
        return [node.args[0] for node in reductions]

    def _to_keep(self, values: Sequence[Expr], may_keep: bool) -> list[Expr]:
        """Return what a pass computes for the later ones; what is kept already it reads."""
        self._use_kept()
        if not may_keep:
            return []
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


def _in_block(axis: Axis) -> str:
    return f"{axis.name} - {axis.name}_0"
