"""Joining loops: two that walk memory as one become one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kagent_core.codegen.expressions import Expr, Expressions, Load, Reduction, walk
from kagent_core.codegen.indices import Axis, Computed, Index, Quotient, Remainder
from kagent_core.codegen.kernel import LoopNest


def merge_axes(nest: LoopNest, expressions: Expressions) -> LoopNest:
    """Return the same loops with as few axes as can be.

    Two neighbouring axes are one where every index has the outer one's factor equal to the inner one's, times the inner
    one's extent.

    Parameters
    ----------
    nest
        The loops.
    expressions
        What made their expressions.
    """
    indices = list(_indices(nest))
    outer = _merged(nest.outer, indices)
    inner = _merged(nest.inner, indices)
    replaced = {**outer, **inner}
    if all(index == Index.of(axis) for axis, index in replaced.items()):
        return nest
    rewriter = _Rewriter(expressions, replaced, nest.inner, _axes(inner))
    values = rewriter.rewrite([store.value for store in nest.stores])
    stores = tuple(
        replace(store, offset=rewriter.index(store.offset), value=value)
        for store, value in zip(nest.stores, values, strict=True)
    )
    labels = {rewriter.numbers[number]: label for number, label in nest.labels.items() if number in rewriter.numbers}
    return LoopNest(_axes(outer), _axes(inner), stores, labels, nest.calls)


def _indices(nest: LoopNest) -> Iterable[Index]:
    for store in nest.stores:
        yield from _parts(store.offset)
    for node in walk(*(store.value for store in nest.stores)):
        if node.op == "load":
            yield from _parts(node.payload.offset)
        elif node.op == "index":
            yield from _parts(node.payload)


def _parts(index: Index) -> Iterable[Index]:
    yield index
    for atom, _ in index.terms:
        if isinstance(atom, Quotient | Remainder):
            yield from _parts(atom.index)


def _merged(axes: tuple[Axis, ...], indices: list[Index]) -> dict[Axis, Index]:
    """Return what each axis is in terms of the merged ones."""
    runs: list[list[Axis]] = []
    for axis in axes:
        if axis.extent == 1:
            continue
        if runs and _joins(runs[-1][-1], axis, indices):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    found: dict[Axis, Index] = {axis: Index() for axis in axes}
    for number, run in enumerate(runs):
        extent = 1
        for axis in run:
            extent *= axis.extent
        # numbered anew, so that tensors of two and of three dimensions share a kernel where both are one loop
        joined = Axis(f"{run[-1].name[0]}{number}", extent, run[-1].reduced)
        # the joined axis stands in for the innermost one; the others' terms are part of it
        found.update((axis, Index()) for axis in run)
        found[run[-1]] = Index.of(joined)
    return found


def _joins(outer: Axis, inner: Axis, indices: list[Index]) -> bool:
    return all(index.factor(outer) == index.factor(inner) * inner.extent for index in indices)


def _axes(replaced: Mapping[Axis, Index]) -> tuple[Axis, ...]:
    return tuple(axis for index in replaced.values() for axis, _ in index.terms if isinstance(axis, Axis))


class _Rewriter:
    """Builds expressions again with other axes."""

    def __init__(
        self,
        expressions: Expressions,
        replaced: dict[Axis, Index],
        old_inner: tuple[Axis, ...],
        new_inner: tuple[Axis, ...],
    ) -> None:
        self._expressions = expressions
        self._replaced = replaced
        self._inner = {old_inner: new_inner}
        self._new: dict[int, Expr] = {}

    @property
    def numbers(self) -> dict[int, int]:
        """The new number of each rewritten expression."""
        return {old: node.number for old, node in self._new.items()}

    def rewrite(self, roots: list[Expr]) -> list[Expr]:
        for node in walk(*roots):
            self._new[node.number] = self._node(node)
        return [self._new[root.number] for root in roots]

    def index(self, index: Index) -> Index:
        total = Index((), index.constant)
        for atom, factor in index.terms:
            if isinstance(atom, Axis):
                total += self._replaced.get(atom, Index.of(atom)) * factor
            elif isinstance(atom, Quotient):
                total += (self.index(atom.index) // atom.divisor) * factor
            elif isinstance(atom, Remainder):
                total += (self.index(atom.index) % atom.divisor) * factor
            else:
                total += Index.of(Computed(self._new[atom.value.number], atom.bounds)) * factor
        return total

    def _node(self, node: Expr) -> Expr:
        payload = node.payload
        if node.op == "load":
            load: Load = payload
            payload = Load(load.tensor, self.index(load.offset))
        elif node.op == "index":
            payload = self.index(payload)
        elif node.op == "reduce":
            reduction: Reduction = payload
            payload = replace(reduction, axes=self._inner.get(reduction.axes, reduction.axes))
        elif node.op == "count":
            payload = self._inner.get(payload, payload)
        elif node.op == "constant":
            return node
        return self._expressions.rebuilt(node, tuple(self._new[arg.number] for arg in node.args), payload)
