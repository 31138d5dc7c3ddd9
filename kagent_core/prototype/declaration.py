"""Prototypes read from a kernel's own C text: OpenCL C, CUDA C++ or plain C."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kagent_core.errors import PackingError, choices, nearest
from kagent_core.prototype.abi import Abi
from kagent_core.prototype.c_types import describe
from kagent_core.prototype.expressions import Expression
from kagent_core.specs import Access, KernelDescriptor, OpCall, Parameter, TensorSpec

_COMMENT = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\\n])*\1|//[^\n]*|/\*.*?\*/""", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
_DECORATION = re.compile(r"\b(?:__attribute__|__launch_bounds__|__declspec|alignas|__align__)\s*(?=\()")
_FUNCTION = re.compile(r"\bvoid\s+([A-Za-z_]\w*)\s*(?=\()")
_KERNEL_QUALIFIER = re.compile(r"\b(?:__kernel|kernel|__global__)\b")
_TYPEDEF = re.compile(r"\btypedef\s+((?:[\w:]+\s+)+)(\w+)\s*;|\busing\s+(\w+)\s*=\s*([\w:\s]+?)\s*;")
_STRUCT = re.compile(
    r"\bstruct\s*(?P<tag>\w*)\s*\{\s*(?P<element>[\w:\s]+?)\s*\b\w+\s*\[\s*(?P<count>\d+)\s*\]\s*;\s*\}"
    r"\s*(?P<alias>\w*)\s*;"
)
_WORD = re.compile(r"[A-Za-z_]\w*(?:::\w+)*(?:\s*<[^<>]*>)?|\S")
_DECLARATOR = re.compile(r"(?P<type>.*\W)(?P<name>[A-Za-z_]\w*)\s*(?P<array>(?:\[[^\]]*\]\s*)*)", re.DOTALL)
_RESTRICT = {"restrict", "__restrict", "__restrict__", "volatile"}
_PLAIN = (bool, int, float, complex, str, tuple, type(None))
_TYPE_WORDS = {
    *(
        "bool",
        "char",
        "const",
        "double",
        "float",
        "half",
        "int",
        "long",
        "short",
        "signed",
        "unsigned",
        "void",
    ),
    *_RESTRICT,
}
_ABI = Abi()
_LOCAL = {"__local", "local", "__shared__"}
_CONSTANT_SPACE = {"__constant", "constant"}
_QUALIFIERS = {
    *_RESTRICT,
    *_CONSTANT_SPACE,
    *("__global", "global", "__private", "private", "register", "struct", "__grid_constant__"),
}


