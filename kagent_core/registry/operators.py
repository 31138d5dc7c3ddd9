"""Whether the installed torch has the operators that kernels are registered for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kagent_core.errors import ConfigError, KagentError, PackingError, RegistryError, SignatureError, nearest
from kagent_core.layout import Layout
from kagent_core.registry.acceptance import RESULT_NAME
from kagent_core.specs import DEFAULT_SIGNATURE, Access, KernelDescriptor, Parameter


@dataclass(frozen=True)
class RegistryProblem:
    """A kernel that a registry set aside when it was frozen.

    Attributes
    ----------
    kernel
        As it was registered.
    reason
        What is wrong with it.
    hint
        What it should be, if that is known.
    """

    kernel: KernelDescriptor
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        told = f"kernel '{self.kernel.name}' for {self.kernel.signature} ({self.kernel.origin}) cannot be used: "
        return told + self.reason + ("" if self.hint is None else f"; {self.hint}")


def check_kernel(kernel: KernelDescriptor) -> None:
    """See whether the installed torch has a kernel's operators, with the arguments that the kernel names.

    Imports torch.

    Raises
    ------
    SignatureError
        When there is no such operator or overload; names the nearest one.
    RegistryError
        When a field has a value of another kind, a dtype does not exist, a parameter or a layout names nothing that the
        operator has, or the parameters leave out an argument that every call gives.
    PackingError
        When the expression of a derived parameter cannot be read.
    """
    try:
        _check(kernel)
    except (RegistryError, PackingError) as error:
        told = f"kernel '{kernel.name}' for {kernel.signature}: {error.message}"
        raise type(error)(told, hint=error.hint) from None


def check_fields(signature: str, given: Mapping[str, Any], *, besides: Iterable[str] = ()) -> None:
    """See whether keywords are fields of a `KernelDescriptor`, and whether one can be made of them.

    Parameters
    ----------
    signature
        What the kernel is for, for messages.
    given
        The keywords.
    besides
        Fields that are given otherwise.

    Raises
    ------
    RegistryError
        When a keyword is no field, or a collection is expected and something else came.
    """
    subject = f"kernel '{given.get('name')}' for {signature}"
    known = sorted({field.name for field in fields(KernelDescriptor)} - {"signature", "function", *besides})
    for name in given:
        if name not in known:
            close = nearest(name, known)
            meant = f"did you mean '{close}'? " if close else ""
            raise RegistryError(
                f"{subject}: '{name}' is no field of a kernel", hint=f"{meant}the fields are {', '.join(known)}"
            )
    dtypes = given.get("dtypes")
    if isinstance(dtypes, str):
        raise RegistryError(
            f"{subject}: its dtypes are {dtypes!r}, expected a set of names", hint=f'write dtypes={{"{dtypes}"}}'
        )
    if dtypes is not None and not isinstance(dtypes, Iterable):
        raise RegistryError(f"{subject}: its dtypes are {dtypes!r}, expected a set of names", hint=_dtypes_hint(dtypes))
    if isinstance(given.get("layouts"), (str, Layout)):
        raise RegistryError(
            f"{subject}: its layouts are {given['layouts']!r}, expected a mapping from tensors to layouts",
            hint="for example {'self': kagent_core.layout.CONTIGUOUS}; layout= is for every tensor",
        )


def check_placed(signatures: Iterable[str]) -> None:
    """See whether the installed torch has the operators that the config places.

    Only ATen's: a program can define operators of other namespaces at any time. Imports torch where there are any.

    Raises
    ------
    ConfigError
        When it has not; names the nearest one.
    """
    for signature in signatures:
        if signature.startswith("aten::"):
            try:
                _overload(signature)
            except SignatureError as error:
                raise ConfigError(f"config key placement: {error.message}", hint=error.hint) from None


def _check(kernel: KernelDescriptor) -> None:
    _check_kinds(kernel)
    _check_dtypes(kernel)
    if kernel.signature == DEFAULT_SIGNATURE:
        return
    names = _Names(kernel)
    for name in dict(kernel.layouts):
        names.check(f"the tensor '{name}', which it has a layout for,", name)
    declared = [parameter for parameter in kernel.parameters if not _is_named_result(parameter)]
    for parameter in declared:
        names.used.add(parameter.name)
        if parameter.derived is None:
            names.check(f"its parameter '{parameter.name}'", parameter.name)
            continue
        for name in _names_in(parameter.derived):
            names.check(f"'{name}', from which its parameter '{parameter.name}' is derived,", name)
    if declared:
        names.check_complete()


def problem_with(kernel: KernelDescriptor) -> RegistryProblem | None:
    """Return what `check_kernel` has against a kernel, or None."""
    try:
        _check(kernel)
    except KagentError as error:
        return RegistryProblem(kernel, error.message, error.hint)
    return None


class _Names:
    """What a kernel can name: what a prototype for its operator can, and in a group for any of its operators.

    An argument of a later operator of a group may have the operator's position behind its name.
    """

    def __init__(self, kernel: KernelDescriptor) -> None:
        names = importlib.import_module("kagent_core.extract.operator_names")
        self._kernel = kernel
        signatures = kernel.fuses or (kernel.signature,)
        self._operators = [names.OperatorNames(_overload(signature)) for signature in signatures]
        self.used: set[str] = set()

    def check(self, what: str, name: str) -> None:
        """Raise unless the name means something; note the arguments that it speaks of."""
        found = RESULT_NAME.fullmatch(name) is not None if self._kernel.fuses else False
        for position, operator in enumerate(self._operators):
            for spelled in {name, name.removesuffix(str(position)) if position else name}:
                try:
                    self.used |= operator.used(spelled)
                    found = True
                except KeyError:
                    pass
        if not found:
            known = sorted({name for operator in self._operators for name in operator.known()})
            close = nearest(name, known)
            raise RegistryError(
                f"{what} is neither an argument nor a result of {self._kernel.signature}, which has {', '.join(known)}",
                hint=f"did you mean '{close}'?" if close else None,
            )

    def check_complete(self) -> None:
        """Raise when an argument that every call gives is left out."""
        if self._kernel.fuses:
            return  # what comes from inside the group is no parameter
        for name, argument in self._operators[0].arguments.items():
            if argument.required and name not in self.used:
                raise RegistryError(
                    f"its prototype has no parameter for '{name}' of {self._kernel.signature}, which every call gives"
                )


def _is_named_result(parameter: Parameter) -> bool:
    """Whether it only gives a name to a result of a kernel that takes the operator's own arguments."""
    return parameter.access is Access.OUT and parameter.type == "Tensor"


