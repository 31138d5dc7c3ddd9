"""Loop nests as C for processors with threads and SIMD: independent rows in parallel, vectors in the innermost loop.

One of three forms is chosen from where the unit strides are:

- *elementwise*: nothing is reduced; the innermost loop is vectorized, and blocked with a second one where some tensor
  is read transposed;
- *rows*: reductions run along memory; each row goes through its passes while it is in cache, and what is costly to
  compute and needed in more than one pass is kept;
- *columns*: reductions run across memory; a block of neighbouring columns is reduced at once, one per lane.
"""

from __future__ import annotations

from dataclasses import replace

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.expressions import walk
from kagent_core.codegen.kernel import KernelSource, LoopNest
from kagent_core.codegen.loops.columns import Columns, column_axis
from kagent_core.codegen.loops.elementwise import Elementwise
from kagent_core.codegen.loops.form import Form
from kagent_core.codegen.loops.rows import Rows

__all__ = ["write_loops"]


def write_loops(nest: LoopNest, language: CFamily, name: str) -> KernelSource:
    """Write a loop nest as one C function.

    Parameters
    ----------
    nest
        The loops, as `kagent_core.codegen.lowering.Lowering` made them.
    language
        C, with a device's spellings.
    name
        Of the function.
    """
    return _form_for(nest, language).source(name)


def _form_for(nest: LoopNest, language: CFamily) -> Form:
    reduces = any(node.op == "reduce" for node in walk(*(store.value for store in nest.stores)))
    if not reduces and not any(store.per_row for store in nest.stores):
        return Elementwise(replace(nest, outer=nest.outer + nest.inner, inner=()), language)
    if not reduces:
        return Rows(nest, language)
    lane = column_axis(nest)
    return Rows(nest, language) if lane is None else Columns(nest, language, lane)
