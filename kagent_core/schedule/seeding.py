"""Which random calls of a program draw their numbers on their device, and the seeds that they get for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kagent_core.capture.random import GENERATOR, SEED_DTYPE, SEED_LENGTH, UNWRITTEN, seeded
from kagent_core.config import Config
from kagent_core.device import OpenDevice
from kagent_core.specs import (
    BufferKind,
    BufferSpec,
    Device,
    OpCall,
    Placement,
    Program,
    SeedInput,
    TensorSpec,
    flatten_tensors,
)


@dataclass
class _Drawing:
    """The calls that draw from one generator, None for PyTorch's default one."""

    generator: Any
    buffer: int
    calls: list[OpCall] = field(default_factory=list)

    def row(self, stream: int) -> TensorSpec:
        """Return the seed of one call: a row of the tensor of seeds, with the number of its stream in it."""
        return TensorSpec(SEED_DTYPE, (SEED_LENGTH,), (1,), SEED_LENGTH * stream, self.buffer)

    def tensor(self) -> TensorSpec:
        """Return the tensor of seeds."""
        return TensorSpec(SEED_DTYPE, (len(self.calls), SEED_LENGTH), (SEED_LENGTH, 1), 0, self.buffer)


class Seeding:
    """The seeded variants of a program's random calls. Every call has a stream of its own, wherever it is placed.

    Parameters
    ----------
    program
        As captured.
    config
        With `random_numbers`.
    """

    def __init__(self, program: Program, config: Config) -> None:
        self._program = program
        self._wanted = config.random_numbers
        self._drawings: list[_Drawing] = []
        self._variants: dict[int, OpCall] = {}
        for call in program.calls:
            if call.random and _why_no_seed(call) is None:
                drawing = self._drawing(call.arguments.get(GENERATOR))
                self._variants[call.id] = seeded(call, drawing.row(len(drawing.calls)))
                drawing.calls.append(call)

    def draws(self, opened: OpenDevice, call: OpCall) -> bool:
        """Return whether a device makes a call's random numbers by itself."""
        return call.random and self.refusal(opened, call) is None

    def refusal(self, opened: OpenDevice, call: OpCall) -> str | None:
        """Return why a device does not make a random call's numbers by itself, or None when it does."""
        if self._wanted == "eager":
            return 'config asks for the random numbers of eager PyTorch (random_numbers = "eager")'
        registry = opened.registry
        if registry.has_registered(call) or (self._wanted == "auto" and registry.has(call)):
            return "the device has a kernel for it that draws from PyTorch's generator"
        if opened.printer is None:
            return "random numbers come from generated kernels, and the device has none"
        return _why_no_seed(call) or opened.not_generated(self._variants[call.id])

    def not_generated(self, opened: OpenDevice, call: OpCall) -> str | None:
        """Return why a device computes a call with no generated kernel; None when it does, or generates none."""
        return self.refusal(opened, call) if call.random else opened.not_generated(call)

    def applied(
        self, placements: Sequence[Placement], opened: Callable[[Device], OpenDevice]
    ) -> tuple[Program, list[Placement]]:
        """Return the program with seeded calls on the devices that make their numbers, and its placements."""
        placed = list(zip(self._program.calls, placements, strict=True))
        drawing = {call.id for call, placement in placed if self.draws(opened(placement.device), call)}
        if not drawing:
            return self._program, list(placements)
        calls = [(self._variants[call.id] if call.id in drawing else call, placement) for call, placement in placed]
        calls = _without_unread(calls, self._program.outputs)
        tensors = [each.tensor() for each in self._drawings]
        buffers = [
            BufferSpec(tensor.buffer, tensor.numel * tensor.dtype.itemsize, BufferKind.INPUT) for tensor in tensors
        ]
        used = [any(call.id in drawing for call in each.calls) for each in self._drawings]
        program = replace(
            self._program,
            calls=tuple(replace(call, id=number) for number, (call, _) in enumerate(calls)),
            buffers=(*self._program.buffers, *buffers),
            seeds=tuple(
                SeedInput(tensor, each.generator)
                for tensor, each, is_used in zip(tensors, self._drawings, used, strict=True)
                if is_used
            ),
        )
        return program, [placement for _, placement in calls]

    def _drawing(self, generator: Any) -> _Drawing:
        found = next((each for each in self._drawings if each.generator is generator), None)
        if found is None:
            found = _Drawing(generator, len(self._program.buffers) + len(self._drawings))
            self._drawings.append(found)
        return found


def _why_no_seed(call: OpCall) -> str | None:
    generator = call.arguments.get(GENERATOR)
    if generator is not None and generator.device.type != "cpu":
        return f"its generator is on '{generator.device}', and seeds are drawn from one on the CPU"
    return None


def _without_unread(
    calls: Sequence[tuple[OpCall, Placement]], outputs: Sequence[Any]
) -> list[tuple[OpCall, Placement]]:
    """Leave out the tensors without values that only said how what is drawn is shaped."""
    read = {spec.buffer for call, _ in calls for spec in call.inputs}
    read.update(spec.buffer for spec in flatten_tensors(tuple(outputs)))
    return [
        (call, placement)
        for call, placement in calls
        if call.signature not in UNWRITTEN or any(spec.buffer in read for spec in call.outputs)
    ]
