"""What kind of loop an operator is, as far as the fusion rules care.

Lowering rules say it of ATen's operators; torch's tags say it of pointwise operators that have no rule, such as those
of a user's library.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kagent_core.codegen.generic import GENERIC
from kagent_core.codegen.nest import reduced_loops
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.table import LoweringKind
from kagent_core.specs import OpCall


class OperatorClass(Enum):
    """What the fusion rules know of an operator."""

    POINTWISE = "pointwise"  # each element of its result comes from one element of each input, broadcast
    GATHER = "gather"  # each element comes from elements at other places, which index arithmetic finds
    REDUCTION = "reduction"  # elements along some dimensions of `self` become one
    ROWS = "rows"  # reduces along some dimensions and goes over them again, as softmax does
    PARAMETRISED = "parametrised"  # a parametrised kernel that can compute what follows where it stores its result
    OTHER = "other"


_BY_RULE = {
    LoweringKind.POINTWISE: OperatorClass.POINTWISE,
    LoweringKind.GATHER: OperatorClass.GATHER,
    LoweringKind.REDUCTION: OperatorClass.REDUCTION,
    LoweringKind.ROWS: OperatorClass.ROWS,
}


UNTAGGED_POINTWISE = frozenset({"aten::_to_copy", "aten::copy"})
"""Pointwise operators that torch does not tag as such."""

REDUCTIONS = frozenset(
    {
        *("aten::sum", "aten::sum.dim_IntList", "aten::nansum", "aten::mean", "aten::mean.dim"),
        *("aten::prod", "aten::prod.dim_int", "aten::amax", "aten::amin", "aten::max", "aten::min"),
        *("aten::any", "aten::any.dim", "aten::any.dims", "aten::all", "aten::all.dim", "aten::all.dims"),
    }
)
"""Operators that reduce `self` along the dimensions of their argument `dim`; without one, along all of them."""

_POINTWISE_TAG = "pointwise"


def class_of(call: OpCall) -> OperatorClass:
    """Return the class of a call's operator, by its exact signature and by torch's tags.

    Examples
    --------
    >>> class_of(OpCall(0, "total", "aten::sum", {}, (), (), ())).value
    'reduction'
    """
    known = _class_by_signature(call.signature)
    if known is not None:
        return known
    tagged = call.overload is not None and _is_tagged(call.overload)
    return OperatorClass.POINTWISE if tagged else OperatorClass.OTHER


@functools.cache
def _class_by_signature(signature: str) -> OperatorClass | None:
    if signature in REDUCTIONS:
        return OperatorClass.REDUCTION
    if signature in UNTAGGED_POINTWISE:
        return OperatorClass.POINTWISE
    rule = RULES.find(signature)
    if rule is not None:
        return _BY_RULE[rule.kind]
    generic = GENERIC.find(signature)
    return OperatorClass.PARAMETRISED if generic is not None and generic.epilogue else None


@functools.cache
def _is_tagged(overload: Any) -> bool:
    """Whether torch's own tags, which the operators of a user's library can have too, say that it is pointwise."""
    return any(tag.name == _POINTWISE_TAG for tag in overload.tags)


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops of a call.

    Attributes
    ----------
    full
        Shape of what is looped over.
    reduced
        Dimensions of it that a reduction makes one of; empty for a pointwise operator.
    """

    full: tuple[int, ...]
    reduced: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape with size 1 where it is reduced."""
        return tuple(1 if dim in self.reduced else size for dim, size in enumerate(self.full))

    def __str__(self) -> str:
        along = f" along {', '.join(map(str, self.reduced))}" if self.reduced else ""
        return f"{list(self.full)}{along}"


def loops_of(call: OpCall) -> Loops:
    """Return the loops of a pointwise operator or a reduction.

    Examples
    --------
    >>> from kagent_core.specs import DType, TensorSpec
    >>> x = TensorSpec(DType("float32", 4), (4, 6), (6, 1), 0, 0)
    >>> rows = TensorSpec(DType("float32", 4), (4,), (1,), 0, 1)
    >>> call = OpCall(0, "total", "aten::sum.dim_IntList", {"self": x, "dim": (-1,)}, (x,), (rows,), (rows,))
    >>> print(loops_of(call), "leaves", loops_of(call).kept)
    [4, 6] along 1 leaves (4, 1)
    """
    kind = class_of(call)
    if kind is OperatorClass.ROWS:
        return Loops(*reduced_loops(call))
    if kind is not OperatorClass.REDUCTION:
        return Loops(call.outputs[0].shape)
    full: tuple[int, ...] = call.arguments["self"].shape
    given = call.arguments.get("dim")
    dims = (given,) if isinstance(given, int) else tuple(given or range(len(full)))
    return Loops(full, tuple(sorted({dim % max(len(full), 1) for dim in dims}) if full else ()))
