"""Small specs, calls and tasks for the tests of the agents' rooms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kagent_core.capture.schemas import resolve_overload
from kagent_core.extract.queue import TaskQueue, in_order
from kagent_core.specs import (
    BufferKind,
    BufferSpec,
    Device,
    DType,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    MemRange,
    OpCall,
    TensorSpec,
    flatten_tensors,
)

F32 = DType("float32", 4)
TOY = Device("toy", 0)


def tensor(
    buffer: int,
    *shape: int,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    dtype: DType = F32,
    conj: bool = False,
) -> TensorSpec:
    """A tensor on a buffer; contiguous unless told otherwise."""
    contiguous = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorSpec(dtype, shape, contiguous if strides is None else strides, offset, buffer, conj)


def call(
    number: int,
    signature: str,
    arguments: Mapping[str, Any],
    results: Sequence[TensorSpec | None] = (),
    *,
    written: Sequence[TensorSpec] = (),
    random: bool = False,
) -> OpCall:
    """A call of a real operator; `written` are the arguments that it writes in place."""
    inputs = tuple(flatten_tensors(tuple(arguments.values())))
    taken = {spec.buffer for spec in inputs}
    fresh = tuple(spec for spec in results if spec is not None and spec.buffer not in taken)
    return OpCall(
        number,
        f"op_{number}",
        signature,
        dict(arguments),
        inputs,
        (*written, *fresh),
        tuple(results),
        random=random,
        overload=resolve_overload(signature),
    )


def relu(number: int, source: TensorSpec, target: TensorSpec) -> OpCall:
    """A call that reads one tensor and makes another."""
    return call(number, "aten::relu", {"self": source}, [target])


def buffer(
    number: int,
    nbytes: int,
    kind: BufferKind = BufferKind.INTERMEDIATE,
    device: Device | None = None,
    source: int | None = None,
) -> BufferSpec:
    """A piece of memory."""
    return BufferSpec(number, nbytes, kind, device, source)


def task(
    number: int,
    *,
    reads: Sequence[MemRange] = (),
    writes: Sequence[MemRange] = (),
    depends_on: Sequence[int] = (),
    priority: int = 0,
    calls: Sequence[OpCall] = (),
    kernel: KernelDescriptor | None = None,
) -> KernelTask:
    """A task of the toy device."""
    return KernelTask(
        id=number,
        kernel=kernel or KernelDescriptor("aten::relu", "toy_relu"),
        args=(),
        reads=tuple(reads),
        writes=tuple(writes),
        config=LaunchConfig(),
        device=TOY,
        priority=priority,
        depends_on=tuple(depends_on),
        calls=tuple(calls),
    )


def run_order(tasks: Sequence[KernelTask]) -> list[KernelTask]:
    """The order in which a queue gives tasks out when each is finished before the next is taken."""
    queue = TaskQueue()
    queue.submit(tasks)
    queue.close()
    return in_order(queue)
