"""Whether the installed torch has the operators that kernels are registered for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kagent_core.errors import KagentError, RegistryError, SignatureError, nearest
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
        When a dtype does not exist, when a parameter or a layout names nothing that the operator has, or when the
        parameters leave out an argument that every call gives.
    PackingError
        When the expression of a derived parameter cannot be read.
    """
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
        check_kernel(kernel)
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
    """Return the overload that is spelled most alike: of the same operator, else of the one spelled most alike."""
    torch = importlib.import_module("torch")
    operator, _, overload = signature.partition(".")
    known: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        known.setdefault(name.partition(".")[0], []).append(name)
    namespace = operator.partition("::")[0] + "::"
    close = operator if operator in known else nearest(operator, [k for k in known if k.startswith(namespace)] or known)
    if close is None:
        return None
    return nearest(f"{close}.{overload}" if overload else close, known[close])


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
