"""What a user is told when a kernel fails."""

from __future__ import annotations

from kagent_core.errors import KernelExecutionError
from kagent_core.specs import KernelTask


def kernel_failure(task: KernelTask, cause: Exception) -> KernelExecutionError:
    """Return the error for a task that failed: operator, device, what it was given, and the user's line."""
    call = task.calls[0]
    given = ", ".join(str(spec) for spec in call.inputs) or "no tensors"
    message = f"{call.signature} failed on {task.device} with {type(cause).__name__}: {str(cause).strip()}"
    message += f"\n  kernel: '{task.kernel.name}', given {given}"
    message += f"\n  call: {call}"
    line = call.provenance.line
    if line is not None:
        message += f"\n  from: {line}"
    return KernelExecutionError.wrapping(cause, message)
