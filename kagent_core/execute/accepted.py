"""What arguments an execution plan was made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_core.capture.schemas import torch_dtype
from kagent_core.specs import Program, TensorSpec

_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards

_PATIENCE = 4
"""How often tensors are accepted that differ from those before in what a plan does not depend on, such as whether they
ask for gradients, before none are compared with those before any more."""


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
        # where all are tensors, PyTorch compares them with those before, in a third of the time
        self._comparable = len(checked) == len(positions) > 0
        self._like_before: Callable[..., bool] = _never
        self._changes = 0

    def are(self, args: Sequence[Any]) -> bool:
        """Whether arguments are like these."""
        if not self._like_before(*args):
            for index, shape, strides, dtype in self._tensors:
                arg = args[index]
                if arg.shape != shape or arg.stride() != strides or arg.dtype is not dtype:
                    return False
            if self._comparable:
                self._compare_with(args)
        for index, device in self._devices:
            if args[index].device != device:
                return False
        for index, offset in self._anchored:
            if args[index].storage_offset() != offset:
                return False
        return not self._numbers or all(args[index] == value for index, value in self._numbers)

    def _compare_with(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors that were accepted for those that others are compared with."""
        self._changes += 1
        self._comparable = self._changes < _PATIENCE
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._like_before = guards.check if self._comparable else _never


def _never(*args: Any) -> bool:
    return False
