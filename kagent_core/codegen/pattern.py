"""Patterns: what two groups of calls have in common when one kernel computes both.

A model's layers repeat, and lowering is the most expensive part of extraction: what was lowered once is found again by
its pattern, in which tensors go by their order of appearance rather than by the program's numbers. Whether indices have
32 bits follows from the shapes and strides in it, for one language; tile sizes do not, and are told apart beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from kagent_core.codegen.kernel import KernelSource
from kagent_core.specs import OpCall, TensorSpec

Pattern = tuple[Any, ...]
Numbers = dict[int, int]
"""A program's number of a buffer, to its number in the pattern."""


def pattern_of(calls: Sequence[OpCall], stored: Collection[int]) -> tuple[Pattern, Numbers]:
    """Return the pattern of some calls, of whose results `stored` are written, and how it numbers their buffers."""
    numbers: Numbers = {}
    parts = tuple(
        (
            call.signature,
            tuple((name, _value(value, numbers)) for name, value in call.arguments.items()),
            tuple(_tensor(spec, numbers) for spec in call.outputs),
            tuple(None if spec is None else _tensor(spec, numbers) for spec in call.results),
        )
        for call in calls
    )
    return (parts, tuple(sorted(numbers[buffer] for buffer in stored if buffer in numbers))), numbers


def with_buffers(source: KernelSource, numbers: Numbers, others: Numbers) -> KernelSource:
    """Return a kernel with another program's buffers in the place of its own.

    Parameters
    ----------
    source
        Made for calls of the same pattern.
    numbers
        How the pattern numbers the buffers of these.
    others
        How it numbers the buffers of the calls that the kernel is wanted for.
    """
    buffers = {number: buffer for buffer, number in others.items()}
    args = tuple(
        replace(arg, value=replace(arg.value, buffer=buffers[numbers[arg.value.buffer]]))
        if isinstance(arg.value, TensorSpec)
        else arg
        for arg in source.args
    )
    return replace(source, args=args)


def _value(value: Any, numbers: Numbers) -> Any:
    if isinstance(value, TensorSpec):
        return _tensor(value, numbers)
    if isinstance(value, tuple):
        return tuple(_value(item, numbers) for item in value)
    return type(value).__name__, repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0


def _tensor(spec: TensorSpec, numbers: Numbers) -> Any:
    number = numbers.setdefault(spec.buffer, len(numbers))
    return number, spec.dtype.name, spec.shape, spec.strides, spec.storage_offset, spec.conj, spec.neg
