"""The scalar primitives that expressions are made of: about sixty functions with exact element types.

What each one gives is what ATen's CPU kernels give for the same operands, in the corner cases too: that is written
down here, and every printer has to keep to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Result(Enum):
    """The element type of what a primitive gives."""

    OPERANDS = "operands"  # that of its operands, which all have the same one
    BOOL = "bool"
    LAST = "last"  # that of the last operand: the first one is a condition


@dataclass(frozen=True, slots=True)
class Primitive:
    """One scalar function.

    Attributes
    ----------
    name
        As it is called in dumps and in printers' tables.
    arity
        Number of operands.
    result
        The type of what it gives.
    cost
        Rough price in additions: what counts when the fusion rules weigh computing a value again.
    commutative
        Whether the two operands can be exchanged.
    note
        What a corner case gives.
    """

    name: str
    arity: int
    result: Result = Result.OPERANDS
    cost: int = 1
    commutative: bool = False
    note: str = ""


COSTLY = 12
"""Price from which on a value is not computed more often than needed."""

_ALL = (
    # -- arithmetic; integers wrap around, as in two's complement
    Primitive("add", 2, commutative=True),
    Primitive("sub", 2),
    Primitive("mul", 2, commutative=True),
    Primitive("neg", 1),
    Primitive("abs", 1, note="of the least integer: itself"),
    Primitive("div", 2, cost=4, note="of floats; by zero: an infinity or NaN"),
    Primitive("trunc_div", 2, cost=8, note="of integers, towards zero; by zero: reported as eager does"),
    Primitive("floor_div", 2, cost=8, note="of integers, towards minus infinity; by zero: reported as eager does"),
    Primitive("rem", 2, cost=8, note="has the sign of the divisor, as Python's %"),
    Primitive("fmod", 2, cost=8, note="has the sign of the dividend, as C's"),
    Primitive("fma", 3, note="a * b + c, rounded once"),
    # -- order
    Primitive("min", 2, note="NaN where one operand is"),
    Primitive("max", 2, note="NaN where one operand is"),
    Primitive("fmin", 2, note="the other operand where one is NaN"),
    Primitive("fmax", 2, note="the other operand where one is NaN"),
    Primitive("eq", 2, Result.BOOL, commutative=True),
    Primitive("ne", 2, Result.BOOL, commutative=True),
    Primitive("lt", 2, Result.BOOL),
    Primitive("le", 2, Result.BOOL),
    Primitive("gt", 2, Result.BOOL),
    Primitive("ge", 2, Result.BOOL),
    Primitive("select", 3, Result.LAST, note="condition, then, else; both are computed"),
    # -- bits
    Primitive("and", 2, commutative=True, note="of booleans and integers"),
    Primitive("or", 2, commutative=True, note="of booleans and integers"),
    Primitive("xor", 2, commutative=True, note="of booleans and integers"),
    Primitive("not", 1, note="of a boolean its opposite, of an integer its complement"),
    Primitive("shl", 2, note="0 where the distance is negative or at least the width"),
    Primitive("shr", 2, note="the sign's bits where the distance is negative or at least the width"),
    # -- of uint64
    Primitive("mul_hi", 2, cost=4, commutative=True, note="the upper half of the product"),
    Primitive("philox_low", 3, cost=3 * COSTLY, note="counter, stream, key: the first two words of Philox4x32-10"),
    Primitive("philox_high", 3, cost=3 * COSTLY, note="the other two words"),
    # -- rounding and parts of floats
    Primitive("floor", 1),
    Primitive("ceil", 1),
    Primitive("trunc", 1),
    Primitive("rint", 1, note="halves to even"),
    Primitive("copysign", 2),
    Primitive("signbit", 1, Result.BOOL),
    Primitive("isnan", 1, Result.BOOL),
    Primitive("isinf", 1, Result.BOOL),
    Primitive("nextafter", 2, cost=8),
    # -- functions of floats
    *(
        Primitive(name, 1, cost=COSTLY)
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
            *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
            *("erf", "erfc", "lgamma", "tgamma"),
        )
    ),
    Primitive("sqrt", 1, cost=4),
    Primitive("pow", 2, cost=2 * COSTLY),
    Primitive("ipow", 2, cost=2 * COSTLY, note="of integers; 0 for a negative exponent, but for bases 1 and -1"),
    Primitive("atan2", 2, cost=2 * COSTLY),
    Primitive("hypot", 2, cost=8),
    Primitive("ldexp", 2, cost=4, note="a * 2**b, b a whole number in a float"),
)

PRIMITIVES = {primitive.name: primitive for primitive in _ALL}
"""By name."""