def parse_prototype(
    text: str,
    name: str | None = None,
    *,
    derived: Mapping[str, str] | None = None,
    optional: Collection[str] = (),
    ignore: Collection[str] = (),
    only: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
) -> tuple[Parameter, ...]:
    """Return a kernel's prototype, read from its declaration or from the whole source that holds it.

    Parameters are called as ATen calls the arguments that they carry: ``self``, ``other``, ``alpha``; ``out``
    for the result, or ``out0``, ``out1``, ... A pointer to const is read, another one is written.

    Parameters
    ----------
    text
        OpenCL C, CUDA C++ or plain C. Comments and preprocessor lines are skipped. Its typedefs, and its
        structs of one fixed-size array, are known in the prototype.
    name
        Of the kernel, where the text has several.
    derived
        By parameter, an expression over arguments and results that gives its value, as `Expression` takes it.
    optional
        Pointers that are null where the tensor was not given.
    ignore
        Arguments of the operator that the kernel does without, whatever their value.
    only
        Arguments that the kernel does without, with the one value that it is right for: ``{"groups": 1}``. Those
        that are neither parameters nor named here must come as their defaults.
    types
        Meaning of type names that the text does not define, such as macros and template parameters.

    Raises
    ------
    PackingError
        When the text has no such kernel, or a parameter that cannot carry an argument.

    Examples
    --------
    >>> for parameter in parse_prototype(
    ...     "__kernel void scale(__global const float* restrict self, __global float* out, float other, long n)",
    ...     derived={"n": "out.numel()"},
    ... ):
    ...     print(parameter.name, parameter.type, parameter.derived)
    self const float* None
    out float* None
    other float None
    n long out.numel()
    """
    clean = _without_decorations(_DIRECTIVE.sub("", _COMMENT.sub(_skip, text)))
    kernel, inside = _find_kernel(clean, name)
    known = {**_definitions(clean), **(types or {})}
    declarations = [part.strip() for part in _split(inside)]
    if declarations in ([""], ["void"]):
        declarations = []
    found: dict[str, Parameter] = {}
    for declaration in declarations:
        parameter = _parameter(declaration, kernel, known, derived or {}, optional)
        if parameter.name in found:
            raise PackingError(f"kernel '{kernel}' has two parameters named '{parameter.name}'")
        found[parameter.name] = parameter
    for what, names in (("derived", derived or {}), ("optional", optional)):
        for unknown in names:
            if unknown not in found:
                close = nearest(unknown, found)
                raise PackingError(
                    f"'{unknown}' is said to be {what}, but kernel '{kernel}' has no such parameter",
                    hint=f"did you mean '{close}'?" if close else f"its parameters are {choices(found)}",
                )
    unused = {**dict.fromkeys(ignore), **{argument: repr(value) for argument, value in (only or {}).items()}}
    for argument, value in unused.items():
        if argument in found:
            raise PackingError(f"'{argument}' is said to be ignored, but kernel '{kernel}' has it as a parameter")
        found[argument] = Parameter(argument, "void", derived=value)
    return tuple(found.values())


def prototype_name(text: str, name: str | None = None) -> str:
    """Return the name of the kernel whose prototype `parse_prototype` reads from a text.

    Raises
    ------
    PackingError
        As `parse_prototype`.

    Examples
    --------
    >>> prototype_name("static void helper(float x) {} void scale(const float *self, float *out)")
    'scale'
    """
    clean = _without_decorations(_DIRECTIVE.sub("", _COMMENT.sub(_skip, text)))
    return _find_kernel(clean, name)[0]


def prototype_refusal(kernel: KernelDescriptor, call: OpCall) -> str | None:
    """Return why a kernel's prototype is not for a call, or None when it may be.

    Only the kinds of the arguments count, which a registry can choose among kernels by: a number where the kernel
    takes a tensor, a tensor where it takes a number, None, values that the kernel is not right for, and of a kernel
    that says which dtypes it takes, a tensor of another one than its pointer has; and of a pointwise operator, a tensor
    that is broadcast, whose sizes and strides the kernel does not ask for. Whether the values fit is for the packer,
    which tells it with an error.
    """
    for parameter in kernel.parameters:
        if parameter.name not in call.arguments or parameter.type == "Tensor":
            continue
        name, value = parameter.name, call.arguments[parameter.name]
        if parameter.type == "void":
            if parameter.derived is not None and isinstance(value, (*_PLAIN, TensorSpec)):
                expected = Expression(parameter.derived).evaluate(dict[str, Any]().__getitem__)
                if not same_value(value, expected):
                    came = describe(value) if isinstance(value, TensorSpec) else repr(value)
                    return f"is right only for {name}={expected!r}, not {came}"
        elif parameter.type.endswith("*"):
            if not isinstance(value, TensorSpec) and not (value is None and parameter.optional):
                return f"takes a tensor as '{name}', not {describe(value)}"
            if isinstance(value, TensorSpec) and kernel.dtypes is not None:
                taken = _ABI.type(parameter.type).dtypes
                if taken is not None and value.dtype.name not in taken:
                    return f"takes {' or '.join(sorted(taken))} as '{name}', not {value.dtype}"
        elif parameter.derived is None and isinstance(value, TensorSpec):
            return f"takes a number as '{name}', not {describe(value)}"
    return _broadcast_refusal(kernel, call)


