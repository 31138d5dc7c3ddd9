"""Packing for kernels that declare their parameters: each in its C type, checked and converted before any launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kagent_core.device import ArgumentPacker
from kagent_core.errors import PackingError
from kagent_core.extract.binding import BoundParameter, BoundPrototype, bind_prototype
from kagent_core.extract.operator_names import CallValues, plain
from kagent_core.extract.packing import CallPacker
from kagent_core.prototype import same_value
from kagent_core.prototype.abi import Abi
from kagent_core.prototype.c_types import CType, Kind, describe
from kagent_core.specs import (
    Access,
    KernelDescriptor,
    LocalMemory,
    OpCall,
    PackedArg,
    Parameter,
    TensorSpec,
    flatten_tensors,
)


class PrototypePacker(ArgumentPacker):
    """Packs an operator's arguments for a kernel that declares its parameters, in their order.

    Arguments that a call leaves out come from the operator's schema. A kernel without a prototype, which takes
    the operator's own arguments, is left to another packer.

    Parameters
    ----------
    abi
        How the device lays out parameters; by default as a 64-bit device does.
    calls
        Packs for kernels without a prototype; a `CallPacker` by default.
    """

    def __init__(self, abi: Abi | None = None, calls: ArgumentPacker | None = None) -> None:
        self.abi = abi or Abi()
        self._calls = calls or CallPacker()
        self._bound: dict[tuple[Any, ...], BoundPrototype] = {}

    def pack(self, call: OpCall, kernel: KernelDescriptor) -> tuple[PackedArg, ...]:
        """Return one packed argument per parameter.

        Raises
        ------
        PackingError
            When a value does not fit its parameter, the prototype does not fit the operator, or the call gives
            something that the kernel would ignore.
        """
        if not has_prototype(kernel):
            return self._calls.pack(call, kernel)
        bound = self._bind(call, kernel)
        _refuse_ignored(call, kernel, bound)
        values = CallValues(call, bound.names)
        packed = tuple(_pack(parameter, values) for parameter in bound.parameters)
        _check_written(call, kernel, packed)
        return packed

    def _bind(self, call: OpCall, kernel: KernelDescriptor) -> BoundPrototype:
        key = (kernel.signature, kernel.name, kernel.parameters, call.overload)
        bound = self._bound.get(key)
        if bound is None:
            if kernel.allocates:
                raise PackingError(
                    f"kernel '{kernel.name}' for {kernel.signature} declares its parameters, and also that it "
                    "allocates its results: it can be given a place for them or make one, not both",
                    hint="register it with allocates=False",
                )
            bound = self._bound[key] = bind_prototype(kernel, self.abi, call.overload)
        return bound


def has_prototype(kernel: KernelDescriptor) -> bool:
    """Whether a kernel declares C parameters; one that only names its results takes the operator's own arguments."""
    return any(parameter.type != "Tensor" or parameter.access is not Access.OUT for parameter in kernel.parameters)


def check_sizes(
    kernel: KernelDescriptor, prototype: Sequence[Parameter], sizes: Sequence[int], abi: Abi | None = None
) -> None:
    """Check a prototype against what the driver says of the compiled kernel.

    Parameters
    ----------
    kernel
        For messages.
    prototype
        The parameters that were declared.
    sizes
        Size in bytes of each parameter of the compiled kernel.
    abi
        The device's; by default that of a 64-bit device.

    Raises
    ------
    PackingError
        When the number of parameters differs, or the size of one.
    """
    abi = abi or Abi()
    no_argument = (Kind.VOID, Kind.LOCAL)  # shared memory is no parameter where drivers tell sizes
    taken = [parameter for parameter in prototype if abi.type(parameter.type).kind not in no_argument]
    if len(taken) != len(sizes):
        raise PackingError(
            f"kernel '{kernel.name}' for {kernel.signature} declares {len(taken)} parameters "
            f"({', '.join(parameter.name for parameter in taken)}), but was compiled with {len(sizes)}",
            hint="declare the parameters as the source does, in its order",
        )
    for position, (parameter, nbytes) in enumerate(zip(taken, sizes, strict=True)):
        ctype = abi.type(parameter.type)
        if ctype.nbytes != nbytes:
            raise PackingError(
                f"parameter '{parameter.name}' of kernel '{kernel.name}' for {kernel.signature} is declared as "
                f"{parameter.type}, {ctype.nbytes} bytes, but parameter {position} was compiled with {nbytes}",
                hint="declare the parameters as the source does, in its order",
            )


