"""Kernels as C text with a prototype: compiled, checked against the prototype, and called through ctypes.

The text is compiled once with the prototype below it, as a second declaration of its function, so that a prototype
that is not the function's own is the compiler's error. The function is called once for a whole problem, with the
addresses of its tensors and with its values, in the prototype's order.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kagent_core.device import PointerArg, ScalarArg
from kagent_core.errors import CompilationError, PackingError, nearest
from kagent_core.native import find_compiler, load, why_no_compiler
from kagent_core.prototype import Abi
from kagent_core.prototype.c_types import CType, Kind
from kagent_core.specs import KernelDescriptor, KernelTask, Parameter

PRELUDE = "#define _GNU_SOURCE\n#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n"
"""Headers with the types that a prototype has; a kernel includes whatever else it uses, and all of it is declared."""

_ABI = Abi()
_INTEGERS = {(nbytes, signed): getattr(ctypes, f"c_{'' if signed else 'u'}int{8 * nbytes}")
             for nbytes in (1, 2, 4, 8) for signed in (True, False)}  # fmt: skip
_FUNCTION = re.compile(r"\bvoid\s+([A-Za-z_]\w*)\s*\(")
_LOADED_AS = re.compile(r"^.*? on generated code: ", re.DOTALL)


def is_source(kernel: KernelDescriptor) -> bool:
    """Whether a kernel is C text that somebody wrote, rather than a callable or text of kagent's own."""
    return kernel.function is None and kernel.source is not None and kernel.packed is None


class SourceKernel:
    """A kernel's C function, loaded.

    Parameters
    ----------
    kernel
        What it computes.
    function
        The function, which takes what `argument` returns.
    types
        C types of its parameters.
    """

    def __init__(self, kernel: KernelDescriptor, function: Callable[..., Any], types: Sequence[CType]) -> None:
        self.kernel = kernel
        self.function = function
        self._types = types

    def call(self, args: Sequence[PointerArg | ScalarArg]) -> None:
        """Call the function with tensors and values as a runtime sees them at launch."""
        self.function(*(self._launched(position, arg) for position, arg in enumerate(args)))

    def argument(self, position: int, value: Any) -> Any:
        """Return a packed value as ctypes takes it: a number, None for a null pointer, an array as a structure."""
        ctype = self._types[position]
        return _structure(ctype)(tuple(value)) if ctype.kind is Kind.ARRAY else value

    def _launched(self, position: int, arg: PointerArg | ScalarArg) -> Any:
        if isinstance(arg, PointerArg):
            return arg.buffer.data_ptr() + arg.byte_offset
        return self.argument(position, arg.value)


class SourceLoader:
    """Compiles and loads kernels of C text, each once.

    Parameters
    ----------
    cache_dir
        Where compiled libraries are kept.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._known: dict[tuple[Any, ...], SourceKernel] = {}

    def __call__(self, kernel: KernelDescriptor) -> SourceKernel:
        """Return a kernel's function.

        Raises
        ------
        CompilationError
            When there is no C compiler, the text does not compile, or its function is not what the prototype says.
        PackingError
            When the kernel has no prototype, or a parameter of a type that cannot be passed.
        """
        key = (kernel.signature, kernel.name, kernel.source, kernel.parameters)
        if key not in self._known:
            self._known[key] = self._load(kernel)
        return self._known[key]

    def _load(self, kernel: KernelDescriptor) -> SourceKernel:
        parameters = [parameter for parameter in kernel.parameters if parameter.type != "void"]
        if not parameters:
            raise PackingError(
                f"{_told(kernel)} is C text without a prototype, so nobody knows what to call it with",
                hint=f'declare it: prototype="void {kernel.name}(...)"',
            )
        types = [_passed(kernel, parameter) for parameter in parameters]
        compiler = find_compiler()
        if compiler is None:
            raise CompilationError(
                f"{_told(kernel)} is C text, and {why_no_compiler()}",
                hint="install gcc or clang, or pip install 'kagent-cpu[compiler]', or name a compiler with CC",
            )
        try:
            library = load(_unit(kernel, parameters), self._cache_dir, compiler)
        except CompilationError as error:
            told = _LOADED_AS.sub("", error.message)
            hint = (error.hint or "").partition("; the command was")[0] or None
            raise CompilationError(f"{_told(kernel)} does not compile:\n{_indented(told)}", hint=hint) from None
        try:
            function: Any = library.function(kernel.name)
        except CompilationError:
            raise _no_function(kernel) from None
        function.argtypes = [_ctypes_of(ctype) for ctype in types]
        return SourceKernel(kernel, function, types)


def values_of(task: KernelTask, loaded: SourceKernel) -> list[Any]:
    """Return a task's arguments, those that are no tensors as the function takes them."""
    return [
        arg.value if arg.access is not None else loaded.argument(position, arg.value)
        for position, arg in enumerate(task.args)
    ]