def _broadcast_refusal(kernel: KernelDescriptor, call: OpCall) -> str | None:
    """A kernel that goes over the result's elements would read beyond the end of a tensor that has fewer."""
    tags = getattr(call.overload, "tags", ())
    if kernel.fuses or not call.outputs or not any(tag.name == "pointwise" for tag in tags):
        return None
    shape = call.outputs[0].shape
    for parameter in kernel.parameters:
        name, value = parameter.name, call.arguments.get(parameter.name)
        if parameter.type.endswith("*") and isinstance(value, TensorSpec) and value.shape != shape:
            mention = re.compile(rf"{re.escape(name)}_|\b{re.escape(name)}\b")
            others = [f"{other.name} {other.derived or ''}" for other in kernel.parameters if other is not parameter]
            if not any(map(mention.search, others)):
                return (
                    f"takes '{name}' of the result's shape, not {describe(value)}, which is broadcast: its prototype "
                    f"asks for no size or stride of '{name}', such as {name}_stride0"
                )
    return None


def same_value(value: Any, other: Any) -> bool:
    """Whether two arguments are the same; a NaN is the same as another one."""
    if isinstance(value, float) and isinstance(other, float) and math.isnan(value):
        return math.isnan(other)
    return bool(value == other)


def _skip(match: re.Match[str]) -> str:
    """Leave nothing of a comment, and of a text only that it was there."""
    return '""' if match[1] else " "


def _without_decorations(text: str) -> str:
    """Take out attributes, whose parentheses would look like a parameter list."""
    while match := _DECORATION.search(text):
        text = text[: match.start()] + " " + text[_closing(text, match.end()) + 1 :]
    return text


def _closing(text: str, opening: int) -> int:
    """Return the position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    raise PackingError(f"a parenthesis is never closed: '{text[opening : opening + 60].strip()}'")


def _find_kernel(text: str, name: str | None) -> tuple[str, str]:
    """Return a kernel's name and the text between its parentheses."""
    functions: dict[str, tuple[bool, str]] = {}
    for match in _FUNCTION.finditer(text):
        start = max(text.rfind(mark, 0, match.start()) for mark in ";{}")
        before = text[start + 1 : match.start()]
        if match[1] == name or not re.search(r"\bstatic\b|\b__device__\b", before):
            inside = text[match.end() + 1 : _closing(text, match.end())]
            functions.setdefault(match[1], (bool(_KERNEL_QUALIFIER.search(before)), inside))
    if name is not None:
        if name not in functions:
            close = nearest(name, functions)
            raise PackingError(
                f"the source has no function 'void {name}(...)'",
                hint=f"did you mean '{close}'?" if close else f"it has {choices(functions)}",
            )
        return name, functions[name][1]
    marked = {function: inside for function, (qualified, inside) in functions.items() if qualified}
    candidates = marked or {function: inside for function, (_, inside) in functions.items()}
    if len(candidates) != 1:
        raise PackingError(
            f"the source has {len(candidates)} kernels, expected one: {text.strip()[:60]!r}",
            hint=f"say which: name={choices(candidates)}" if candidates else "a kernel is a function 'void name(...)'",
        )
    return next(iter(candidates.items()))


def type_definitions(text: str) -> dict[str, str]:
    """Return the type names that a C text defines, with what they stand for: ``{"f32": "float"}``.

    A struct of one array stands for that array: ``int64_t[8]``.
    """
    return _definitions(_DIRECTIVE.sub("", _COMMENT.sub(_skip, text)))


def _definitions(text: str) -> dict[str, str]:
    """Return the type names that a source defines, with what they stand for."""
    known: dict[str, str] = {}
    for match in _STRUCT.finditer(text):
        array = f"{' '.join(match['element'].split())}[{match['count']}]"
        known.update({name: array for name in (match["tag"], match["alias"]) if name})
    for match in _TYPEDEF.finditer(text):
        name, meaning = (match[2], match[1]) if match[2] else (match[3], match[4])
        known[name] = " ".join(meaning.split())
    return known


