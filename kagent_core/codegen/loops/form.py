"""What all forms of loops have in common: text, parallel loops, stores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from kagent_core.codegen.c_family import GRAIN, REPORT, CFamily
from kagent_core.codegen.dtypes import HALVES
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis, Index
from kagent_core.codegen.kernel import KernelSource, LoopNest, Store
from kagent_core.codegen.primitives import PRIMITIVES
from kagent_core.codegen.text import Text, bare
from kagent_core.codegen.writer import Parameters, Statements, loads_of


class Form(ABC):
    """One way to write a loop nest.

    Parameters
    ----------
    nest
        The loops.
    language
        How things are spelled.
    """

    def __init__(self, nest: LoopNest, language: CFamily) -> None:
        self.nest = nest = _without_rounding(nest)
        self.language = language
        values = [store.value for store in nest.stores]
        self.loads = sorted((node.payload for node in loads_of(*values)), key=lambda load: -len(load.offset.axes))
        written = [store.tensor for store in nest.stores]
        self.parameters = Parameters(language, written, {load.tensor for load in self.loads})
        self.statements = Statements(language, self.parameters, nest.labels)
        self.text = Text()
        self._bounds: dict[Axis, tuple[str, str]] = {}
        self._outside_blocks: dict[Axis, tuple[str, str] | None] = {}
        self._simd = ""

    @abstractmethod
    def write(self) -> None:
        """Write the function's body."""

    def source(self, name: str) -> KernelSource:
        """Return the function."""
        self.write()
        args = self.parameters.args
        head = self.language.head(name, args, self.parameters.reports)
        text = "\n".join([f"{head} {{", *self.parameters.entry(), *self.text.lines, "}"]) + "\n"
        items = math.prod(axis.extent for axis in self.nest.outer)
        return KernelSource(name, text, args, self.parameters.reports, items)

    # -- loops

    def head(self, axis: Axis) -> str:
        """Return the head of a loop over an axis."""
        first, end = self._ends(axis)
        return f"for ({self.language.index_type} {axis.name} = {first}; {axis.name} < {end}; {axis.name}++) {{"

    def size(self, axis: Axis) -> str:
        """Return an axis's extent as text."""
        return self.parameters.size(axis.extent)

    def block_head(self, axis: Axis, step: int) -> str:
        """Return the head of a loop over the beginnings of an axis's blocks."""
        self.parameters.fits(axis.extent + step)  # where the last step leads
        (first, end), begin = self._ends(axis), f"{axis.name}_0"
        return f"for ({self.language.index_type} {begin} = {first}; {begin} < {end}; {begin} += {step}) {{"

    def within_block_head(self, axis: Axis, step: int) -> str:
        """Return the head of a loop over one block of an axis."""
        name = axis.name
        last = self._block_end(axis, step)
        return f"for ({self.language.index_type} {name} = {name}_0; {name} < {last}; {name}++) {{"

    def open_block(self, axis: Axis, step: int) -> None:
        """Open a loop over the blocks of an axis, to one of which its loops inside are limited until `close_block`."""
        name = axis.name
        end = self._block_end(axis, step)
        self.text.open(self.block_head(axis, step))
        self.text.add(f"const {self.language.index_type} {name}_last = {bare(end)};")
        self._outside_blocks[axis] = self._bounds.get(axis)
        self._bounds[axis] = (f"{name}_0", f"{name}_last")

    def close_block(self, axis: Axis) -> None:
        """Close what `open_block` opened."""
        outside = self._outside_blocks.pop(axis)
        del self._bounds[axis]
        if outside is not None:
            self._bounds[axis] = outside
        self.text.close()

    def steps(self, axes: Iterable[Axis]) -> str:
        """Return how many steps some loops have, within the parts and blocks that are open, as text."""
        sizes = []
        for axis in axes:
            first, end = self._ends(axis)
            sizes.append(end if first == "0" else f"({end} - {first})")
        return f"({' * '.join(sizes) or '1'})"

    def open_parts(self, axis: Axis, parts: int) -> None:
        """Open a parallel loop over parts of an axis, to which its loops inside are limited until `close_parts`."""
        name, size = axis.name, self.size(axis)
        self.text.add("#pragma omp parallel for")
        self.text.open(f"for (i64 part = 0; part < {parts}; part++) {{")
        first, end = f"{size} * part / {parts}", f"{size} * (part + 1) / {parts}"  # `part` makes the products wide
        self.text.add(f"const {self.language.index_type} {name}_first = {first}, {name}_end = {end};")
        self._bounds[axis] = (f"{name}_first", f"{name}_end")

    def close_parts(self, axis: Axis) -> None:
        """Close what `open_parts` opened."""
        del self._bounds[axis]
        self.text.close()

    def _block_end(self, axis: Axis, step: int) -> str:
        _, end = self._ends(axis)
        last = f"{axis.name}_0 + {step}"
        return f"({last} < {end} ? {last} : {end})" if axis in self._bounds or axis.extent % step else last

    def _ends(self, axis: Axis) -> tuple[str, str]:
        return self._bounds.get(axis, ("0", self.size(axis)))

    def open_parallel(
        self, axes: Sequence[Axis], inside: Sequence[Axis], cost: int, blocked: Sequence[tuple[Axis, int]] = ()
    ) -> int:
        """Open loops whose steps may run at the same time; return how many were opened.

        Parameters
        ----------
        axes
            Outermost first.
        inside
            Axes of the loops inside.
        cost
            Of one step of the innermost loops, in cheap steps.
        blocked
            Further axes, each with a step: only the beginnings of their blocks are looped over.
        """
        heads = [self.head(axis) for axis in axes] + [self.block_head(axis, step) for axis, step in blocked]
        extents = [axis.extent for axis in axes] + [-(-axis.extent // step) for axis, step in blocked]
        self.parameters.fits(math.prod(extents))  # the steps of all loops may be counted together
        if math.prod(extents) > 1:
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            self.text.add(
                f"#pragma omp parallel for{collapse}{self.worthwhile((*axes, *dict(blocked), *inside), cost)}"
            )
        for head in heads:
            self.text.open(head)
        return len(heads)

    def worthwhile(self, axes: Sequence[Axis], cost: int) -> str:
        """Return the clause by which a parallel loop uses threads only where there is enough to do."""
        sizes = [self.size(axis) for axis in axes if axis.extent > 1]
        return f" if ({self.language.wide_product(sizes)} > {max(GRAIN // max(cost, 1), 1)})"

    def open_lanes(self, head: str, lines: Iterable[str], clauses: str = "") -> None:
        """Open an innermost loop, with vectors unless its statements report errors."""
        lines = list(lines)
        if not any(REPORT in line for line in lines):
            self.text.add(f"#pragma omp simd{self._simd}{clauses}")
        self.text.open(head)
        self.text.add(*lines)

    # -- values

    def store(self, store: Store) -> None:
        """Write the statement of a store."""
        place = self.parameters.index(store.offset, self.statements.value)
        pointer = self.parameters.pointer(store.tensor)
        value = self.statements.value(store.value)
        self.text.add(self.language.store(store.tensor.dtype.name, f"{pointer}[{place}]", value))

    def store_all(self, stores: Sequence[Store]) -> None:
        """Write some stores."""
        for store in stores:
            self.store(store)

    def forget_inside(self, known: Collection[int], loops: Collection[Axis]) -> None:
        """Drop the names of what was computed inside loops that have ended."""
        names = self.statements.names
        for number in list(names):
            if number not in known and self.statements.axes[number].intersection(loops):
                del names[number]


def _without_rounding(nest: LoopNest) -> LoopNest:
    """Take the rounding to a half type off what is stored: storing rounds."""
    stores: list[Store] = []
    labels = dict(nest.labels)
    for store in nest.stores:
        value = store.value
        if value.op == "cast" and value.dtype in HALVES and value.args[0].dtype == "float32":
            value = value.args[0]
            if store.value.number in labels:
                labels.setdefault(value.number, labels[store.value.number])
        stores.append(replace(store, value=value))
    return replace(nest, stores=tuple(stores), labels=labels)


def by_stride(axes: Iterable[Axis], offsets: Sequence[Index]) -> tuple[Axis, ...]:
    """Return axes in the order in which memory is best walked: the first offset's greatest stride outermost.

    Further offsets decide between axes that the first one does not depend on.
    """
    return tuple(sorted(axes, key=lambda axis: tuple(-abs(offset.factor(axis)) for offset in offsets)))


def cost_of(*values: Expr) -> int:
    """Return the price of computing some values, in additions."""
    return sum(PRIMITIVES[node.op].cost for node in walk(*values) if node.op in PRIMITIVES)