def _names_in(expression: str) -> tuple[str, ...]:
    expressions = importlib.import_module("kagent_core.prototype.expressions")
    return tuple(expressions.Expression(expression).names)


def _overload(signature: str) -> Any:
    # By name, so that importing the registry, as every plugin does, does not import torch.
    schemas = importlib.import_module("kagent_core.capture.schemas")
    try:
        return schemas.resolve_overload(signature)
    except SignatureError as error:
        close = _nearest_signature(signature)
        raise SignatureError(error.message, hint=f"did you mean '{close}'?" if close else error.hint) from None


def _nearest_signature(signature: str) -> str | None:
    """Return the overload that is spelled most alike: of the same operator, else of the one spelled most alike.

    None where the operator has overloads and the signature names none of them: no spelling tells which was meant.
    """
    torch = importlib.import_module("torch")
    operator, _, overload = signature.partition(".")
    known: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        known.setdefault(name.partition(".")[0], []).append(name)
    namespace = operator.partition("::")[0] + "::"
    close = operator if operator in known else nearest(operator, [k for k in known if k.startswith(namespace)] or known)
    if close is None:
        return None
    if not overload and close == operator:
        return None
    return nearest(f"{close}.{overload}" if overload else close, _not_out(known[close]))


def _not_out(signatures: Iterable[str]) -> list[str]:
    """Leave out the variants that fill results of the caller's, which no captured program calls."""
    return [signature for signature in signatures if not signature.partition(".")[2].endswith("out")]


def _check_kinds(kernel: KernelDescriptor) -> None:
    layout_hint = "layouts are in kagent_core.layout, such as layout=kagent_core.layout.CONTIGUOUS"
    if not isinstance(kernel.layout, Layout):
        raise RegistryError(f"its layout is {kernel.layout!r}, expected a Layout", hint=layout_hint)
    for tensor, layout in dict(kernel.layouts).items():
        if not isinstance(layout, Layout):
            raise RegistryError(f"its layout for '{tensor}' is {layout!r}, expected a Layout", hint=layout_hint)
    if not isinstance(kernel.priority, int):
        raise RegistryError(
            f"its priority is {kernel.priority!r}, expected a whole number",
            hint="the highest one wins; it is 0 by default",
        )
    for name in kernel.dtypes or ():
        if not isinstance(name, str):
            raise RegistryError(f"its dtypes have {name!r}, expected names of dtypes", hint=_dtypes_hint(name))
    for parameter in kernel.parameters:
        if not isinstance(parameter, Parameter):
            raise RegistryError(
                f"its parameters have {parameter!r}, expected a kagent_core.specs.Parameter",
                hint="kagent_core.prototype makes them out of a kernel's source",
            )


def _dtypes_hint(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return f'write dtypes={{"{name if name.isidentifier() else "float32"}"}}'


def _check_dtypes(kernel: KernelDescriptor) -> None:
    torch = importlib.import_module("torch")
    for name in sorted(kernel.dtypes or ()):
        if not isinstance(getattr(torch, name, None), torch.dtype):
            known = [other for other, value in vars(torch).items() if isinstance(value, torch.dtype)]
            close = nearest(name, known)
            raise RegistryError(
                f"it takes the dtype '{name}', which torch does not have",
                hint=f"did you mean '{close}'?" if close else None,
            )
