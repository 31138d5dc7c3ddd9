"""OpenCL's argument model, checked: the API takes a value of the wrong type in silence, as long as its size is right.

A tensor is two arguments there, a buffer and a ``long`` with the number of the tensor's first element in it. What
a kernel's prototype makes of its parameters is compared with the arguments of the compiled kernel, before a launch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.errors import PackingError
from kagent_core.extract.pack_prototype import PrototypePacker
from kagent_core.prototype.abi import Abi
from kagent_core.prototype.c_types import CType, Kind
from kagent_core.prototype.declaration import kernel_declarations, type_definitions
from kagent_core.specs import Access, KernelDescriptor, OpCall, PackedArg, Parameter

_ABI = Abi()
_SPACES = ("global", "constant", "local", "private")
_OPAQUE = re.compile(r"(image\w*|sampler|event|queue|clk_event|reserve_id|ndrange)_t|pipe\b.*")
_QUALIFIERS = {
    *("const", "volatile", "restrict", "__restrict", "__restrict__", "read_only", "write_only", "read_write"),
    *(f"{prefix}{word}" for word in _SPACES for prefix in ("", "__")),
    *("__read_only", "__write_only", "__read_write"),
}


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """One argument of a kernel: as a compiled kernel has it, or as its prototype makes it.

    Attributes
    ----------
    space
        Where it lies: ``global``, ``constant``, ``local`` or ``private``.
    type
        Its type without qualifiers: ``float*``, ``long``.
    const
        Whether a pointer's target is read only.
    name
        Of the argument.
    """

    space: str
    type: str
    const: bool
    name: str

    def __str__(self) -> str:
        space = "" if self.space == "private" else f"__{self.space} "
        const = "const " if self.const and self.space == "global" else ""
        pointee, star, _ = self.type.partition("*")
        return f"{space}{const}{pointee} *{self.name}" if star else f"{space}{const}{self.type} {self.name}"


class OpenClPacker(PrototypePacker):
    """Packs by prototypes, and refuses what a device has no type for.

    Parameters
    ----------
    lacks
        By dtype that the device has not, the reason.
    """

    def __init__(self, lacks: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._lacks = dict(lacks or {})

    def pack(self, call: OpCall, kernel: KernelDescriptor) -> tuple[PackedArg, ...]:
        """Return one packed argument per parameter.

        Raises
        ------
        PackingError
            As `PrototypePacker`, and for a parameter of a type that the device lacks.
        """
        for parameter in kernel.parameters if self._lacks else ():
            reason = self._lacks.get(_dtype_of(parameter) or "")
            if reason is not None:
                raise PackingError(
                    f"parameter '{parameter.name}' of kernel '{kernel.name}' for {kernel.signature} is a "
                    f"{parameter.type}, but {reason}",
                    hint="register the kernel for other dtypes only (dtypes={...}), or use another device",
                )
        return super().pack(call, kernel)


def _dtype_of(parameter: Parameter) -> str | None:
    """Return the dtype that a device must have for a parameter, where some lack it."""
    if parameter.type == "Tensor":
        return None
    ctype = _ABI.type(parameter.type)
    ctype = ctype.element or ctype
    return "float64" if ctype.dtypes is not None and "float64" in ctype.dtypes else None


# -- what a prototype makes of its parameters


def expected_arguments(parameters: Sequence[Parameter]) -> list[KernelArgument]:
    """Return the arguments that OpenCL is given for the parameters of a prototype.

    Examples
    --------
    >>> for argument in expected_arguments([Parameter("self", "const float*"), Parameter("alpha", "float")]):
    ...     print(argument)
    __global const float *self_buffer
    long self_first
    float alpha
    """
    found: list[KernelArgument] = []
    for parameter in parameters:
        ctype, name = _ABI.type(parameter.type), parameter.name
        if ctype.kind is Kind.VOID:
            continue
        if ctype.kind is Kind.POINTER:
            pointee = parameter.type.removeprefix("const ")
            read = ctype.const and parameter.access in (None, Access.IN)
            found.append(KernelArgument("global", pointee, read, f"{name}_buffer"))
            found.append(KernelArgument("private", "long", False, f"{name}_first"))
        elif ctype.kind is Kind.LOCAL:
            found.append(KernelArgument("local", parameter.type.removeprefix("local "), False, name))
        else:
            found.append(KernelArgument("private", parameter.type, False, name))
    return found


# -- what a kernel has


def arguments_of(kernel: Any) -> list[KernelArgument] | None:
    """Return the arguments of a ``pyopencl.Kernel``; None where the driver does not tell them, as of a binary."""
    import pyopencl as cl

    asked, spaces = cl.kernel_arg_info, cl.kernel_arg_address_qualifier
    named = {getattr(spaces, space.upper()): space for space in _SPACES}
    try:
        return [
            KernelArgument(
                named[kernel.get_arg_info(position, asked.ADDRESS_QUALIFIER)],
                _bare(kernel.get_arg_info(position, asked.TYPE_NAME)),
                bool(kernel.get_arg_info(position, asked.TYPE_QUALIFIER) & cl.kernel_arg_type_qualifier.CONST),
                kernel.get_arg_info(position, asked.NAME),
            )
            for position in range(kernel.num_args)
        ]
    except cl.Error:
        return None


def arguments_in(source: str, name: str) -> list[KernelArgument]:
    """Return the arguments of a kernel as its source declares them, macros not expanded."""
    found: list[KernelArgument] = []
    for declared, argument in kernel_declarations(source, name):
        words = {word.removeprefix("__") for word in re.findall(r"\w+", declared)}
        space = next((space for space in _SPACES if space in words), "private")
        if _bare(declared).startswith("image"):
            space = "global"
        found.append(KernelArgument(space, _bare(declared), bool({"const", "constant"} & words), argument))
    return found


def _bare(declared: str) -> str:
    """Return a type without qualifiers: ``float*``, ``unsigned int``."""
    words = [word for word in re.findall(r"\w+", declared) if word not in _QUALIFIERS]
    return " ".join(words) + "*" * declared.count("*")


# -- the comparison


def check_arguments(kernel: KernelDescriptor, found: Sequence[KernelArgument]) -> None:
    """Check that a compiled kernel takes what its prototype makes.

    Parameters
    ----------
    kernel
        With a prototype and a source.
    found
        The arguments that the compiled kernel has.

    Raises
    ------
    PackingError
        For the first argument that is of another type or in another memory, and for other numbers of arguments.
    """
    expected = expected_arguments(kernel.parameters)
    what = f"kernel '{kernel.name}' for {kernel.signature}"
    hint = f"its prototype stands for `__kernel void {kernel.name}({', '.join(map(str, expected))})`"
    types = type_definitions(kernel.source or "")
    for position, (wanted, came) in enumerate(zip(expected, found, strict=False)):
        wrong = _difference(wanted, came, types)
        if wrong is not None:
            two = ", since a tensor is two arguments" if wanted.name.endswith("_first") else ""
            raise PackingError(
                f"argument {position} of {what} is '{came}' in its source, expected '{wanted}'{two}: {wrong}", hint=hint
            )
    if len(expected) != len(found):
        raise PackingError(
            f"{what} has {len(found)} arguments in its source ({_listed(found)}), expected {len(expected)} "
            f"({_listed(expected)}): a tensor is two arguments",
            hint=hint,
        )


def _listed(arguments: Sequence[KernelArgument]) -> str:
    return ", ".join(argument.name for argument in arguments) or "none"


def _difference(wanted: KernelArgument, came: KernelArgument, types: Mapping[str, str]) -> str | None:
    """Return how an argument differs from what it is given, or None where it takes that."""
    if _OPAQUE.fullmatch(_resolved(came.type, types)):
        return f"no argument of an operator is a {came.type}"
    if came.space != wanted.space and (wanted.space, came.space) != ("global", "constant"):
        return f"it is in {came.space} memory, not in {wanted.space} memory"
    if wanted.space == "global" and (came.const or came.space == "constant") and not wanted.const:
        return "the kernel cannot write what is const"
    pointers = wanted.type.endswith("*"), came.type.endswith("*")
    if pointers[0] != pointers[1]:
        return "a value is no pointer"
    ours, its = (_type(argument.type.rstrip("*"), types) for argument in (wanted, came))
    if its is None or ours is None or _same_type(ours, its, pointers[0]):
        return None
    return f"{came.type} is not {wanted.type}"


def _resolved(spelling: str, types: Mapping[str, str]) -> str:
    seen: set[str] = set()
    while spelling in types and spelling not in seen:
        seen.add(spelling)
        spelling = types[spelling]
    return spelling


def _type(spelling: str, types: Mapping[str, str]) -> CType | None:
    """Return a type by its name; None for one that only the compiler knows, such as a struct."""
    resolved = _resolved(spelling, types)
    try:
        return _ABI.type(_OWN_NAMES.get(resolved, resolved))
    except PackingError:
        return None


_OWN_NAMES = {"uint8": "uint32_t[8]", "int8": "int32_t[8]", "uint16": "uint32_t[16]", "int16": "int32_t[16]"}
"""OpenCL's names of vectors that mean one number elsewhere."""


def _same_type(ours: CType, its: CType, behind_pointer: bool) -> bool:
    if behind_pointer and Kind.VOID in (ours.kind, its.kind):
        return True
    if (ours.kind, ours.nbytes, ours.code) == (its.kind, its.nbytes, its.code):
        return ours.kind is not Kind.VECTOR or ours.dtypes == its.dtypes
    if its.kind is Kind.INTEGER and not its.signed:  # what OpenCL C has no type of its own for comes as its bits
        if ours.kind is Kind.BOOL:
            return its.nbytes == 1
        return ours.kind is Kind.FLOAT and ours.nbytes == 2 == its.nbytes
    return ours.kind is Kind.BOOL and its.nbytes == 1
