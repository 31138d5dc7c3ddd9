"""Level 0, of runtimes that record launches: a recording does what its launches do, with the arguments of that time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kagent_core.device import Launch, NamedArg, PointerArg, Recording, Runtime
from kagent_core.pipeline import CompiledGraph
from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance.checks import Checks
from kagent_core.testing.conformance.compared import assert_bytes
from kagent_core.testing.conformance.opened import Opened, opened

checks = Checks(0)

CALLS = 6
"""Of one program: a plan asks for a recording when it runs for the second time."""

NOT_OFFERED = "not offered"

_OPTIONS: dict[str, Any] = {"fusion": False, "generated_kernels": "all"}  # so that there are several launches


@checks.add("recording")
def recorded_launches_compute_what_single_ones_do(device: str) -> str:
    """Every call has other values, and is done with when the next one begins."""
    with opened(device, **_OPTIONS) as opening:
        noted = _Noted(opening.runtime)
        compiled = opening.compile(branches, *_inputs(0))
        for seed in range(CALLS):
            given = _inputs(seed)
            assert_same(tuple(compiled(given)), branches(*given), f"call {seed + 1}, {noted}")
        return f"{sum(len(launches) for launches, _ in noted.made)} launches" if noted.made else NOT_OFFERED


@checks.add("recording")
def a_recording_takes_other_arguments(device: str) -> str:
    """All memory of its launches moves: only the new memory is read and written, by every launch and in order."""
    with opened(device, **_OPTIONS) as opening, ExitStack() as stack:
        noted, compiled = _recorded(opening)
        if not noted.made:
            return NOT_OFFERED
        launches, recording = noted.made[-1]
        nbytes = _extents(launches)
        sets = [{key: stack.enter_context(opening.buffer(size)) for key, size in nbytes.items()} for _ in range(2)]
        singly, together = ([_moved(launch, buffers) for launch in launches] for buffers in sets)
        try:
            with opening.lock:
                for position, launch in enumerate(together):
                    recording.update(position, launch.args)
        except Exception as error:  # noqa: BLE001  allowed: the launches are started one by one from then on
            return f"refuses other arguments: {type(error).__name__}: {error}"
        for seed in range(2):
            for buffers in sets:
                _fill(opening, buffers, nbytes, seed)
            with opening.lock:
                for launch in singly:
                    opening.runtime.launch(launch.kernel, launch.config, launch.args)
                    opening.runtime.synchronize()
                recording.start()
                opening.runtime.synchronize()
            for key, size in nbytes.items():
                want, got = (opening.read(buffers[key], 0, size) for buffers in sets)
                assert_bytes(got, want, f"start {seed + 1} of {len(launches)} recorded launches with other arguments")
        del compiled
        return f"{len(launches)} launches"


# -- helpers


def branches(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute in several launches, of which some need others and some do not."""
    doubled, added = x * 2.0, x + w
    left, right = added - doubled, doubled * w
    return left * right + 1.5, right - x


def _inputs(seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 7, generator=made) for _ in range(2)]


@dataclass
class _Noted:
    """Notes what a runtime records, by taking the place of its method."""

    runtime: Runtime
    made: list[tuple[Sequence[Launch], Recording]] = field(default_factory=list)

    def __post_init__(self) -> None:
        record: Callable[[Sequence[Launch]], Recording | None] = self.runtime.record

        def noting(launches: Sequence[Launch]) -> Recording | None:
            recording = record(launches)
            if recording is not None:
                self.made.append((launches, recording))
            return recording

        self.runtime.record = noting  # type: ignore[method-assign]

    def __str__(self) -> str:
        return "launched one by one" if not self.made else "recorded"


def _recorded(opening: Opened) -> tuple[_Noted, CompiledGraph]:
    """Return what has been recorded after some calls, and the program whose plan keeps it."""
    noted = _Noted(opening.runtime)
    compiled = opening.compile(branches, *_inputs(0))
    for seed in range(CALLS):
        compiled(_inputs(seed))
    return noted, compiled


def _pointers(args: Iterable[Any]) -> Iterator[PointerArg]:
    for arg in args:
        if isinstance(arg, PointerArg):
            yield arg
        elif isinstance(arg, tuple):
            yield from _pointers(arg)
        elif isinstance(arg, NamedArg):
            yield from _pointers([arg.value])


def _extents(launches: Sequence[Launch]) -> dict[int, int]:
    """Return how many bytes launches reach of each buffer, by its identity."""
    found: dict[int, int] = {}
    for pointer in _pointers(arg for launch in launches for arg in launch.args):
        key = id(pointer.buffer)
        found[key] = max(found.get(key, 0), pointer.byte_offset + pointer.nbytes)
    return found


def _moved(launch: Launch, buffers: dict[int, Any]) -> Launch:
    """Return a launch whose arguments are in other buffers."""

    def moved(arg: Any) -> Any:
        if isinstance(arg, PointerArg):
            return replace(arg, buffer=buffers[id(arg.buffer)])
        if isinstance(arg, tuple):
            return tuple(map(moved, arg))
        return replace(arg, value=moved(arg.value)) if isinstance(arg, NamedArg) else arg

    return replace(launch, args=tuple(map(moved, launch.args)))


def _fill(opening: Opened, buffers: dict[int, Any], nbytes: dict[int, int], seed: int) -> None:
    """Fill buffers with float32 values, other ones for each of them."""
    for number, (key, size) in enumerate(nbytes.items()):
        values = torch.randn(-(-size // 4), generator=torch.Generator().manual_seed(100 * seed + number))
        opening.write(buffers[key], 0, values.numpy().tobytes()[:size])
