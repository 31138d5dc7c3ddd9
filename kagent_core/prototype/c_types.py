"""The C types of kernel parameters: their sizes, the tensors that they point to, and exact conversion of values."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kagent_core.errors import PackingError
from kagent_core.specs import TensorSpec


class Kind(Enum):
    """What sort of value a C type holds."""

    INTEGER = "integer"
    BOOL = "bool"
    FLOAT = "floating-point number"
    COMPLEX = "complex number"
    POINTER = "pointer"
    ARRAY = "array"
    VECTOR = "vector"  # only behind a pointer
    VOID = "void"  # behind a pointer; by itself, an argument that the kernel does without
    LOCAL = "local memory"  # a pointer to memory that the threads of a block share


@dataclass(frozen=True, slots=True)
class CType:
    """One C type, as a device lays it out.

    Attributes
    ----------
    name
        Its spelling in messages.
    kind
        What sort of value it holds.
    nbytes, alignment
        In bytes.
    code
        Its format in Python's ``struct`` module, standard sizes.
    signed
        Whether an integer type holds negative values.
    dtypes
        Names of the dtypes that a tensor behind a pointer to this type may have; None takes all.
    element
        Of a pointer and of local memory, what it points to; of an array, what it is made of.
    count
        Elements of an array.
    const
        Whether a pointer's target is read only.
    """

    name: str
    kind: Kind
    nbytes: int
    alignment: int
    code: str
    signed: bool = True
    dtypes: frozenset[str] | None = frozenset()
    element: CType | None = None
    count: int = 1
    const: bool = False

    def convert(self, value: Any, what: str, padding: int = 0) -> Any:
        """Return `value` as a kernel sees it in this type: rounded, or padded to the array's length.

        Parameters
        ----------
        value
            A bool, an int, a float or a complex number; a sequence of them for an array; None for a null pointer.
        what
            The parameter and its kernel, for messages.
        padding
            What fills an array behind the given values.

        Raises
        ------
        PackingError
            When the value is of another kind or out of range. Nothing wraps, and nothing finite becomes infinite.
        """
        if self.kind is Kind.ARRAY:
            return self._convert_array(value, what, padding)
        if self.kind is Kind.POINTER:
            if value is None:
                return None
            raise PackingError(f"{what} is a {self.name} and takes a tensor, not {describe(value)}")
        if not isinstance(value, (bool, int, float, complex)):
            raise PackingError(f"{what} is a {self.name} and takes a number, not {describe(value)}")
        return _CONVERTERS[self.kind](self, value, what)

    def pack(self, value: Any) -> bytes:
        """Return the bytes of a value that `convert` returned."""
        return _coder(self.code).pack(*self._components(value))

    def pack_into(self, memory: memoryview, offset: int, value: Any) -> None:
        """Write the bytes of a value that `convert` returned."""
        _coder(self.code).pack_into(memory, offset, *self._components(value))

    def unpack(self, data: bytes | memoryview) -> Any:
        """Return the value that bytes of this type stand for."""
        return self._assemble(_coder(self.code).unpack(data))

    def _convert_array(self, value: Any, what: str, padding: int) -> tuple[Any, ...]:
        assert self.element is not None
        if not isinstance(value, (tuple, list)):
            raise PackingError(f"{what} is a {self.name} and takes a list, not {describe(value)}")
        if len(value) > self.count:
            raise PackingError(
                f"{what} is a {self.name}, which {len(value)} values do not fit: {list(value)}",
                hint="declare a longer array, or register the kernel for tensors of fewer dimensions",
            )
        padded = [*value, *(padding for _ in range(self.count - len(value)))]
        each = f"an element of {what}"
        return tuple([self.element.convert(item, each) for item in padded])

    def _components(self, value: Any) -> Sequence[Any]:
        if self.kind is Kind.ARRAY:
            assert self.element is not None
            return [part for item in value for part in self.element._components(item)]
        if self.kind is Kind.COMPLEX:
            return (value.real, value.imag)
        if self.kind is Kind.POINTER:
            return (0,)
        if self.code == "H" and self.kind is Kind.FLOAT:
            return (_bfloat16_bits(value),)
        return (value,)

    def _assemble(self, parts: Sequence[Any]) -> Any:
        if self.kind is Kind.ARRAY:
            assert self.element is not None
            step = len(parts) // self.count
            return tuple(self.element._assemble(parts[i : i + step]) for i in range(0, len(parts), step))
        if self.kind is Kind.COMPLEX:
            return complex(*parts)
        if self.kind is Kind.POINTER:
            return None
        if self.code == "H" and self.kind is Kind.FLOAT:
            return struct.unpack("=f", struct.pack("=I", parts[0] << 16))[0]
        return parts[0]


@functools.cache
def _coder(code: str) -> struct.Struct:
    return struct.Struct(f"={code}")


# -- conversions


def _to_integer(ctype: CType, value: Any, what: str) -> int:
    if not isinstance(value, int):
        raise PackingError(
            f"{what} is a {ctype.name} and takes an integer, not {describe(value)}",
            hint="declare it as a floating-point type, or derive an integer from it",
        )
    bits = 8 * ctype.nbytes
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if ctype.signed else (0, (1 << bits) - 1)
    if not low <= value <= high:
        raise PackingError(f"{what} is a {ctype.name} ({low} to {high}), which {value} does not fit")
    return int(value)


def _to_bool(ctype: CType, value: Any, what: str) -> bool:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise PackingError(f"{what} is a {ctype.name} and takes true or false, not {describe(value)}")


def _to_float(ctype: CType, value: Any, what: str) -> float:
    if isinstance(value, complex):
        raise PackingError(f"{what} is a {ctype.name} and takes a real number, not {describe(value)}")
    try:
        number = float(value)
        return _round_float(ctype.code, number) if math.isfinite(number) else number
    except OverflowError:
        raise PackingError(
            f"{what} is a {ctype.name}, in which {value} would become infinite",
            hint="declare a wider type; an infinity itself is taken",
        ) from None


def _to_complex(ctype: CType, value: Any, what: str) -> complex:
    part = ctype.code[0]
    try:
        number = complex(value)
        return complex(*(_round_float(part, x) if math.isfinite(x) else x for x in (number.real, number.imag)))
    except OverflowError:
        raise PackingError(f"{what} is a {ctype.name}, in which {value} would become infinite") from None


_CONVERTERS: Mapping[Kind, Callable[[CType, Any, str], Any]] = {
    Kind.INTEGER: _to_integer,
    Kind.BOOL: _to_bool,
    Kind.FLOAT: _to_float,
    Kind.COMPLEX: _to_complex,
}


def _round_float(code: str, value: float) -> float:
    """Round a finite number to the nearest of a format, ties to even. Raises OverflowError where that is infinite."""
    if code == "H":
        return _round_bfloat16(value)
    coder = _coder(code)
    return float(coder.unpack(coder.pack(value))[0])


def _round_bfloat16(value: float) -> float:
    """Round once, from 53 bits to 8: by way of float32 a number next to a tie could go to the wrong side."""
    exponent = max(math.frexp(value)[1], -125)  # below that, bfloat16 is subnormal and its spacing stays the same
    rounded = math.copysign(math.ldexp(round(math.ldexp(value, 8 - exponent)), exponent - 8), value)
    if abs(rounded) >= 2.0**128:
        raise OverflowError("too large for bfloat16")
    return rounded


def _bfloat16_bits(value: float) -> int:
    return int(struct.unpack("=I", struct.pack("=f", value))[0] >> 16)


def describe(value: Any) -> str:
    """Return what came, for messages: ``the tensor f32[2, 3]``, ``the float 2.5``, ``None``."""
    if value is None:
        return "None"
    if isinstance(value, TensorSpec):
        return f"the tensor {value}"
    if isinstance(value, (tuple, list)):
        return f"the list [{', '.join(describe(item) for item in value)}]" if len(value) < 9 else "a long list"
    return f"the {type(value).__name__} {value!r}"
