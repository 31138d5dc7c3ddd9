"""A program whose operators have devices: segments and the transfers between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kagent_core.specs import (
    BufferKind,
    BufferSpec,
    Device,
    OpCall,
    Placement,
    Program,
    TensorSpec,
    flatten_tensors,
)


@dataclass(frozen=True)
class Transfer:
    """A copy of a whole buffer between host memory and a device.

    Attributes
    ----------
    source, target
        Buffer ids. Exactly one of the two is in host memory.
    device
        The device at the other end.
    to_device
        Direction.
    nbytes
        Bytes that move.
    made_by, needed_by
        Who wrote the bytes and who reads the copy, for messages.
    """

    source: int
    target: int
    device: Device
    to_device: bool
    nbytes: int
    made_by: str = "the caller"
    needed_by: str = "the caller"


@dataclass(frozen=True)
class PlacedCalls:
    """Consecutive calls on one device."""

    device: Device
    calls: tuple[OpCall, ...]


@dataclass(frozen=True)
class PlacedProgram:
    """Segments and transfers in the order in which they run.

    Attributes
    ----------
    steps
        `PlacedCalls` and `Transfer`.
    program
        The program with its final buffers, calls and outputs.
    placements
        The scheduler's answer for each call.
    bases
        By buffer, the spec of the tensor that stands for it in host memory.
    """

    steps: tuple[PlacedCalls | Transfer, ...]
    program: Program
    placements: tuple[Placement, ...]
    bases: Mapping[int, TensorSpec]

    def exports(self) -> list[frozenset[int]]:
        """For each step, the buffers that it makes and a later step or the caller reads."""
        given = {b.id for b in self.program.buffers if b.kind in (BufferKind.INPUT, BufferKind.CONSTANT)}
        maker: dict[int, int] = {}
        exported: list[set[int]] = [set() for _ in self.steps]

        def read(buffer: int, position: int) -> None:
            if maker.get(buffer, position) != position:
                exported[maker[buffer]].add(buffer)

        for position, step in enumerate(self.steps):
            if isinstance(step, Transfer):
                read(step.source, position)
                if step.target not in given:
                    maker.setdefault(step.target, position)
                continue
            for call in step.calls:
                for spec in call.inputs:
                    read(spec.buffer, position)
                for spec in call.outputs:
                    if spec.buffer not in given:
                        maker.setdefault(spec.buffer, position)
        for spec in flatten_tensors(self.program.outputs):
            read(spec.buffer, len(self.steps))
        return [frozenset(buffers) for buffers in exported]


class TransferPlanner:
    """Cuts a placed program into segments and keeps every buffer's copies coherent.

    A place is a device, or None for host memory. A buffer is valid in some places; a read elsewhere inserts a
    transfer, and a write leaves it valid only where it was written.
    """

    def __init__(self, program: Program, placements: Sequence[Placement], in_host: Callable[[Device], bool]) -> None:
        self._program = program
        self._placements = placements
        self._in_host = in_host
        self._buffers = list(program.buffers)
        self._bases = base_specs(program)
        self._valid: dict[int, set[Device | None]] = {}
        self._copies: dict[tuple[int, Device | None], int] = {}
        self._writer: dict[int, str] = {}
        self._steps: list[PlacedCalls | Transfer] = []
        self._pending: list[OpCall] = []
        self._pending_device: Device | None = None
        self._calls: list[OpCall] = []
        for buffer in program.buffers:
            if buffer.kind in (BufferKind.INPUT, BufferKind.CONSTANT):
                self._valid[buffer.id] = {None}
                self._copies[buffer.id, None] = buffer.id

    def plan(self) -> PlacedProgram:
        """Return segments, transfers and final specs."""
        for call, placement in zip(self._program.calls, self._placements, strict=True):
            self._place(call, placement.device)
        outputs = tuple(self._output(value) for value in self._program.outputs)
        for buffer in self._program.buffers:
            if buffer.kind is BufferKind.INPUT and None not in self._valid[buffer.id]:
                self._bring(buffer.id, None)  # written on a device: the caller's tensor gets the new values
        self._flush()
        program = replace(self._program, calls=tuple(self._calls), buffers=tuple(self._buffers), outputs=outputs)
        return PlacedProgram(tuple(self._steps), program, tuple(self._placements), self._bases)

    def _place(self, call: OpCall, device: Device) -> None:
        place = None if self._in_host(device) else device
        for spec in call.inputs:
            self._bring(spec.buffer, place, f"{call.name} ({call.signature})")
        if self._pending_device != device:
            self._flush()
            self._pending_device = device
        for spec in call.outputs:
            if spec.buffer not in self._valid:  # made here
                self._copies[spec.buffer, place] = spec.buffer
                old = self._buffers[spec.buffer]
                self._buffers[spec.buffer] = replace(old, device=place)
            self._valid[spec.buffer] = {place}
            self._writer[spec.buffer] = f"{call.name} ({call.signature})"
        moved = self._moved_call(call, place)
        self._pending.append(moved)
        self._calls.append(moved)

    def _bring(self, buffer: int, place: Device | None, needed_by: str = "the caller") -> None:
        valid = self._valid[buffer]
        if place in valid:
            return
        if None not in valid and place is not None:  # from device to device: through the host
            self._bring(buffer, None, needed_by)
        source: Device | None = None if None in valid else next(iter(valid))
        # what comes from host memory was not made by calls on the device, so it can be there before they begin: a
        # segment that is not cut is one in which everything can fuse
        if place is None or self._pending_device != place:
            self._flush()
        target = self._copies.get((buffer, place))
        if target is None:
            target = len(self._buffers)
            self._copies[buffer, place] = target
            nbytes = self._buffers[buffer].nbytes
            self._buffers.append(BufferSpec(target, nbytes, BufferKind.MIRROR, place, buffer))
            self._bases[target] = replace(self._bases[buffer], buffer=target)
        device = place if place is not None else source
        assert device is not None
        self._steps.append(
            Transfer(
                source=self._copies[buffer, source],
                target=target,
                device=device,
                to_device=place is not None,
                nbytes=self._buffers[buffer].nbytes,
                made_by=self._writer.get(buffer, "the caller"),
                needed_by=needed_by,
            )
        )
        valid.add(place)

    def _flush(self) -> None:
        if self._pending and self._pending_device is not None:
            self._steps.append(PlacedCalls(self._pending_device, tuple(self._pending)))
        self._pending = []
        self._pending_device = None

    def _moved_call(self, call: OpCall, place: Device | None) -> OpCall:
        tensors = (*call.inputs, *call.outputs)
        if all(self._copies.get((spec.buffer, place), spec.buffer) == spec.buffer for spec in tensors):
            return call
        return replace(
            call,
            arguments={name: self._moved(value, place) for name, value in call.arguments.items()},
            inputs=self._moved(call.inputs, place),
            outputs=self._moved(call.outputs, place),
            results=self._moved(call.results, place),
        )

    def _moved(self, value: Any, place: Device | None) -> Any:
        if isinstance(value, TensorSpec):
            return replace(value, buffer=self._copies.get((value.buffer, place), value.buffer))
        if isinstance(value, tuple):
            return tuple(self._moved(item, place) for item in value)
        return value

    def _output(self, value: Any) -> Any:
        if not isinstance(value, TensorSpec):
            return value
        self._bring(value.buffer, None)
        return self._moved(value, None)


def base_specs(program: Program) -> dict[int, TensorSpec]:
    """Return, by buffer, the spec of the tensor that stands for the buffer in host memory.

    For an input or a constant that is the tensor itself, for anything else the first result that lies in it.
    """
    bases: dict[int, TensorSpec] = {spec.buffer: spec for spec in program.inputs if isinstance(spec, TensorSpec)}
    bases.update((spec.buffer, spec) for spec in program.constants)
    bases.update((seed.tensor.buffer, seed.tensor) for seed in program.seeds)
    for call in program.calls:
        for spec in call.results:
            if spec is not None:
                bases.setdefault(spec.buffer, spec)
    return bases
