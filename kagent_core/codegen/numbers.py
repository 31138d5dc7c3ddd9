"""Numbers that do not fit a tensor's type: eager PyTorch raises an error, and a kernel would wrap them in silence."""

from __future__ import annotations

import math
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