def _pack(bound: BoundParameter, values: CallValues) -> PackedArg:
    try:
        value = bound.read(values)
    except PackingError as error:
        raise PackingError(f"{bound.label}: {error.message}", hint=error.hint) from None
    name, ctype = bound.parameter.name, bound.type
    if ctype.kind is Kind.POINTER and isinstance(value, TensorSpec):
        _check_dtype(bound, value)
        return PackedArg(name, value, bound.access, type=ctype.name)
    if ctype.kind is Kind.LOCAL:
        return PackedArg(name, _local_memory(ctype, value, bound.label), type=ctype.name)
    _check_kind(bound, value)
    converted = ctype.convert(value, bound.label, bound.padding)
    return PackedArg(name, converted, type=ctype.name, data=ctype.pack(converted))


def _local_memory(ctype: CType, count: Any, label: str) -> LocalMemory:
    assert ctype.element is not None
    if type(count) is not int or count < 1:
        raise PackingError(
            f"{label} is a {ctype.name} of {describe(count)} elements, expected a whole number of at least 1",
            hint="derive how many elements it has, not bytes",
        )
    return LocalMemory(ctype.name, count * ctype.element.nbytes)


def _check_dtype(bound: BoundParameter, spec: TensorSpec) -> None:
    taken = bound.type.dtypes
    if taken is not None and spec.dtype.name not in taken:
        raise PackingError(
            f"{bound.label} is a {bound.type.name} and takes a tensor of {' or '.join(sorted(taken))}, "
            f"not the {spec.dtype} tensor {spec}",
            hint=f"keep {spec.dtype} away from this kernel (dtypes={{...}}) and register another one for it",
        )


def _check_kind(bound: BoundParameter, value: Any) -> None:
    """Say what would help where a parameter cannot take what came."""
    name, kind = bound.parameter.name, bound.type.kind
    what = f"{bound.label} is a {bound.type.name} and takes"
    if kind is Kind.POINTER:
        if value is None and not bound.parameter.optional:
            raise PackingError(
                f"{what} a tensor, not None",
                hint="declare it optional: the kernel then gets a null pointer for a tensor that was not given",
            )
        return  # anything else that is no tensor has no place in a pointer
    expected = "a list" if kind is Kind.ARRAY else "a number"
    if isinstance(value, TensorSpec):
        raise PackingError(
            f"{what} {expected}, not {describe(value)}",
            hint="declare it a pointer, or register another kernel for tensors",
        )
    if value is None:
        raise PackingError(
            f"{what} {expected}, not None",
            hint=f"derive what the kernel should get: derived={{'{name}': '0 if {name} is None else {name}'}}",
        )
    if isinstance(value, str):
        raise PackingError(
            f"{what} {expected}, not {value!r}",
            hint=f"derive a number from it: derived={{'{name}': '{name} == \"{value}\"'}}",
        )


def _refuse_ignored(call: OpCall, kernel: KernelDescriptor, bound: BoundPrototype) -> None:
    """A kernel must not compute something else than the operator because it does not look at an argument."""
    for argument, expected in bound.ignored:
        value = plain(call.arguments.get(argument.name, argument.default))
        if not same_value(value, expected):
            at_most = "whose default is" if expected == argument.default else "and is right only for"
            raise PackingError(
                f"kernel '{kernel.name}' for {kernel.signature} ignores {argument.name}={_show(value)}, "
                f"{at_most} {_show(expected)}",
                hint=f"add the parameter '{argument.name}', or register another kernel for such calls",
            )
    for argument, count in bound.lists:
        came = len(call.arguments.get(argument.name) or ())
        if came > count:
            raise PackingError(
                f"kernel '{kernel.name}' for {kernel.signature} takes {count} tensors of '{argument.name}', and "
                f"would ignore the other {came - count}",
                hint=f"register another kernel, with '{argument.name}{came - 1}' among its parameters",
            )


def _show(value: Any) -> str:
    return str(value) if isinstance(value, TensorSpec) else repr(value)


def _check_written(call: OpCall, kernel: KernelDescriptor, packed: Sequence[PackedArg]) -> None:
    """A tensor that the operator writes and the kernel is not given would keep what was there before."""
    written = {
        spec for arg in packed if arg.access in (Access.OUT, Access.INOUT) for spec in flatten_tensors(arg.value)
    }
    missing = [spec for spec in call.outputs if spec not in written]
    if missing:
        raise PackingError(
            f"kernel '{kernel.name}' for {kernel.signature} has no parameter for "
            f"{len(missing)} of the {len(call.outputs)} tensors that the operator writes: "
            f"{', '.join(map(str, missing))}",
            hint="declare a pointer per result: 'out', or 'out0', 'out1', ... when there are several",
        )
