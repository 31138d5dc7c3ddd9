"""Operators by exact signature: torch's overloads and what their schemas say."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.errors import SignatureError, nearest
from kagent_core.specs import DType


@dataclass(frozen=True, slots=True)
class ArgumentSchema:
    """One argument of an operator.

    Attributes
    ----------
    name
        As in ATen: ``self``, ``other``, ``alpha``.
    keyword_only
        Whether it must be given by name.
    writes
        Whether the operator writes the tensor (or tensors) in place.
    """

    name: str
    keyword_only: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """What kagent needs to know of an overload.

    Attributes
    ----------
    signature
        ``namespace::name`` or ``namespace::name.overload``.
    arguments
        In order.
    random
        Whether it draws from the random number generator.
    writes
        Whether any argument is written in place.
    """

    signature: str
    arguments: tuple[ArgumentSchema, ...]
    random: bool
    writes: bool


def signature_of(overload: torch._ops.OpOverload) -> str:
    """Return an overload's exact signature.

    Examples
    --------
    >>> signature_of(torch.ops.aten.add.Tensor), signature_of(torch.ops.aten.relu.default)
    ('aten::add.Tensor', 'aten::relu')
    """
    schema = overload._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


@functools.cache
def schema_of(overload: torch._ops.OpOverload) -> OperatorSchema:
    """Return what an overload's schema says."""
    arguments = tuple(
        ArgumentSchema(arg.name, arg.kwarg_only, arg.alias_info is not None and arg.alias_info.is_write)
        for arg in overload._schema.arguments
    )
    return OperatorSchema(
        signature=signature_of(overload),
        arguments=arguments,
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        writes=any(arg.writes for arg in arguments),
    )


@functools.cache
def resolve_overload(signature: str) -> torch._ops.OpOverload:
    """Return torch's overload for an exact signature.

    Raises
    ------
    SignatureError
        When the installed torch has no such operator or overload; names the nearest one. ``aten::add`` is not
        taken for ``aten::add.Tensor``: a signature is never loosened.
    """
    namespace, separator, rest = signature.partition("::")
    if not separator or not namespace or not rest:
        raise SignatureError(
            f"'{signature}' is not an operator signature",
            hint="write namespace::name or namespace::name.overload, such as 'aten::relu' or 'aten::add.Tensor'",
        )
    name, _, overload_name = rest.partition(".")
    known = _packets().get(namespace, {})
    if name not in known:
        close = nearest(name, known)
        raise SignatureError(
            f"the installed torch ({torch.__version__}) has no operator '{namespace}::{name}'",
            hint=f"did you mean '{namespace}::{close}'?" if close else None,
        )
    if overload_name not in known[name]:
        there = ", ".join(f"{namespace}::{name}{'.' + o if o else ''}" for o in sorted(known[name]))
        raise SignatureError(f"there is no overload '{signature}'", hint=f"the overloads are {there}")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload_name or "default")  # type: ignore[no-any-return]


def _packets() -> dict[str, dict[str, set[str]]]:
    """Overload names of every operator of the dispatcher, by namespace and name.

    TorchScript has more, on numbers and strings (``aten::add`` of two Scalars, say), which no tensor comes to.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for signature in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = signature.partition("::")
        name, _, overload_name = rest.partition(".")
        found.setdefault(namespace, {}).setdefault(name, set()).add(overload_name)
    return found


@functools.cache
def dtype_of(dtype: torch.dtype) -> DType:
    """Return kagent's name for one of torch's element types."""
    return DType(str(dtype).removeprefix("torch."), dtype.itemsize)


@functools.cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's element type for a `DType`."""
    return getattr(torch, dtype.name)  # type: ignore[no-any-return]


def is_operator(target: Any) -> bool:
    """Whether an fx node's target is an operator overload, as opposed to a Python function."""
    return isinstance(target, torch._ops.OpOverload)