def _unit(kernel: KernelDescriptor, parameters: Sequence[Parameter]) -> str:
    """Return the text with its headers before it and its prototype behind it.

    A struct has no name to declare it by: where one is passed, the compiler cannot compare.
    """
    source = kernel.source or ""
    place = "" if source.startswith("#line") else f'#line 1 "{kernel.name}"\n'
    text = f"{PRELUDE}{place}{source}\n"
    if any(_ABI.type(parameter.type).kind is Kind.ARRAY for parameter in parameters):
        return text
    listed = ", ".join(parameter.type for parameter in parameters)
    return f'{text}#line 1 "prototype of {kernel.name}"\nvoid {kernel.name}({listed});\n'


def _passed(kernel: KernelDescriptor, parameter: Parameter) -> CType:
    """Return a parameter's C type, if the CPU can pass it."""
    ctype = _ABI.type(parameter.type)
    half = ctype.kind is Kind.FLOAT and ctype.nbytes < ctypes.sizeof(ctypes.c_float)
    element = ctype.element
    if ctype.kind is Kind.ARRAY and element is not None:
        half = element.kind is Kind.COMPLEX or (element.kind is Kind.FLOAT and element.nbytes < 4)
    if half or ctype.kind in (Kind.COMPLEX, Kind.VECTOR):
        raise PackingError(
            f"parameter '{parameter.name}' of {_told(kernel)} is a {parameter.type}, which is not passed by value here",
            hint="declare a float or a double, or a pointer",
        )
    return ctype


def _ctypes_of(ctype: CType) -> Any:
    if ctype.kind is Kind.POINTER:
        return ctypes.c_void_p
    if ctype.kind is Kind.BOOL:
        return ctypes.c_bool
    if ctype.kind is Kind.INTEGER:
        return _INTEGERS[ctype.nbytes, ctype.signed]
    if ctype.kind is Kind.FLOAT:
        return ctypes.c_float if ctype.nbytes == ctypes.sizeof(ctypes.c_float) else ctypes.c_double
    return _structure(ctype)


@functools.cache
def _structure(ctype: CType) -> Any:
    """Return the structure of one array that stands for an array parameter."""
    assert ctype.element is not None, ctype
    fields = [("data", _ctypes_of(ctype.element) * ctype.count)]
    return type("Array", (ctypes.Structure,), {"_fields_": fields})


def _no_function(kernel: KernelDescriptor) -> CompilationError:
    names = _FUNCTION.findall(kernel.source or "")
    if kernel.name in names:
        hint = "do not declare it static or inline"
    else:
        close = nearest(kernel.name, names)
        hint = f"did you mean '{close}'?" if close else "name the function of the source in the prototype"
    return CompilationError(f"{_told(kernel)} has no function 'void {kernel.name}(...)' to call", hint=hint)


def _told(kernel: KernelDescriptor) -> str:
    return f"kernel '{kernel.name}' for {kernel.signature} ({kernel.origin})"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
