"""A group of calls as one call of one operator, so that whatever packs a call packs a group."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.specs import OpCall, TensorSpec, flatten_tensors


@dataclass(frozen=True, slots=True)
class GroupArgument:
    """An argument of one of a group's calls that the group gets from outside.

    Attributes
    ----------
    name
        The operator's name for it, with the position of its call behind it where an earlier call of the group has one
        of that name: ``other1`` is `other` of the second call.
    position
        Of its call in the group.
    argument
        As the operator calls it.
    """

    name: str
    position: int
    argument: str


@dataclass(frozen=True)
class FusedOverload:
    """Stands for torch's ``OpOverload`` of a group: a schema with the arguments that come from outside.

    Attributes
    ----------
    _schema
        What those who pack calls read of an overload.
    tags
        None: a group draws no random numbers.
    """

    _schema: _Schema
    tags: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class _Schema:
    name: str
    arguments: tuple[_Argument, ...]
    returns: tuple[_Return, ...]
    overload_name: str = ""


@dataclass(frozen=True, eq=False)
class _Argument:
    """One of torch's arguments under the group's name for it."""

    name: str
    type: Any
    real_type: Any
    kwarg_only: bool
    default_value: Any
    has_default: bool
    alias_info: None = None
    is_out: bool = False

    def has_default_value(self) -> bool:
        return self.has_default


@dataclass(frozen=True, eq=False)
class _Return:
    type: str = "Tensor"
    name: str = ""
    alias_info: None = None


def fused_call(calls: Sequence[OpCall], inner: Collection[int] = ()) -> OpCall:
    """Return a group as one call.

    Its arguments are the tensors from outside, in the order in which the calls take them, and then every other
    argument of every call; its results are those that leave the group.

    Parameters
    ----------
    calls
        In order. None of them writes an argument in place.
    inner
        Buffers of results that stay inside the group.

    Examples
    --------
    >>> from kagent_core.capture.schemas import resolve_overload
    >>> from kagent_core.specs import DType
    >>> x, y, z = (TensorSpec(DType("float32", 4), (8,), (1,), 0, buffer) for buffer in range(3))
    >>> relu = OpCall(0, "relu", "aten::relu", {"self": x}, (x,), (y,), (y,), overload=resolve_overload("aten::relu"))
    >>> add = resolve_overload("aten::add.Tensor")
    >>> add = OpCall(1, "add", "aten::add.Tensor", {"self": y, "other": x}, (y, x), (z,), (z,), overload=add)
    >>> print(fused_call([relu, add], inner={1}))
    relu+add: aten::relu+aten::add.Tensor(self=f32[8], other=f32[8]) -> (f32[8])
    """
    made: set[int] = set()
    outside: list[frozenset[str]] = []
    for call in calls:
        outside.append(frozenset(name for name, value in call.arguments.items() if not _comes_from(value, made)))
        made.update(spec.buffer for spec in call.fresh_results)
    absent = [frozenset(call.arguments) - names for call, names in zip(calls, outside, strict=True)]
    results = tuple(spec for call in calls for spec in call.fresh_results if spec.buffer not in inner)
    overloads = tuple(call.overload for call in calls)
    overload, names = _fused_overload(tuple(call.signature for call in calls), overloads, tuple(absent), len(results))
    arguments = {
        entry.name: calls[entry.position].arguments[entry.argument]
        for entry in names
        if entry.argument in calls[entry.position].arguments
    }
    inputs = tuple(spec for value in arguments.values() for spec in flatten_tensors(value))
    return OpCall(
        id=calls[-1].id,
        name="+".join(call.name for call in calls),
        signature=overload._schema.name,
        arguments=arguments,
        inputs=inputs,
        outputs=results,
        results=results,
        provenance=calls[-1].provenance,
        overload=overload,
    )


def _comes_from(value: Any, made: Collection[int]) -> bool:
    """Whether an argument is a tensor that the group has made itself."""
    return isinstance(value, TensorSpec) and value.buffer in made


@functools.lru_cache(maxsize=4096)
def _fused_overload(
    signatures: tuple[str, ...], overloads: tuple[Any, ...], absent: tuple[frozenset[str], ...], results: int
) -> tuple[FusedOverload, tuple[GroupArgument, ...]]:
    """Return the same object for the same pattern: those who pack keep what they found out about an overload."""
    tensors: list[tuple[GroupArgument, _Argument]] = []
    others: list[tuple[GroupArgument, _Argument]] = []
    for entry, argument in _named_arguments(overloads, absent):
        is_tensor = str(argument.type) in ("Tensor", "Optional[Tensor]")
        renamed = _Argument(
            name=entry.name,
            type=argument.type,
            real_type=argument.real_type,
            kwarg_only=not is_tensor,
            default_value=argument.default_value,
            has_default=argument.has_default_value(),
        )
        (tensors if is_tensor else others).append((entry, renamed))
    ordered = tensors + others
    returns = tuple(_Return() for _ in range(results))
    schema = _Schema("+".join(signatures), tuple(argument for _, argument in ordered), returns)
    return FusedOverload(schema), tuple(entry for entry, _ in ordered)


def _named_arguments(
    overloads: Sequence[Any], absent: Sequence[Collection[str]]
) -> Iterator[tuple[GroupArgument, Any]]:
    taken: set[str] = set()
    for position, (overload, inner) in enumerate(zip(overloads, absent, strict=True)):
        for argument in overload._schema.arguments:
            if argument.name not in inner:
                name = f"{argument.name}{position}" if argument.name in taken else argument.name
                taken.add(name)
                yield GroupArgument(name, position, argument.name), argument
