"""The loops of a group of operators, before anything is computed in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.indices import Axis, Index, flatten, refine
from kagent_core.codegen.table import LoweringKind, NotLoweredError, Rule
from kagent_core.specs import OpCall, TensorSpec


class Nest:
    """The loops of a group: those of what it makes, cut up finely enough for each of its shapes.

    Parameters
    ----------
    calls, rules
        The group.
    is_stored
        Whether a result is written.

    Raises
    ------
    NotLoweredError
        When nothing is written.
    """

    def __init__(self, calls: Sequence[OpCall], rules: Sequence[Rule], is_stored: Callable[[TensorSpec], bool]) -> None:
        full, dims = _loops(calls, rules, is_stored)
        if 0 in full:
            raise NotLoweredError("there is nothing that it would have to write")
        numel = math.prod(full)
        made = [spec.shape for call in calls for spec in call.outputs]
        read = [spec.shape for call in calls for spec in call.inputs]
        same = [shape for shape in made + read if math.prod(shape) == numel]
        kept = math.prod(size for dim, size in enumerate(full) if dim not in dims)
        cut = [
            rule.loops(call)
            for call, rule in zip(calls, rules, strict=True)
            if rule.loops is not None and call.outputs[0].numel > 0
        ]
        finer = [shape for shape in cut if math.prod(shape) == numel]
        sizes = refine([full, *same, *finer]) or refine([full, *same]) or full
        flags = _reduced_flags(sizes, full, dims)
        outer: list[Axis] = []
        inner: list[Axis] = []
        self.axes: list[Axis] = []
        for size, is_reduced in zip(sizes, flags, strict=True):
            axis = Axis(f"r{len(inner)}" if is_reduced else f"i{len(outer)}", size, is_reduced)
            (inner if is_reduced else outer).append(axis)
            self.axes.append(axis)
        self.outer, self.inner = tuple(outer), tuple(inner)
        self._numel, self._kept = numel, kept

    def position_of(self, spec: TensorSpec) -> tuple[Index, bool] | None:
        """Return the row-major position in a result at each step of the loops, and whether it is one per row."""
        if spec.numel == self._kept and self.inner:
            return flat_position(self.outer), True
        return (flat_position(self.axes), False) if spec.numel == self._numel else None


def flat_position(axes: Sequence[Axis]) -> Index:
    """Return the row-major position that loop variables stand for."""
    return flatten([Index.of(axis) for axis in axes], [axis.extent for axis in axes])


def _loops(
    calls: Sequence[OpCall], rules: Sequence[Rule], is_stored: Callable[[TensorSpec], bool]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a group's loops, and the dimensions of it that are reduced."""
    for call, rule in zip(calls, rules, strict=True):
        if rule.kind in (LoweringKind.REDUCTION, LoweringKind.ROWS):
            shape, dims = reduced_loops(call)
            if math.prod(shape[dim] for dim in dims) > 1:
                return shape, dims
    stored = [spec for call in reversed(calls) for spec in call.outputs if is_stored(spec)]
    return (max(stored, key=lambda spec: spec.numel).shape if stored else (0,)), ()


def reduced_loops(call: OpCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape that a reducing call loops over, and the dimensions that it reduces."""
    arguments = full_arguments(call)
    first = call.inputs[0].shape
    if "normalized_shape" in arguments:
        return first, tuple(range(len(first) - len(arguments["normalized_shape"]), len(first)))
    if "group" in arguments:  # group norm: channels are cut up
        groups = arguments["group"]
        channels = first[1]
        return (first[0], groups, channels // groups, *first[2:]), tuple(range(2, len(first) + 1))
    if "momentum" in arguments:  # batch norm
        return first, (0, *range(2, len(first)))
    if call.signature in ("aten::any.dims", "aten::all.dims") and arguments["dim"] == ():
        return first, ()  # here, no dimensions are not all of them
    return first, normalized_dims(arguments.get("dim"), len(first))


def normalized_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dimensions as ascending numbers from 0; None or none of them stand for all.

    Examples
    --------
    >>> normalized_dims(-1, 3), normalized_dims((), 2), normalized_dims((-1, 0), 3), normalized_dims(0, 0)
    ((2,), (0, 1), (0, 2), ())
    """
    if ndim == 0:
        return ()
    given = (dims,) if isinstance(dims, int) else tuple(dims or range(ndim))
    return tuple(sorted({dim % ndim for dim in given}))


def _reduced_flags(sizes: Sequence[int], full: Sequence[int], dims: Collection[int]) -> list[bool]:
    """Return which of the finer sizes lie in a reduced dimension of the full shape."""
    flags: list[bool] = []
    below = 1  # elements of one step of the current finer size
    bounds: list[tuple[int, bool]] = []
    step = 1
    for dim in reversed(range(len(full))):
        step *= full[dim]
        if full[dim] > 1:
            bounds.append((step, dim in dims))
    for size in reversed(sizes):
        below *= size
        flags.append(next((flag for bound, flag in bounds if below <= bound), False))
    return list(reversed(flags))
