"""Bytes that kernels move: what rule `recompute` weighs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kagent_core.specs import OpCall, TensorSpec


def nbytes_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor's elements; those that are there only by broadcasting count once."""
    sizes = (size for size, stride in zip(spec.shape, spec.strides, strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * spec.dtype.itemsize


def read_nbytes(calls: Sequence[OpCall]) -> int:
    """Return the bytes that one kernel for some calls reads from memory."""
    made = {spec.buffer for call in calls for spec in call.fresh_results}
    return _total({spec for call in calls for spec in call.inputs if spec.buffer not in made})


def made_nbytes(call: OpCall) -> int:
    """Return the bytes of a call's results."""
    return _total(call.fresh_results)


def _total(specs: Iterable[TensorSpec]) -> int:
    return sum(nbytes_of(spec) for spec in specs)
