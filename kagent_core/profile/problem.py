"""The size of a problem as text: what a timing or a launch config was measured for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from kagent_core.specs import OpCall, TensorSpec

_MAX_LENGTH = 200
_DIGEST_LENGTH = 16
_EXACT = 4


def problem_key(calls: Sequence[OpCall]) -> str:
    """Return operators, dtypes, shapes and contiguity of some calls, as one readable line.

    Scalars are left out. What a call writes is part of the text because only it tells the size of a call that
    has no tensor inputs, such as ``aten::full``, or one that strides, such as a pooling. A text of more than
    200 characters is cut and ends with a hash of the whole.

    Parameters
    ----------
    calls
        One call, or those of a fusion group, in order.

    Examples
    --------
    >>> from kagent_core.specs import DType, OpCall, TensorSpec
    >>> x = TensorSpec(DType("float32", 4), (8, 16), (16, 1), 0, 0)
    >>> problem_key([OpCall(0, "relu", "aten::relu", {"self": x}, (x,), (x,), (x,))])
    'aten::relu(f32[8,16]:c) -> f32[8,16]:c'
    """
    text = "; ".join(f"{call.signature}({_specs(call.inputs)}) -> {_specs(call.outputs)}" for call in calls)
    if len(text) <= _MAX_LENGTH:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{text[: _MAX_LENGTH - _DIGEST_LENGTH - 5]}... #{digest}"


def size_class(call: OpCall) -> str:
    """Return what a call has in common with those of about its size: `problem_key` with rounded sizes.

    Sizes above 4 are rounded up to powers of two, and an equals sign stands before the text, which no `problem_key`
    begins with.

    Examples
    --------
    >>> from kagent_core.specs import DType, OpCall, TensorSpec
    >>> x = TensorSpec(DType("float32", 4), (3, 500), (500, 1), 0, 0)
    >>> size_class(OpCall(0, "relu", "aten::relu", {"self": x}, (x,), (x,), (x,)))
    '=aten::relu(f32[3,512]:c) -> f32[3,512]:c'
    """
    return f"={call.signature}({_specs(call.inputs, _rounded)}) -> {_specs(call.outputs, _rounded)}"


def _rounded(size: int) -> int:
    return size if size <= _EXACT else 1 << (size - 1).bit_length()


def _specs(specs: Iterable[TensorSpec], size: Callable[[int], int] = int) -> str:
    return ", ".join(_spec(spec, size) for spec in specs)


def _spec(spec: TensorSpec, size: Callable[[int], int]) -> str:
    contiguous = ":c" if spec.is_contiguous else ""
    return f"{spec.dtype.short}[{','.join(str(size(extent)) for extent in spec.shape)}]{contiguous}"
