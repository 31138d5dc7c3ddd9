"""Kernels as source text: what of a registration follows from the text and from the kernel's prototype."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from kagent_core.capture.schemas import resolve_overload
from kagent_core.errors import PackingError, RegistryError, SignatureError, nearest
from kagent_core.extract.operator_names import OperatorNames
from kagent_core.layout import CONTIGUOUS
from kagent_core.prototype import Abi, parse_prototype, prototype_name
from kagent_core.prototype.c_types import Kind
from kagent_core.prototype.expressions import Expression
from kagent_core.specs import KernelDescriptor, Parameter

PROTOTYPE_OPTIONS = ("derived", "optional", "ignore", "only", "types")
"""What `kernel` takes besides a prototype's text: the keywords of `kagent_core.prototype.parse_prototype`."""

_C_FAMILY = {".c", ".h", ".cc", ".cpp", ".cl", ".cu", ".cuh", ".hip"}


def descriptor_fields(signature: str, fuses: Sequence[str], given: Mapping[str, Any], is_function: bool) -> Any:
    """Return the fields of a `KernelDescriptor` that the keywords of `kagent_core.kernel` stand for.

    A kernel with source text is called as its function in the text is, takes contiguous tensors and the dtypes that its
    pointers have, where the keywords do not say otherwise.

    Parameters
    ----------
    signature
        What the kernel computes.
    fuses
        Its signatures, of a fused kernel.
    given
        The keywords.
    is_function
        Whether the kernel is a Python function.

    Raises
    ------
    RegistryError
        When a keyword is none, two of them say the same, or the source is a file that cannot be read.
    PackingError
        When the prototype cannot be read.
    """
    _check_keywords(signature, given)
    made = {name: value for name, value in given.items() if name not in ("prototype", *PROTOTYPE_OPTIONS)}
    options = {name: given[name] for name in PROTOTYPE_OPTIONS if given.get(name) is not None}
    if isinstance(made.get("source"), os.PathLike):
        made["source"] = read_source(Path(made["source"]))
    source, text = made.get("source"), given.get("prototype")
    if text is None and source is not None and "parameters" not in made:
        text = source
    if text is None:
        return made
    name = None if is_function else made.get("name")
    try:
        parameters = parse_prototype(text, name, **options)
        made.setdefault("name", prototype_name(text, name))
    except PackingError as error:
        told = f"kernel '{made.get('name', 'user_kernel')}' for {signature}: {error.message}"
        raise PackingError(told, hint=error.hint) from None
    made["parameters"] = (*parameters, *(() if fuses else _at_their_defaults(parameters, signature)))
    if source is not None:
        made.setdefault("layout", CONTIGUOUS)
        made.setdefault("dtypes", _pointed_dtypes(parameters))
    return made


def read_source(path: Path) -> str:
    """Return a kernel's source from a file, as `marked_source` marks it.

    Raises
    ------
    RegistryError
        When it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RegistryError(
            f"cannot read the kernel's source '{path}': {error.strerror}",
            hint="a path starts at the current directory; source text itself is given as a str",
        ) from None
    except UnicodeDecodeError as error:
        raise RegistryError(f"the kernel's source '{path}' is not UTF-8 text: {error.reason}") from None
    return marked_source(text, path)


def marked_source(text: str, path: Path) -> str:
    """Return a file's text; of the C family, below a line that lets compilers name the file in what they report."""
    spelled = path.name.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{spelled}"\n{text}' if path.suffix in _C_FAMILY else text


def _check_keywords(signature: str, given: Mapping[str, Any]) -> None:
    own = ("prototype", *PROTOTYPE_OPTIONS)
    known = {field.name for field in fields_of(KernelDescriptor)}
    for name in given:
        close = nearest(name, [*own, *known]) if name not in known and name not in own else None
        if close in own:
            raise RegistryError(
                f"'{name}', which the kernel for {signature} is given, means nothing", hint=f"did you mean '{close}'?"
            )
    if given.get("prototype") is not None and "parameters" in given:
        raise RegistryError(
            f"the kernel for {signature} is given a prototype and parameters, which say the same",
            hint="leave one of them out",
        )
    alone = [name for name in PROTOTYPE_OPTIONS if given.get(name) is not None]
    if alone and given.get("prototype") is None and (given.get("source") is None or "parameters" in given):
        raise RegistryError(
            f"the kernel for {signature} is given '{alone[0]}' without a prototype",
            hint='add prototype="void name(...)"',
        )


def _at_their_defaults(parameters: Iterable[Parameter], signature: str) -> list[Parameter]:
    """Return, for each argument that a kernel does not look at, that it is right for the argument's default only.

    So a call that gives another value is left to the device's next kernel, where it would else be an error.
    """
    try:
        names = OperatorNames(resolve_overload(signature))
        used = {name for parameter in parameters for name in _used_by(parameter, names)}
    except (SignatureError, KeyError):
        return []  # told when the kernel is checked
    found: list[Parameter] = []
    for argument in names.arguments.values():
        if argument.name in used or argument.required or argument.describes_the_result:
            continue
        found.append(Parameter(argument.name, "void", derived=repr(argument.default)))
    return found


def _used_by(parameter: Parameter, names: OperatorNames) -> set[str]:
    if parameter.type == "void":
        return {parameter.name}
    spoken_of = (parameter.name,) if parameter.derived is None else Expression(parameter.derived).names
    return {argument for name in spoken_of for argument in names.used(name)}


def _pointed_dtypes(parameters: Iterable[Parameter]) -> frozenset[str] | None:
    """Return the dtypes that the pointers of a prototype take; None for all."""
    found: set[str] = set()
    for parameter in parameters:
        ctype = Abi().type(parameter.type)
        if ctype.kind is Kind.POINTER:
            if ctype.dtypes is None:
                return None
            found |= ctype.dtypes
    return frozenset(found) or None
