"""What arguments an execution plan was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kagent_core.capture.schemas import torch_dtype
from kagent_core.specs import Program, TensorSpec


class Accepted:
    """What arguments a plan was made for: dtypes, shapes, strides, torch devices and integers.

    Parameters
    ----------
    program
        The plan's.
    in_place
        Whether arguments may lie on torch devices.
    positions
        Of the arguments that are looked at.
    """

    def __init__(self, program: Program, in_place: bool, positions: range) -> None:
        inputs = [(i, program.inputs[i]) for i in positions]
        tensors = [(i, spec) for i, spec in inputs if isinstance(spec, TensorSpec)]
        checked = [(i, spec) for i, spec in tensors if i not in program.fixed]
        self._tensors = [(i, spec.shape, spec.strides, torch_dtype(spec.dtype)) for i, spec in checked]
        given = [(i, program.buffers[spec.buffer].torch_device) for i, spec in checked] if in_place else []
        self._devices = [(i, torch.device(name or "cpu")) for i, name in given]
        self._anchored = [(i, spec.storage_offset) for i, spec in tensors if i in program.anchored]
        self._numbers = [(i, v) for i, v in inputs if not isinstance(v, TensorSpec)]

    def are(self, args: Sequence[Any]) -> bool:
        """Whether arguments are like these."""
        for index, shape, strides, dtype in self._tensors:
            arg = args[index]
            if arg.shape != shape or arg.stride() != strides or arg.dtype is not dtype:
                return False
        for index, device in self._devices:
            if args[index].device != device:
                return False
        for index, offset in self._anchored:
            if args[index].storage_offset() != offset:
                return False
        return not self._numbers or all(args[index] == value for index, value in self._numbers)
