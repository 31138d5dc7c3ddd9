"""A program whose operators have devices: segments and the transfers between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kagent_core.errors import CaptureError
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
        By buffer, the spec of the tensor that stands for it in host memory, or on a torch device.
    in_place
        By buffer, the device whose memory it lies in as a tensor of torch's: the caller's, the graph's or a result.
    """

    steps: tuple[PlacedCalls | Transfer, ...]
    program: Program
    placements: tuple[Placement, ...]
    bases: Mapping[int, TensorSpec]
    in_place: Mapping[int, Device] = field(default_factory=dict)

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
    transfer, and a write leaves it valid only where it was written. A buffer that is a tensor of torch's on a device
    (an input, a constant, a result that the graph has there) has its home there, else in host memory.

    Parameters
    ----------
    program
        What to plan.
    placements
        A device for each call.
    in_host
        Whether a device computes in host memory.
    torch_devices
        By the name of a torch device, the device in whose memory its tensors lie.
    """

    def __init__(
        self,
        program: Program,
        placements: Sequence[Placement],
        in_host: Callable[[Device], bool],
        torch_devices: Mapping[str, Device] | None = None,
    ) -> None:
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
        self._in_place: dict[int, Device] = {}
        homes = torch_devices or {}
        self._homes = {b.id: homes[b.torch_device or ""] for b in program.buffers if b.torch_device in homes}
        for buffer in program.buffers:
            if buffer.kind in (BufferKind.INPUT, BufferKind.CONSTANT):
                self._enter(buffer.id, self._homes.get(buffer.id))

    def plan(self) -> PlacedProgram:
        """Return segments, transfers and final specs."""
        for call, placement in zip(self._program.calls, self._placements, strict=True):
            self._place(call, placement.device)
        outputs = tuple(self._output(value) for value in self._program.outputs)
        for buffer in self._program.buffers:
            if buffer.kind is BufferKind.INPUT:  # written elsewhere: the caller's tensor gets the new values
                self._bring(buffer.id, self._homes.get(buffer.id))
        self._flush()
        program = replace(self._program, calls=tuple(self._calls), buffers=tuple(self._buffers), outputs=outputs)
        return PlacedProgram(tuple(self._steps), program, tuple(self._placements), self._bases, self._in_place)

    def _enter(self, buffer: int, place: Device | None) -> None:
        """Note where a buffer lies to begin with; at home on a device, it is a tensor of torch's."""
        self._valid[buffer] = {place}
        self._copies[buffer, place] = buffer
        self._buffers[buffer] = replace(self._buffers[buffer], device=place)
        self._note_in_place(buffer, buffer, place)

    def _note_in_place(self, buffer: int, copy: int, place: Device | None) -> None:
        """Note that a copy of a buffer is a tensor of torch's, if it is one."""
        tensor = self._buffers[buffer].kind is not BufferKind.INTERMEDIATE
        if place is not None and tensor and self._homes.get(buffer) == place:
            self._in_place[copy] = place

    def _place(self, call: OpCall, device: Device) -> None:
        place = None if self._in_host(device) else device
        for spec in call.inputs:
            self._bring(spec.buffer, place, f"{call.name} ({call.signature})")
        if self._pending_device != device:
            self._flush()
            self._pending_device = device
        for spec in call.outputs:
            if spec.buffer not in self._valid:  # made here
                self._enter(spec.buffer, place)
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
            self._note_in_place(buffer, target, place)
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
        if place is None and self._homes:
            call = _in_host_memory(call)
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
        home = self._homes.get(value.buffer)
        self._bring(value.buffer, home)
        return self._moved(value, home)


def _in_host_memory(call: OpCall) -> OpCall:
    """Return a call whose results would be made in host memory, whatever torch device it was captured for."""
    if not any(isinstance(value, torch.device) for value in call.arguments.values()):
        return call
    host = torch.device("cpu")
    moved = {name: host if isinstance(v, torch.device) else v for name, v in call.arguments.items()}
    return replace(call, arguments=moved)


def check_torch_devices(program: Program, torch_devices: Mapping[str, Device], target: Device) -> None:
    """Make sure that every tensor that comes or goes lies in host memory, or in memory of a device that is used.

    Raises
    ------
    CaptureError
        When one does not; names it.
    """
    lying = (BufferKind.INPUT, BufferKind.CONSTANT, BufferKind.OUTPUT)
    for buffer in program.buffers:
        if buffer.torch_device is None or buffer.torch_device in torch_devices or buffer.kind not in lying:
            continue
        article = "an" if buffer.kind is BufferKind.OUTPUT else "a"
        what = f"{article} {buffer.kind.value}" if buffer.kind is not BufferKind.INPUT else f"input {buffer.source}"
        taken = "".join(f", or on '{name}' for {target}" for name in torch_devices)
        raise CaptureError(
            f"{what} of {program.name} is on '{buffer.torch_device}', but kagent takes tensors in host memory{taken}",
            hint="move the model and its inputs to the CPU: kagent copies to its device what that needs",
        )


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
