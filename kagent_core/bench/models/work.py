"""How much a task has to do: its floating-point operations, and the bytes that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kagent_core.bench.device_tasks import flops_of
from kagent_core.specs import KernelTask, MemRange, OpCall

_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math")


def flops_of_task(task: KernelTask) -> int | None:
    """Return the operations of the products, convolutions and attentions of a task; None without any."""
    return flops_of_calls(task.calls)


def flops_of_calls(calls: Sequence[OpCall]) -> int | None:
    """Return the operations of the products, convolutions and attentions among some calls; None without any."""
    found = [flops for call in calls if (flops := _flops(call)) is not None]
    return sum(found) if found else None


def nbytes_of_task(task: KernelTask) -> int:
    """Return the bytes that a task reads and writes, each counted once."""
    return _nbytes(task.reads) + _nbytes(task.writes)


def _flops(call: OpCall) -> int | None:
    known = flops_of((call,))
    if known is not None:
        return known
    name, inputs = call.signature.partition("::")[2].partition(".")[0], call.inputs
    if name == "convolution":  # a transposed one: each value of its input counts as often as a weight of its channel
        return 2 * inputs[0].numel * math.prod(inputs[1].shape[1:])
    if name in ("_linear_pointwise", "panel_product"):
        return 2 * call.outputs[0].numel * inputs[0].shape[-1]
    if name == "lstm_steps":
        return 2 * inputs[0].numel * inputs[2].shape[-1]
    if name == "block_convolution":
        return 2 * call.outputs[0].numel * math.prod(inputs[1].shape[1:4])
    if name == "block_transposed_convolution":
        return 2 * call.outputs[0].numel * inputs[1].shape[3]
    if name == "_convolution_pointwise":
        _, weight = inputs[:2]
        return 2 * call.outputs[0].numel * math.prod(weight.shape[1:])
    if name in _ATTENTION:
        query, key = inputs[:2]
        return 4 * query.numel * key.shape[-2]
    return None


def _nbytes(ranges: Iterable[MemRange]) -> int:
    """Return the bytes of some ranges, what they share counted once."""
    total, reached = 0, (-1, 0)
    for span in sorted(ranges, key=lambda one: (one.buffer, one.offset)):
        start = max(span.offset, reached[1]) if span.buffer == reached[0] else span.offset
        total += max(0, span.end - start)
        reached = (span.buffer, max(span.end, start))
    return total
