"""Runs of a program with tile sizes and kernels that are tried, and how long each of its kernels takes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.table import NotLoweredError
from kagent_core.config import Config
from kagent_core.device import OpenDevice
from kagent_core.errors import KagentError, LaunchConfigError
from kagent_core.hooks import hookimpl
from kagent_core.kernels import UserKernel, activate, force_launch_config
from kagent_core.profile.measured import MeasuredFaster
from kagent_core.profile.problem import problem_key
from kagent_core.session import Session, session_for, use_plugin
from kagent_core.specs import KernelDescriptor, KernelTask, LaunchConfig, OpCall, TaskFinished
from kagent_core.specs.tiles import TileChoice, Tiles

RUNS = 5
"""Runs of a trial; the shortest time counts."""

Clock = Callable[[TaskFinished], float]
"""Milliseconds that a task took."""


@dataclass(frozen=True)
class Problem:
    """Operators of a program that become one kernel with tile sizes.

    Attributes
    ----------
    key
        See `kagent_core.profile.problem.problem_key`.
    calls
        The operators.
    stored
        Buffers that the kernel writes.
    """

    key: str
    calls: tuple[OpCall, ...]
    stored: frozenset[int]

    @property
    def signature(self) -> str:
        """Of all operators, joined."""
        return "+".join(call.signature for call in self.calls)


class Trials:
    """A program on one device, run again and again. Make one with `trials`.

    Parameters
    ----------
    session
        Of the config that the program is compiled with.
    run
        Calls the compiled program.
    observer
        The plugin that is told of its tasks.
    clock
        Times a task.
    """

    def __init__(self, session: Session, run: Callable[[], object], observer: _Observer, clock: Clock) -> None:
        self._opened: OpenDevice = session.open(session.target.device)
        self._run = run
        self._observer = observer
        self._clock = clock

    def problems(self) -> list[Problem]:
        """Run once and return what has tile sizes, or another kernel to be compared with; each problem once."""
        found: dict[str, Problem] = {}
        for event in self._events({}, (), runs=1):
            task = event.task
            problem = Problem(problem_key(task.calls), task.calls, frozenset(span.buffer for span in task.writes))
            if self._has_tiles(task) or self.alternatives(problem):
                found.setdefault(problem.key, problem)
        return list(found.values())

    def times(
        self, tiles: Mapping[str, Tiles], kernels: Sequence[KernelDescriptor] = (), runs: int = RUNS
    ) -> dict[str, float]:
        """Return the shortest time in milliseconds of each problem, by its key.

        Parameters
        ----------
        tiles
            Tile sizes by the problem's key; the others have the device's.
        kernels
            Taken before any other.
        runs
            How often to run.

        Raises
        ------
        KagentError
            When the device refuses a kernel.
        """
        times: dict[str, float] = {}
        for event in self._events(tiles, kernels, runs):
            key, elapsed_ms = problem_key(event.task.calls), self._clock(event)
            times[key] = min(elapsed_ms, times.get(key, elapsed_ms))
        return times

    def text(self, problem: Problem, tiles: Tiles) -> str:
        """Return the text of a problem's kernel with some tile sizes.

        Raises
        ------
        LaunchConfigError
            When they take more memory than there is.
        """
        printer = self._opened.printer
        assert isinstance(printer, ExpressionGenerator)
        try:
            return (
                printer.with_tiles(lambda calls: TileChoice(tiles, "forced")).source(problem.calls, problem.stored).text
            )
        except NotLoweredError as error:
            raise LaunchConfigError(str(error)) from error

    def alternatives(self, problem: Problem) -> list[KernelDescriptor]:
        """Return kernels that compute a problem and that only measuring can choose, ready to be tried."""
        if len(problem.calls) > 1:
            return []
        call = problem.calls[0]
        found = [
            replace(kernel, accepts=kernel.accepts.takes)
            for kernel in self._opened.registry.kernels(call.signature)
            if isinstance(kernel.accepts, MeasuredFaster)
        ]
        registry = self._opened.registry
        return [kernel for kernel in found if registry.overlaid([kernel]).has_laid_over(call)]

    def _has_tiles(self, task: KernelTask) -> bool:
        printer = self._opened.printer
        generated = task.kernel.packed is not None and task.device == self._opened.device
        return generated and isinstance(printer, ExpressionGenerator) and printer.has_tiles(task.calls)

    def _events(self, tiles: Mapping[str, Tiles], kernels: Sequence[KernelDescriptor], runs: int) -> list[TaskFinished]:
        with ExitStack() as stack:
            for key, sizes in tiles.items():
                stack.enter_context(force_launch_config(key, LaunchConfig(tiles=sizes)))
            if kernels:
                stack.enter_context(activate(*(UserKernel(self._opened.device, kernel) for kernel in kernels)))
            with self._observer.collecting() as events:
                for _ in range(runs):
                    self._run()
        return [event for event in events if event.task.device == self._opened.device]


class _Observer:
    """A plugin that collects what it is told."""

    def __init__(self) -> None:
        self._events: list[TaskFinished] = []

    @contextmanager
    def collecting(self) -> Iterator[list[TaskFinished]]:
        self._events = []
        yield self._events

    @hookimpl
    def kagent_task_finished(self, event: TaskFinished) -> None:
        """Collect what ran without an error."""
        if event.error is None:
            self._events.append(event)


@contextmanager
def trials(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], config: Config, clock: Clock
) -> Iterator[Trials]:
    """Compile a program for trials. It knows nothing of what was tuned before, and keeps what it compiles nowhere.

    Parameters
    ----------
    function, args, kwargs
        The program, and what it is called with.
    config
        What the program will be run with, its device among it.
    clock
        Times a task.
    """
    observer = _Observer()
    with use_plugin(observer), tempfile.TemporaryDirectory(prefix="kagent-tune-") as directory, torch.no_grad():
        own = config.replace(cache_dir=directory, profile=True, missing_kernel="fallback")
        torch._dynamo.reset()
        compiled: Any = torch.compile(function, backend="kagent", options=_options(own))
        session = session_for(own)
        try:
            yield Trials(session, lambda: compiled(*args, **kwargs), observer, clock)
        finally:
            torch._dynamo.reset()
            session.close()


def _options(config: Config) -> dict[str, Any]:
    """Return a config as options, which outrank environment and files with every key."""
    return {key: getattr(config, key) for key in type(config).model_fields}


def refused(error: KagentError) -> str:
    """Return why a device refuses something, in a line."""
    cause = error.__cause__
    return (cause.message if isinstance(cause, KagentError) else error.message).splitlines()[0]
