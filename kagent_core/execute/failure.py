"""What a user is told when a kernel fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kagent_core.capture.random import is_seeded
from kagent_core.codegen.c_family import DIVISION_BY_ZERO, INDEX_OUT_OF_BOUNDS, INDEX_OUT_OF_RANGE
from kagent_core.errors import KernelExecutionError
from kagent_core.execute.host import view_of
from kagent_core.specs import KernelTask, OpCall, TensorSpec, flatten_tensors


def kernel_failure(task: KernelTask, cause: Exception, call: OpCall | None = None) -> KernelExecutionError:
    """Return the error for a task that failed: operator, device, what it was given, and the user's line.

    Parameters
    ----------
    task
        The task.
    cause
        What went wrong.
    call
        Which of its operators failed, where that is known; else its first one is named.
    """
    call = call or task.calls[0]
    given = ", ".join(str(spec) for spec in call.inputs) or "no tensors"
    message = f"{call.signature} failed on {task.device} with {type(cause).__name__}: {str(cause).strip()}"
    message += f"\n  kernel: '{task.kernel.name}', given {given}"
    message += f"\n  call: {call}"
    line = call.provenance.line
    if line is not None:
        message += f"\n  from: {line}"
    return KernelExecutionError.wrapping(cause, message)


def as_eager_fails(
    task: KernelTask, tensor_of: Callable[[TensorSpec], torch.Tensor], otherwise: Exception
) -> KernelExecutionError:
    """Return the error that eager PyTorch raises where a generated kernel only reports that something is wrong.

    The kernel's operators run once more, one by one, in PyTorch: the first that raises is the one that failed, and says
    exactly why.

    Parameters
    ----------
    task
        What reported. It has written none of its inputs.
    tensor_of
        Gives a tensor that the task was given, in host memory.
    otherwise
        What is raised if none of the operators does.
    """
    made: dict[int, tuple[torch.Tensor, TensorSpec]] = {}

    def value_of(value: Any) -> Any:
        if isinstance(value, tuple):
            return [value_of(item) for item in value]
        if not isinstance(value, TensorSpec):
            return value
        if value.buffer in made:
            return view_of(*made[value.buffer], value)
        return tensor_of(value)

    for call in task.calls:
        if is_seeded(call):  # PyTorch would draw other numbers, and what follows may depend on them
            break
        given = {name: value_of(value) for name, value in call.arguments.items()}
        try:
            with torch.no_grad():
                results = call.overload(**given)
        except Exception as error:  # noqa: BLE001  that is what is looked for
            failure = kernel_failure(task, error, call)
            failure.__cause__ = error
            return failure
        returned = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        for spec, tensor in zip(flatten_tensors(tuple(call.results)), returned, strict=False):
            made[spec.buffer] = (tensor, spec)
    return kernel_failure(task, otherwise)


def reported_error(code: int) -> Exception:
    """Return what eager PyTorch raises where a generated kernel reports so."""
    if code == INDEX_OUT_OF_RANGE:
        return IndexError("index out of range")
    if code == INDEX_OUT_OF_BOUNDS:
        return RuntimeError("index out of bounds")
    if code == DIVISION_BY_ZERO:
        return RuntimeError("ZeroDivisionError")
    raise ValueError(f"no kernel reports {code}")
