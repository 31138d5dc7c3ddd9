"""Compaction: what a kernel does not take as it lies is copied into scratch that it takes, and back.

A device with a kernel for contiguous tensors only can so run a call on strided ones, at the price of copies that are
operators of their own: ``aten::clone`` into scratch before the call, ``aten::clone`` into a result's own layout or
``aten::copy_`` into a written argument after it. The device must have these two for any strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kagent_core.capture.schemas import resolve_overload
from kagent_core.registry import KernelRegistry, named_tensors
from kagent_core.specs import (
    BufferKind,
    BufferSpec,
    Device,
    OpCall,
    Placement,
    Program,
    TensorSpec,
)

Order = Callable[[int], tuple[int, ...]]
"""Dimensions from the outermost to the innermost one, for a number of dimensions."""


def _row_major(dims: int) -> tuple[int, ...]:
    return tuple(range(dims))


def _channels_last(dims: int) -> tuple[int, ...]:
    return (0, *range(2, dims), 1) if dims in (4, 5) else _row_major(dims)


_ORDERS: tuple[Order, ...] = (_row_major, _channels_last)


def dense(spec: TensorSpec, order: Order, buffer: int) -> TensorSpec:
    """Return a tensor of the same elements without gaps, on a buffer of its own."""
    strides, step = [0] * len(spec.shape), 1
    for dim in reversed(order(len(spec.shape))):
        strides[dim] = step
        step *= max(spec.shape[dim], 1)
    return TensorSpec(spec.dtype, spec.shape, tuple(strides), 0, buffer)


@dataclass(frozen=True)
class LayoutFix:
    """Tensors of a call that a kernel would take if they lay otherwise, and how."""

    tensors: frozenset[TensorSpec]
    order: Order


def find_fix(registry: KernelRegistry, call: OpCall) -> LayoutFix | None:
    """Return which tensors to compact so that the registry has a kernel for the call; None when that does not help.

    As few tensors as needed: each is left as it is if the kernel takes it so.
    """
    return next((fix for fix in _fixes(registry, call) if not _missing_copies(registry, call, fix)), None)


def missing_copies(registry: KernelRegistry, call: OpCall) -> list[str]:
    """Return the signatures for which kernels are missing that would let the call's tensors be compacted."""
    for fix in _fixes(registry, call):
        return _missing_copies(registry, call, fix)
    return []


def _missing_copies(registry: KernelRegistry, call: OpCall, fix: LayoutFix) -> list[str]:
    return sorted({copy.signature for copy in _copies(call, fix) if not registry.has(copy)})


def _fixes(registry: KernelRegistry, call: OpCall) -> Iterator[LayoutFix]:
    tensors = [spec for _, spec in named_tensors(call)]
    if any(spec.conj or spec.neg for spec in tensors):
        return
    for order in _ORDERS:
        chosen = {spec for spec in tensors if dense(spec, order, 0).strides != spec.strides}
        if not chosen or not registry.has(_trial(call, chosen, order)):
            continue
        for spec in sorted(chosen, key=lambda spec: (-spec.numel, spec.buffer, spec.storage_offset)):
            if registry.has(_trial(call, chosen - {spec}, order)):
                chosen = chosen - {spec}
        yield LayoutFix(frozenset(chosen), order)


def _trial(call: OpCall, chosen: set[TensorSpec], order: Order) -> OpCall:
    """The call as it would be: compacted tensors on buffers that do not exist."""
    numbers = itertools.count(-1000, -1)
    moved = {spec: dense(spec, order, next(numbers)) for spec in chosen}
    return _with_tensors(call, moved)


def _copies(call: OpCall, fix: LayoutFix) -> Iterator[OpCall]:
    for spec in fix.tensors:
        compact = dense(spec, fix.order, -1)
        if spec in call.inputs:
            yield _clone(0, call, "", spec, compact)
        if spec in call.outputs:
            yield _copy_back(0, call, "", compact, spec, fresh=spec not in call.inputs)


