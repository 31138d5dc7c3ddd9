"""The arguments of calls, as rules and parametrised kernels get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kagent_core.specs import OpCall

OPERAND_TYPES = frozenset({"Tensor", "Optional[Tensor]", "number", "Optional[number]", "List[Tensor]"})
"""Types of arguments whose values a pointwise operator computes with."""

CONDITIONS = frozenset({"condition", "mask"})
"""Names of arguments that say which value is taken, and so keep their own type."""


def full_arguments(call: OpCall) -> dict[str, Any]:
    """Return a call's arguments by name, those that were left out with their defaults."""
    found: dict[str, Any] = {}
    for argument in call.overload._schema.arguments:
        if argument.name in call.arguments:
            found[argument.name] = call.arguments[argument.name]
        else:
            default = argument.default_value
            found[argument.name] = tuple(default) if isinstance(default, list) else default
    return found


def spread(values: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return one number per dimension, where one alone is for all.

    Examples
    --------
    >>> spread(3, 2), spread([3], 2), spread([3, 4], 2)
    ((3, 3), (3, 3), (3, 4))
    """
    several = (values,) if isinstance(values, int) else tuple(values)
    return several * count if len(several) == 1 else several


def pooled_dims(call: OpCall) -> int:
    """Return along how many dimensions the windows of a pooling operator move, which its name says."""
    return int(call.signature.partition("pool")[2][0])


def operand_names(call: OpCall) -> frozenset[str]:
    """Return the names of the arguments whose values a pointwise operator computes with, in its own type."""
    return frozenset(a.name for a in call.overload._schema.arguments if _is_operand(a))


def _is_operand(argument: Any) -> bool:
    return str(argument.type) in OPERAND_TYPES and argument.name not in CONDITIONS
