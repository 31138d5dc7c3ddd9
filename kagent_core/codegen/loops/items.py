"""Loop nests for languages with work-items: independent rows are the items, reductions are loops inside each.

Where the threads of a block can work together, and that pays, a block's threads share rows instead.
"""

from __future__ import annotations

from dataclasses import replace

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import walk
from kagent_core.codegen.kernel import KernelSource, LoopNest
from kagent_core.codegen.loops.items_elements import ItemElements
from kagent_core.codegen.loops.items_groups import write_group_rows
from kagent_core.codegen.loops.items_rows import ItemRows
from kagent_core.codegen.work_items import WorkItemLanguage


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
    if reduces and isinstance(language, WorkItemLanguage) and language.groups is not None:
        shared = write_group_rows(nest, language, name)
        if shared is not None:
            return shared
    if reduces or any(store.per_row for store in nest.stores):
        return ItemRows(nest, language).source(name)
    return ItemElements(replace(nest, outer=nest.outer + nest.inner, inner=()), language).source(name)