def _with_tensors(call: OpCall, moved: dict[TensorSpec, TensorSpec]) -> OpCall:
    def move(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return moved.get(value, value)
        return tuple(move(item) for item in value) if isinstance(value, tuple) else value

    return replace(
        call,
        arguments={name: move(value) for name, value in call.arguments.items()},
        inputs=move(call.inputs),
        outputs=move(call.outputs),
        results=move(call.results),
    )


def _clone(number: int, call: OpCall, argument: str, source: TensorSpec, target: TensorSpec) -> OpCall:
    return OpCall(
        id=number,
        name=f"{call.name}_compact_{argument}",
        signature="aten::clone",
        arguments={"self": source},
        inputs=(source,),
        outputs=(target,),
        results=(target,),
        provenance=call.provenance,
        overload=resolve_overload("aten::clone"),
        inserted=f"compacts '{argument}' of {call.name} ({target.range.nbytes} bytes)",
    )


def _copy_back(number: int, call: OpCall, argument: str, source: TensorSpec, target: TensorSpec, fresh: bool) -> OpCall:
    if fresh:
        laid_out = _clone(number, call, argument, source, target)
        text = f"lays out '{argument}' of {call.name} ({source.range.nbytes} bytes)"
        return replace(laid_out, name=f"{call.name}_lay_out_{argument}", inserted=text)
    return OpCall(
        id=number,
        name=f"{call.name}_write_back_{argument}",
        signature="aten::copy_",
        arguments={"self": target, "src": source},
        inputs=(target, source),
        outputs=(target,),
        results=(target,),
        provenance=call.provenance,
        overload=resolve_overload("aten::copy_"),
        inserted=f"writes '{argument}' of {call.name} back ({source.range.nbytes} bytes)",
    )


class Compactor:
    """Inserts the copies that a placed program's kernels need.

    A tensor that several calls need compacted is copied once, until somebody writes it.
    """

    def __init__(self, program: Program, placements: Sequence[Placement], registry: Callable[[Device], KernelRegistry]):
        self._program = program
        self._placements = placements
        self._registry = registry
        self._buffers = list(program.buffers)
        self._calls: list[OpCall] = []
        self._placed: list[Placement] = []
        self._known: dict[tuple[Device, TensorSpec, Order], TensorSpec] = {}

    def compact(self) -> tuple[Program, list[Placement]]:
        """Return the program and its placements with the copies in them; the same ones when none is needed."""
        for call, placement in zip(self._program.calls, self._placements, strict=True):
            registry = self._registry(placement.device)
            fix = None if registry.has(call) else find_fix(registry, call)
            if fix is None:
                self._emit(call, placement)
            else:
                self._emit_compacted(call, placement, fix)
        if len(self._calls) == len(self._program.calls):
            return self._program, list(self._placements)
        return replace(self._program, calls=tuple(self._calls), buffers=tuple(self._buffers)), self._placed

    def _emit_compacted(self, call: OpCall, placement: Placement, fix: LayoutFix) -> None:
        moved: dict[TensorSpec, TensorSpec] = {}
        after: list[OpCall] = []
        copied = Placement(placement.device, f"compaction for {call.name}")
        for argument, spec in named_tensors(call):
            if spec not in fix.tensors or spec in moved:
                continue
            read, written = spec in call.inputs, spec in call.outputs
            key = (placement.device, spec, fix.order)
            compact = self._known.get(key) if read else None
            if compact is None:
                compact = self._new_buffer(spec, fix.order)
                if read:
                    self._emit(_clone(0, call, argument, spec, compact), copied)
            moved[spec] = compact
            if written:
                after.append(_copy_back(0, call, argument, compact, spec, fresh=not read))
            else:
                self._known[key] = compact
        self._emit(_with_tensors(call, moved), placement)
        for copy in after:
            self._emit(copy, copied)

    def _emit(self, call: OpCall, placement: Placement) -> None:
        self._calls.append(replace(call, id=len(self._calls)))
        self._placed.append(placement)
        written = {spec.buffer for spec in call.outputs}
        for key in [key for key in self._known if key[1].buffer in written]:
            del self._known[key]

    def _new_buffer(self, spec: TensorSpec, order: Order) -> TensorSpec:
        compact = dense(spec, order, len(self._buffers))
        self._buffers.append(BufferSpec(compact.buffer, compact.range.nbytes, BufferKind.INTERMEDIATE))
        return compact
