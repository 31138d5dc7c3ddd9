"""What all forms of loops have in common: text, parallel loops, stores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from kagent_core.codegen.c_family import REPORT, CFamily
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis, Index
from kagent_core.codegen.kernel import KernelSource, LoopNest, Store
from kagent_core.codegen.primitives import PRIMITIVES
from kagent_core.codegen.text import Text
from kagent_core.codegen.writer import Parameters, Statements, loads_of

GRAIN = 32768
"""Steps of cheap loops below which no second thread is worth waking (ATen's ``at::internal::GRAIN_SIZE``)."""


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
        self.nest = nest
        self.language = language
        values = [store.value for store in nest.stores]
        self.loads = [node.payload for node in loads_of(*values)]
        written = [store.tensor for store in nest.stores]
        self.parameters = Parameters(language, written, {load.tensor for load in self.loads})
        self.statements = Statements(language, self.parameters, nest.labels)
        self.text = Text()

    @abstractmethod
    def write(self) -> None:
        """Write the function's body."""

    def source(self, name: str) -> KernelSource:
        """Return the function."""
        self.write()
        args = self.parameters.args
        head = self.language.head(name, args, self.parameters.reports)
        text = "\n".join([f"{head} {{", *self.text.lines, "}"]) + "\n"
        items = math.prod(axis.extent for axis in self.nest.outer)
        return KernelSource(name, text, args, self.parameters.reports, items)

    # -- loops

    def head(self, axis: Axis) -> str:
        """Return the head of a loop over an axis."""
        return f"for (i64 {axis.name} = 0; {axis.name} < {self.size(axis)}; {axis.name}++) {{"

    def size(self, axis: Axis) -> str:
        """Return an axis's extent as text."""
        return self.parameters.size(axis.extent)

    def block_head(self, axis: Axis, step: int) -> str:
        """Return the head of a loop over the beginnings of an axis's blocks."""
        return f"for (i64 {axis.name}_0 = 0; {axis.name}_0 < {self.size(axis)}; {axis.name}_0 += {step}) {{"

    def within_block_head(self, axis: Axis, step: int) -> str:
        """Return the head of a loop over one block of an axis."""
        name = axis.name
        end = f"({name}_0 + {step} < {self.size(axis)} ? {name}_0 + {step} : {self.size(axis)})"
        return f"for (i64 {name} = {name}_0; {name} < {end}; {name}++) {{"

    def open_parallel(self, axes: Sequence[Axis], steps_inside: int, blocked: Sequence[tuple[Axis, int]] = ()) -> int:
        """Open loops whose steps may run at the same time; return how many were opened.

        Parameters
        ----------
        axes
            Outermost first.
        steps_inside
            Steps of whatever is inside one step of all of them.
        blocked
            Further axes, each with a step: only the beginnings of their blocks are looped over.
        """
        heads = [self.head(axis) for axis in axes] + [self.block_head(axis, step) for axis, step in blocked]
        extents = [axis.extent for axis in axes] + [-(-axis.extent // step) for axis, step in blocked]
        if math.prod(extents) > 1:
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            sizes = [self.size(axis) for axis in (*axes, *(axis for axis, _ in blocked))]
            for _, step in blocked:
                steps_inside //= step
            least = max(GRAIN // max(steps_inside, 1), 1)
            self.text.add(f"#pragma omp parallel for{collapse} if ({' * '.join(sizes)} > {least})")
        for head in heads:
            self.text.open(head)
        return len(heads)

    def open_lanes(self, head: str, lines: Iterable[str], clauses: str = "") -> None:
        """Open an innermost loop, with vectors unless its statements report errors."""
        lines = list(lines)
        if not any(REPORT in line for line in lines):
            self.text.add(f"#pragma omp simd{clauses}")
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


def by_stride(axes: Iterable[Axis], offsets: Sequence[Index]) -> tuple[Axis, ...]:
    """Return axes in the order in which memory is best walked: the first offset's greatest stride outermost.

    Further offsets decide between axes that the first one does not depend on.
    """
    return tuple(sorted(axes, key=lambda axis: tuple(-abs(offset.factor(axis)) for offset in offsets)))


def cost_of(*values: Expr) -> int:
    """Return the price of computing some values, in additions."""
    return sum(PRIMITIVES[node.op].cost for node in walk(*values) if node.op in PRIMITIVES)
