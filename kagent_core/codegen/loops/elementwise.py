"""Loops that reduce nothing: every step writes elements of its own."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.codegen.c_family import REPORT
from kagent_core.codegen.expressions import Expr, Load
from kagent_core.codegen.indices import Axis, Index
from kagent_core.codegen.loops.form import Form, by_stride, cost_of
from kagent_core.codegen.writer import loads_of

TILE = 32
"""Edge of the blocks in which transposed tensors are read, in elements."""

LEAST_TILED = 8
"""Shortest loops that are worth blocking."""


class Elementwise(Form):
    """The innermost loop is vectorized; two loops are blocked where some tensor is read transposed."""

    def write(self) -> None:
        """Write the function's body."""
        stores = self.nest.stores
        values = [store.value for store in stores]
        axes = by_stride(self.nest.outer, [store.offset for store in stores])
        across = self._read_across(axes)
        if not axes:
            self.text.add(*self.statements.place(values, [])[0])
            self.store_all(stores)
        elif across is not None:
            self._write_tiles(axes, across, values)
        elif len(axes) == 1:
            self._write_line(axes[0], values)
        else:
            self._write_nest(axes, values)

    def _write_line(self, axis: Axis, values: Sequence[Expr]) -> None:
        before, inside = self.statements.place(values, [{axis}])
        self.text.add(*before)
        simd = "" if any(REPORT in line for line in inside) else " simd"
        self.text.add(f"#pragma omp parallel for{simd}{self.worthwhile([axis], self._cost())}")
        self.text.open(self.head(axis))
        self.text.add(*inside)
        self.store_all(self.nest.stores)
        self.text.close()

    def _write_nest(self, axes: Sequence[Axis], values: Sequence[Expr]) -> None:
        *outer, last = axes
        lines = self.statements.place(values, [{axis} for axis in axes])
        self.text.add(*lines[0])
        # parallel as far as nothing is computed between the loops
        depth = next((n for n in range(1, len(outer)) if lines[n]), len(outer))
        self.open_parallel(outer[:depth], axes[depth:], self._cost())
        self.text.add(*lines[depth])
        for number, axis in enumerate(outer[depth:], depth + 1):
            self.text.open(self.head(axis))
            self.text.add(*lines[number])
        self.open_lanes(self.head(last), lines[-1])
        self.store_all(self.nest.stores)
        self.text.close(len(axes))

    def _write_tiles(self, axes: Sequence[Axis], across: Axis, values: Sequence[Expr]) -> None:
        last = axes[-1]
        rest = [axis for axis in axes[:-1] if axis is not across]
        staged = [node for node in loads_of(*values) if _is_transposed(node, across, last)]
        tiles = [self._tile_of(node, across, last) for node in staged]
        lines = self.statements.place(values, [set(rest), {across}, {last}])
        self.text.add(*lines[0])
        opened = self.open_parallel(rest, (), self._cost(), [(across, TILE), (last, TILE)])
        self.text.add(*lines[1])
        for node, tile in zip(staged, tiles, strict=True):
            self._stage(node, tile, across, last)
        self.text.open(self.within_block_head(across, TILE))
        self.text.add(*lines[2])
        self.open_lanes(self.within_block_head(last, TILE), lines[3])
        self.store_all(self.nest.stores)
        self.text.close(opened + 2)

    def _tile_of(self, node: Expr, across: Axis, last: Axis) -> str:
        """Return the name of a block that a load reads from, in its stead."""
        tile = self.statements.fresh_name("tile")
        row, column = f"[{last.name} - {last.name}_0]", f"[{across.name} - {across.name}_0]"
        place = f"{tile}{row}{column}"
        if self._transposer(node) is not None:
            place = f"{tile}_turned{column}{row}"
        self.statements.name(node, self.language.load(node.dtype, place))
        return tile

    def _transposer(self, node: Expr) -> str | None:
        load: Load = node.payload
        return self.language.tile_transposer(load.tensor.dtype.itemsize)

    def _stage(self, node: Expr, tile: str, across: Axis, last: Axis) -> None:
        """Copy a block of a transposed tensor along its memory, into rows of a length that caches take well."""
        load: Load = node.payload
        kind = self.language.memory_type(node.dtype)
        self.text.add(f"{kind} {tile}[{TILE}][{TILE + 1}];")
        self.text.open(self.within_block_head(last, TILE))
        source = f"{self.parameters.pointer(load.tensor)}[{self.parameters.index(load.offset, self.statements.value)}]"
        self.open_lanes(self.within_block_head(across, TILE), ())
        self.text.add(f"{tile}[{last.name} - {last.name}_0][{across.name} - {across.name}_0] = {source};")
        self.text.close(2)
        transposer = self._transposer(node)
        if transposer is not None:
            self.text.add(f"{kind} {tile}_turned[{TILE}][{TILE}];", f"{transposer}({tile}, {tile}_turned);")

    def _read_across(self, axes: Sequence[Axis]) -> Axis | None:
        """Return the axis along which some tensor lies in memory that the innermost loop reads with a stride."""
        if len(axes) < 2 or axes[-1].extent < LEAST_TILED:
            return None
        for load in self.loads:
            if load.offset.factor(axes[-1]) > 1:
                for axis in axes[:-1]:
                    if load.offset.factor(axis) == 1 and axis.extent >= LEAST_TILED:
                        return axis
        return None

    def _cost(self) -> int:
        return 1 + cost_of(*(store.value for store in self.nest.stores)) // 8


def _is_transposed(node: Expr, across: Axis, last: Axis) -> bool:
    """Whether a load walks memory along the axis that is not the innermost, and always does."""
    offset: Index = node.payload.offset
    plain = not node.args and all(isinstance(atom, Axis) for atom, _ in offset.terms)
    return plain and offset.factor(across) == 1 and offset.factor(last) > 1