def _split(text: str) -> Iterator[str]:
    """Split at the commas that no bracket encloses."""
    depth, start = 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _parameter(
    declaration: str,
    kernel: str,
    known: Mapping[str, str],
    derived: Mapping[str, str],
    optional: Collection[str],
) -> Parameter:
    match = _DECLARATOR.fullmatch(declaration)
    if match is None or match["name"] in _TYPE_WORDS:
        raise PackingError(
            f"kernel '{kernel}' has the parameter '{declaration}', which has no name",
            hint="call it as ATen calls the argument that it carries",
        )
    name = match["name"]
    try:
        spelling = _spelling(match["type"] + "*" * match["array"].count("["), known)
        local = spelling.startswith("local ")
        pointer = spelling.endswith("*") and not local
        Abi().type(spelling)
        if local and name not in derived:
            raise local_without_length(name, spelling)
        if name in derived:
            Expression(derived[name])
    except PackingError as error:
        raise PackingError(f"parameter '{name}' of kernel '{kernel}': {error.message}", hint=error.hint) from None
    if name in optional and not pointer:
        raise PackingError(
            f"parameter '{name}' of kernel '{kernel}' is said to be optional, but {spelling} is no pointer",
            hint=f"derive its value: derived={{'{name}': '0 if {name} is None else {name}'}}",
        )
    const = pointer and spelling.startswith("const ")
    return Parameter(name, spelling, Access.IN if const else None, derived.get(name), name in optional)


def local_without_length(name: str, spelling: str) -> PackingError:
    """Return the error for local memory of which a prototype does not say how much there is."""
    return PackingError(
        f"'{spelling}' is local memory, and nothing says how many elements it has",
        hint=f"derive their number: derived={{'{name}': '256'}}, or any expression over sizes",
    )


def kernel_declarations(text: str, name: str | None = None) -> list[tuple[str, str]]:
    """Return the parameters of a kernel as its source writes them, in order, whatever their types.

    Parameters
    ----------
    text
        As for `parse_prototype`.
    name
        Of the kernel, where the text has several.

    Returns
    -------
    list of tuple
        Each parameter's declaration without its name, typedefs that the text defines resolved, and its name.

    Raises
    ------
    PackingError
        When the text has no such kernel.

    Examples
    --------
    >>> kernel_declarations("typedef float f32; __kernel void k(__global const f32 *x, image2d_t y) {}")
    [('__global const float *', 'x'), ('image2d_t', 'y')]
    """
    clean = _without_decorations(_DIRECTIVE.sub("", _COMMENT.sub(_skip, text)))
    inside = _find_kernel(clean, name)[1]
    known = _definitions(clean)
    found: list[tuple[str, str]] = []
    for part in _split(inside):
        match = _DECLARATOR.fullmatch(part.strip())
        if match is not None:
            words = match["type"].split()
            array = "*" * match["array"].count("[")
            found.append((" ".join(known.get(word, word) for word in words) + array, match["name"]))
    return found


def _spelling(text: str, known: Mapping[str, str]) -> str:
    """Return a type without qualifiers and typedefs: ``const float*``, ``unsigned long``, ``int64_t[8]``."""
    words = [re.sub(r"\s+", "", word) if "<" in word else word for word in _WORD.findall(text)]
    stars = words.count("*")
    before = words[: words.index("*")] if stars else words
    after = [word for word in words[len(before) :] if word not in {"*", "const", *_RESTRICT}]
    if "&" in words or after:
        raise PackingError(f"'{' '.join(words)}' is no type that a kernel parameter can have")
    local = bool(_LOCAL & set(before))
    if local and stars != 1:
        raise PackingError(
            f"'{' '.join(words)}' is local memory, which no argument is",
            hint="declare a pointer to it, such as 'local float *scratch', and derive how many elements it has",
        )
    name = " ".join(word for word in before if word not in {"const", *_LOCAL, *_QUALIFIERS})
    seen: set[str] = set()
    while name in known and name not in seen:
        seen.add(name)
        name = known[name]
    if not stars:
        return name
    if local:
        return f"local {name}*"
    const = "const" in before or _CONSTANT_SPACE & set(before)
    return f"{'const ' if const else ''}{name}{'*' * stars}"
