"""Loop nests for languages with work-items: independent rows are the items, reductions are loops inside each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import KernelSource, LoopNest
from kagent_core.codegen.loops.form import Form, by_stride
from kagent_core.codegen.loops.rows import Rows


def write_work_items(nest: LoopNest, language: CFamily, name: str) -> KernelSource:
    """Write a loop nest as one kernel of work-items.

    Parameters
    ----------
    nest
        The loops, as `kagent_core.codegen.lowering.Lowering` made them.
    language
        A `kagent_core.codegen.work_items.WorkItemLanguage`.
    name
        Of the kernel.
    """
    reduces = any(node.op == "reduce" for node in walk(*(store.value for store in nest.stores)))
    if reduces or any(store.per_row for store in nest.stores):
        return ItemRows(nest, language).source(name)
    return ItemElements(replace(nest, outer=nest.outer + nest.inner, inner=()), language).source(name)


class OnItems(Form):
    """What forms of work-items have in common: parallel loops are items, and nothing is a vector."""

    def open_parallel(
        self, axes: Sequence[Axis], inside: Sequence[Axis], cost: int, blocked: Sequence[tuple[Axis, int]] = ()
    ) -> int:
        """Open a work-item's loop over its share of the steps."""
        if blocked:
            raise ValueError("work-items take no blocks")
        named = [(axis.name, self.size(axis), axis.extent) for axis in axes]
        return self.language.open_items(self.text, named, cost)

    def open_lanes(self, head: str, lines: Iterable[str], clauses: str = "") -> None:
        """Open an innermost loop."""
        self.text.open(head)
        self.text.add(*lines)


class ItemElements(OnItems):
    """Every item computes elements of its own; neighbours in memory are neighbouring items."""

    def write(self) -> None:
        """Write the kernel's body."""
        stores = self.nest.stores
        axes = by_stride(self.nest.outer, [store.offset for store in stores])
        before, inside = self.statements.place([store.value for store in stores], [set(axes)])
        self.text.add(*before)
        opened = self.open_parallel(axes, (), 1)
        self.text.add(*inside)
        self.store_all(stores)
        self.text.close(opened)


class ItemRows(OnItems, Rows):
    """Every item goes over rows of its own, in as many passes as their reductions need."""

    def shared_axis(self, rows: int, lanes: int) -> Axis | None:
        """Return None: items do not share rows."""
        return None

    def _declare_kept(self) -> dict[int, tuple[str, Expr]]:
        # a work-item has registers, and no memory of its own that would be quicker than computing a value again
        return {}
