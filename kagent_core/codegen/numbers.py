"""Numbers that are left to eager PyTorch.

Of those that do not fit a tensor's type it raises an error, and a kernel would wrap them in silence. Of others its
versions make different things, and what is right is what the installed one does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from kagent_core.codegen.dtypes import INTEGERS, NBITS, UNSIGNED
from kagent_core.specs import OpCall

_LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127, "float32": (2 - 2**-23) * 2.0**127}
"""The largest number of each type. Masks of models are made of it."""


def fits(*names: str) -> Callable[[OpCall], str | None]:
    """Return what a rule accepts whose arguments of some names are converted to the result's type.

    Examples
    --------
    >>> from kagent_core.specs import DType, TensorSpec
    >>> made = TensorSpec(DType("int8", 1), (3,), (1,), 0, 0)
    >>> call = OpCall(0, "full", "aten::full", {"size": (3,), "fill_value": 300}, (), (made,), (made,))
    >>> fits("fill_value")(call)
    'int8 cannot hold 300'
    """

    def refusal(call: OpCall) -> str | None:
        dtype = call.outputs[0].dtype.name
        found = (_refusal(call.arguments.get(name), dtype) for name in names)
        return next((told for told in found if told is not None), None)

    return refusal


def bounds(*names: str) -> Callable[[OpCall], str | None]:
    """Return what a rule accepts whose arguments of some names are bounds: numbers that fit, and none that is NaN.

    Before 2.13, PyTorch passes over a lower or an upper bound that is NaN; since then it makes everything NaN.
    """
    fitting = fits(*names)

    def refusal(call: OpCall) -> str | None:
        values = (call.arguments.get(name) for name in names)
        if any(isinstance(value, float) and math.isnan(value) for value in values):
            return "versions of PyTorch differ in what a bound of NaN does"
        return fitting(call)

    return refusal


def alike_when_rounded(name: str) -> Callable[[OpCall], str | None]:
    """Return what a rule accepts whose argument of a name is the same number in the result's type.

    Some versions of PyTorch round it to a half type and others do not.

    Examples
    --------
    >>> from kagent_core.specs import DType, TensorSpec
    >>> made = TensorSpec(DType("float16", 2), (3,), (1,), 0, 0)
    >>> alike_when_rounded("lambd")(OpCall(0, "softshrink", "aten::softshrink", {"lambd": 0.5}, (), (made,), (made,)))
    >>> alike_when_rounded("lambd")(OpCall(0, "softshrink", "aten::softshrink", {"lambd": 0.1}, (), (made,), (made,)))
    'versions of PyTorch differ in whether 0.1 is rounded to float16'
    """

    def refusal(call: OpCall) -> str | None:
        value, dtype = call.arguments.get(name), call.outputs[0].dtype.name
        if not isinstance(value, (int, float)) or _same_in(dtype, value):
            return None
        return f"versions of PyTorch differ in whether {value} is rounded to {dtype}"

    return refusal


def _same_in(dtype: str, value: float) -> bool:
    """Whether a half type has a number as it is; of other types, always."""
    if dtype not in ("float16", "bfloat16") or not math.isfinite(value):
        return True
    if abs(value) > _LARGEST[dtype]:
        return False
    if dtype == "float16":
        return bool(struct.unpack("e", struct.pack("e", value))[0] == value)
    held = struct.pack(">f", value)
    return held[2:] == b"\0\0" and bool(struct.unpack(">f", held)[0] == value)


def _refusal(value: object, dtype: str) -> str | None:
    if not isinstance(value, (bool, int, float, complex)):
        return None
    if isinstance(value, complex):
        return f"{dtype} cannot hold the complex number {value}"
    if dtype in INTEGERS:
        low = 0 if dtype in UNSIGNED else -(2 ** (NBITS[dtype] - 1))
        held = math.isfinite(value) and low <= value < low + 2 ** NBITS[dtype]
    else:
        held = not math.isfinite(value) or abs(value) <= _LARGEST.get(dtype, math.inf)
    return None if held else f"{dtype} cannot hold {value}"
