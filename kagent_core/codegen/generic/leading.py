"""What a convolution's kernel reads in the place of its input: zeros around a tensor, or one that lies otherwise.

Zeros become a part of the window: nothing is copied, and nothing is read for them. A few planes, such as the colours of
an image, are read as they lie where the convolution was laid out for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kagent_core.codegen.generic.direct_planes import are_planes
from kagent_core.codegen.generic.scaled_rows import is_scale
from kagent_core.specs import OpCall, TensorSpec

PAD, CLONE, CONVOLUTION = "aten::constant_pad_nd", "aten::clone", "aten::convolution"
MULTIPLY, SCALE = "aten::mul.Tensor", "scale"
"""The name of what a convolution's channels are multiplied with before it reads them, among its arguments."""


def is_read_by(first: OpCall, then: OpCall) -> bool:
    """Whether a call is a convolution that can read the argument of another one in the place of its result."""
    if then.signature != CONVOLUTION or then.arguments["transposed"] or len(first.outputs) != 1:
        return False
    made = first.outputs[0]
    if then.arguments["input"] != made or made in (then.arguments.get(name) for name in ("weight", "bias")):
        return False
    if SCALE in then.arguments:
        return False
    if first.signature == MULTIPLY:
        return _scaled(first) is not None and is_of_one_place(then)
    return _is_padding(first) or (first.signature == CLONE and _is_of_planes(first, then))


def with_what_is_read(calls: Sequence[OpCall]) -> tuple[OpCall, ...]:
    """Return some calls with those at their beginning as a part of the convolution that reads them.

    The convolution's padding then says what is in front of each dimension; its result says what is behind.
    """
    place = next((n for n, call in enumerate(calls) if call.signature == CONVOLUTION), 0)
    found = calls[place]
    for first in reversed(calls[:place]):
        if not is_read_by(first, found):
            return tuple(calls)
        found = _reading(first, found)
    return found, *calls[place + 1 :]


def _is_padding(call: OpCall) -> bool:
    """Whether a call puts zeros around the spatial dimensions of a tensor, and nothing else."""
    if call.signature != PAD or call.arguments.get("value", 0) != 0:
        return False
    pads = call.arguments["pad"]
    return len(pads) <= 2 * (len(call.outputs[0].shape) - 2) and all(isinstance(n, int) and n >= 0 for n in pads)


def _is_of_planes(first: OpCall, then: OpCall) -> bool:
    """Whether a copy is of few planes, for a convolution of all channels with all channels that takes those."""
    source, weight = first.arguments["self"], then.arguments["weight"]
    laid_out = len(source.shape) == 4 and then.arguments["groups"] == 1 and weight.strides[0] == 1
    same = source.dtype == first.outputs[0].dtype and source.strides[1] != 1
    return laid_out and same and are_planes(source, then.arguments["dilation"])


def _scaled(call: OpCall) -> tuple[TensorSpec, TensorSpec] | None:
    """Return a tensor and the numbers that its channels are multiplied with; None for another product."""
    made, pair = call.outputs[0], (call.arguments["self"], call.arguments["other"])
    for source, scale in (pair, pair[::-1]):
        if not isinstance(source, TensorSpec) or not isinstance(scale, TensorSpec) or len(made.shape) != 4:
            continue
        if (source.shape, source.dtype) != (made.shape, made.dtype):
            continue
        if source.strides == made.strides and scale.dtype == made.dtype and is_scale(scale, source):
            return source, scale
    return None


def is_of_one_place(call: OpCall) -> bool:
    """Whether a convolution multiplies each place of its input by itself, with weights that were laid out for that."""
    weight = call.arguments["weight"]
    plain = all(n == 1 for n in (*weight.shape[2:], *call.arguments["stride"])) and not any(call.arguments["padding"])
    same = call.arguments["input"].shape[2:] == call.outputs[0].shape[2:]  # a padding behind it may be part of it
    return plain and same and call.arguments["groups"] == 1 and weight.strides[0] == 1


def _reading(first: OpCall, then: OpCall) -> OpCall:
    """Return a convolution that reads another call's argument."""
    made, scaled = first.outputs[0], _scaled(first) if first.signature == MULTIPLY else None
    source, *given = scaled or (first.arguments["self"],)
    arguments: dict[str, Any] = {**then.arguments, "input": source}
    if scaled is not None:
        arguments[SCALE] = scaled[1]
    if first.signature == PAD:
        arguments["padding"] = _padding(first, then)
    inputs = tuple(source if spec == made else spec for spec in then.inputs)
    return replace(then, arguments=arguments, inputs=(*inputs, *given))


def _padding(first: OpCall, then: OpCall) -> tuple[int, ...]:
    """Return the zeros in front of each spatial dimension."""
    count = len(first.outputs[0].shape) - 2
    pads, own = tuple(first.arguments["pad"]), tuple(then.arguments["padding"])
    own = own * count if len(own) == 1 else own
    # the last dimension's come first, two for each
    in_front = [pads[2 * n] if 2 * n < len(pads) else 0 for n in range(count)][::-1]
    return tuple(one + other for one, other in zip(own, in_front, strict=True))
