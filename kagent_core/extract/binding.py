"""A prototype bound to one operator: for each parameter, where its value comes from and what is done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kagent_core.capture.schemas import resolve_overload
from kagent_core.errors import PackingError, choices, nearest
from kagent_core.extract.operator_names import CallValues, OperatorArgument, OperatorNames
from kagent_core.prototype.abi import Abi
from kagent_core.prototype.c_types import CType, Kind
from kagent_core.prototype.declaration import local_without_length
from kagent_core.prototype.expressions import Expression
from kagent_core.specs import Access, KernelDescriptor, Parameter


@dataclass(frozen=True, slots=True)
class BoundParameter:
    """A parameter of a prototype, and where its value comes from in a call.

    Attributes
    ----------
    parameter
        As declared.
    label
        The parameter, its kernel and the operator, for messages.
    type
        Its C type, as the device lays it out.
    access
        For pointers, what the kernel does with the tensor.
    read
        Gives its value in a call.
    padding
        What fills an array behind the values that come.
    """

    parameter: Parameter
    label: str
    type: CType
    access: Access | None
    read: Callable[[CallValues], Any]
    padding: int = 0


@dataclass(frozen=True, slots=True)
class BoundPrototype:
    """A kernel's prototype for the operator that it computes.

    Attributes
    ----------
    names
        What the operator's names stand for.
    parameters
        Those that the kernel takes, in order.
    ignored
        Arguments that the kernel does not look at, each with the only value that a call may give it.
    lists
        By list of tensors, how many of its first items the prototype takes.
    """

    names: OperatorNames
    parameters: tuple[BoundParameter, ...]
    ignored: tuple[tuple[OperatorArgument, Any], ...]
    lists: tuple[tuple[OperatorArgument, int], ...]


def bind_prototype(kernel: KernelDescriptor, abi: Abi | None = None, overload: Any = None) -> BoundPrototype:
    """Check a kernel's prototype against the operator's schema, and return it bound.

    Parameters
    ----------
    kernel
        With `parameters`.
    abi
        The device's; by default that of a 64-bit device.
    overload
        torch's ``OpOverload``; by default the one that the kernel's signature names.

    Raises
    ------
    PackingError
        When a parameter's name or type means nothing for the operator, or an argument that has no default is
        left out.
    SignatureError
        When the installed torch has no such operator.
    """
    names = OperatorNames(overload if overload is not None else resolve_overload(kernel.signature))
    binder = _Binder(kernel, abi or Abi(), names)
    bound = [binder.bind(parameter) for parameter in kernel.parameters]
    left_out = [argument for name, argument in names.arguments.items() if name not in binder.used]
    for argument in left_out:
        if argument.required:
            raise PackingError(
                f"kernel '{kernel.name}' has no parameter for '{argument.name}' of {kernel.signature}, "
                "which every call gives",
                hint="add the parameter, derive another one from it, or say which values the kernel is right for: "
                f"only={{'{argument.name}': value}}, or ignore=['{argument.name}'] for all",
            )
    return BoundPrototype(
        names,
        tuple(parameter for parameter in bound if parameter is not None),
        (
            *((argument, argument.default) for argument in left_out if not argument.describes_the_result),
            *binder.only,
        ),
        tuple((names.arguments[name], count) for name, count in binder.items.items()),
    )


class _Binder:
    """Binds the parameters of one kernel, and notes which arguments they use."""

    def __init__(self, kernel: KernelDescriptor, abi: Abi, names: OperatorNames) -> None:
        self._kernel = kernel
        self._abi = abi
        self._names = names
        self.used: set[str] = set()
        self.items: dict[str, int] = {}
        self.only: list[tuple[OperatorArgument, Any]] = []

    def bind(self, parameter: Parameter) -> BoundParameter | None:
        """Bind one parameter; None for an argument that the kernel does without."""
        label = f"parameter '{parameter.name}' of kernel '{self._kernel.name}' for {self._kernel.signature}"
        try:
            return self._bind(parameter, label)
        except PackingError as error:
            if error.message.startswith(label):
                raise
            raise PackingError(f"{label}: {error.message}", hint=error.hint) from None

    def _bind(self, parameter: Parameter, label: str) -> BoundParameter | None:
        ctype = self._abi.type(parameter.type)
        if ctype.kind is Kind.VOID:
            self._bind_void(parameter, label)
            return None
        if ctype.kind is Kind.VECTOR:
            raise PackingError(
                f"{label} is a {ctype.name}, which no argument is",
                hint="a pointer to it carries a tensor, and an array such as int64_t[8] carries a list",
            )
        if ctype.kind is Kind.POINTER:
            return self._bind_pointer(parameter, label, ctype)
        if ctype.kind is Kind.LOCAL and parameter.derived is None:
            raise local_without_length(parameter.name, ctype.name)
        if parameter.access is not None or parameter.optional:
            what = f"'{parameter.access.value}'" if parameter.access is not None else "optional"
            raise PackingError(f"{label} is declared {what}, but {parameter.type} is no pointer")
        return self._bind_value(parameter, label, ctype)

    # -- values

    def _bind_void(self, parameter: Parameter, label: str) -> None:
        argument = self._names.arguments.get(parameter.name)
        if argument is None:
            raise self._unknown(parameter.name, self._names.arguments, label)
        self.used.add(parameter.name)
        if parameter.derived is not None:
            expression = Expression(parameter.derived)
            if expression.names:
                raise PackingError(f"{label} is right for '{expression.text}' only, which is not one value")
            self.only.append((argument, expression.evaluate(dict[str, Any]().__getitem__)))

    def _bind_value(self, parameter: Parameter, label: str, ctype: CType) -> BoundParameter:
        name = parameter.name
        expression: Expression | None = None
        if parameter.derived is not None:
            expression = Expression(parameter.derived)
        elif name not in self._names.arguments:
            expression = self._names.property(name)
        if expression is None:
            self._use(name, [name], label)
            return BoundParameter(parameter, label, ctype, None, lambda values: values(name))
        self._use(expression.text, expression.names, label)
        sizes = parameter.derived is None and expression.text.endswith(".shape")
        # size 1 in the dimensions that a tensor lacks, so that a loop over all of them needs no case
        return BoundParameter(parameter, label, ctype, None, expression.evaluate, padding=int(sizes))

    def _use(self, text: str, names: Iterable[str], label: str) -> None:
        for name in names:
            try:
                self.used |= self._names.used(name)
            except KeyError:
                where = f"{label} derives '{text}': '{name}'" if name != text else label
                raise self._unknown(name, self._names.known(), where) from None

    def _unknown(self, name: str, known: Iterable[str], where: str) -> PackingError:
        known = list(known)
        close = nearest(name, known)
        return PackingError(
            f"{where} is neither an argument nor a result of {self._kernel.signature}, nor derived from one",
            hint=(f"did you mean '{close}'? " if close else "")
            + f"it has {choices(known)}; give any other value with derived={{...}}",
        )

    # -- tensors

    def _bind_pointer(self, parameter: Parameter, label: str, ctype: CType) -> BoundParameter:
        name, names = parameter.name, self._names
        if parameter.derived is not None:
            raise PackingError(f"{label} is a {ctype.name}, but a derived value is no tensor")
        self._use(name, [name], label)
        argument, item, index = names.arguments.get(name), names.item(name), names.result(name)
        if index is not None:
            result = index
            access = self._result_access(parameter, ctype, label, result in names.in_place)
            return BoundParameter(parameter, label, ctype, access, lambda values: values.result(result))
        if item is not None:
            owner, position = item
            self.items[owner.name] = max(self.items.get(owner.name, 0), position + 1)
            access = self._argument_access(parameter, ctype, label, owner)
            return BoundParameter(parameter, label, ctype, access, lambda values: values.item(owner, position))
        if argument is None or not argument.is_tensor:
            raise _no_tensor(name, argument, ctype, label)
        access = self._argument_access(parameter, ctype, label, argument)
        return BoundParameter(parameter, label, ctype, access, lambda values: values.argument(argument))

    def _argument_access(self, parameter: Parameter, ctype: CType, label: str, argument: OperatorArgument) -> Access:
        access = parameter.access
        if access is None:
            access = Access.IN if ctype.const else Access.INOUT
        if access is not Access.IN:
            _check_const(ctype, access, label)
            if not argument.writes:
                raise PackingError(
                    f"{label} may be written, but the operator does not write its argument '{argument.name}'",
                    hint=f"declare it a pointer to const: const {ctype.name}",
                )
        return access

    def _result_access(self, parameter: Parameter, ctype: CType, label: str, in_place: bool) -> Access:
        access = parameter.access or Access.OUT
        if access is Access.IN or (access is Access.INOUT and not in_place):
            raise PackingError(
                f"{label} is declared '{access.value}', but a result is only written",
                hint="leave its access out, or declare it Access.OUT",
            )
        _check_const(ctype, access, label)
        return access


def _check_const(ctype: CType, access: Access, label: str) -> None:
    if ctype.const:
        raise PackingError(f"{label} is a {ctype.name}, which cannot be written, but it is '{access.value}'")


def _no_tensor(name: str, argument: OperatorArgument | None, ctype: CType, label: str) -> PackingError:
    if argument is not None and argument.is_tensor_list:
        return PackingError(
            f"{label} is a {ctype.name}, but '{name}' is a list of tensors",
            hint=f"declare '{name}0', '{name}1', ...: one per tensor",
        )
    kind = f"of type {argument.type}" if argument is not None else "derived from others"
    return PackingError(f"{label} is a {ctype.name}, but '{name}' is {kind}, and no tensor")
