"""Measures one model: starts in processes of their own, then calls, interleaved in one process."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

from kagent_core.bench.functions import reason_for
from kagent_core.bench.models.contenders import EAGER, KAGENT, Call, Contender, tensors_of
from kagent_core.bench.models.figures import ModelFigures
from kagent_core.bench.models.starts import StartError, measure_starts
from kagent_core.bench.models.where import ReportCost, Where, measure_where
from kagent_core.bench.models.worker import Start
from kagent_core.bench.models.zoo import ZooModel
from kagent_core.bench.timing import Timing, calls_per_round, time_calls
from kagent_core.config import load_config
from kagent_core.errors import KagentError
from kagent_core.session import session_for

MOST_CALLS = 100

TOLERANCE = 2e-3
"""Of the largest difference over eager's largest value: whether a contender computed the same. It is printed, too."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How models are measured.

    Attributes
    ----------
    contenders
        Who runs them; eager PyTorch is one of them.
    threads, batch, rounds
        Threads of a call, what a batch is (None: the model's own), and rounds that count.
    starts
        Whether contenders are started in processes of their own.
    report_cost
        Where it is to be measured where kagent's time goes; else None.
    """

    contenders: Sequence[Contender]
    threads: int
    batch: int | None
    rounds: int
    starts: bool
    report_cost: ReportCost | None

    @property
    def steps(self) -> int:
        """How often `measure_model` tells what it does."""
        started = len(self.contenders) if self.starts else 0
        return started + len(self.contenders) + 1 + (self.report_cost is not None)


def measure_model(model: ZooModel, program: str, plan: Plan, directory: Path, tell: Tell) -> ModelFigures:
    """Measure a model.

    Parameters
    ----------
    model
        The model.
    program
        What another process is told for it: its name, or ``FILE.py:FUNCTION``.
    plan
        How.
    directory
        An empty one, for caches and exported files.
    tell
        Called with what is done next, before each step.
    """
    batch = model.batch if plan.batch is None else plan.batch
    try:
        module, args = model.build(plan.batch)
    except KagentError as error:  # a package is missing
        reason = f"{error.message}; {error.hint}" if error.hint else error.message
        return ModelFigures(model.name, model.what, batch, unavailable={KAGENT: reason})
    measured = _Measured(module, args, plan, directory, tell)
    try:
        if plan.starts:
            measured.start(program)
        measured.prepare()
        tell("calling")
        per_call = measured.time()
        where = measured.where()
    finally:
        _forget()
    return ModelFigures(
        model.name,
        model.what,
        batch or None,
        per_call,
        measured.starts,
        measured.differences,
        measured.unavailable,
        where,
    )


class _Measured:
    """A model that is being measured."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], plan: Plan, directory: Path, tell: Tell) -> None:
        self._module, self._args, self._plan, self._tell = module, args, plan, tell
        self._directories = {one.name: directory / one.name for one in plan.contenders}
        for own in self._directories.values():
            own.mkdir(parents=True)
        self._calls: dict[str, Call] = {}
        self.starts: dict[str, tuple[Start, Start | None]] = {}
        self.differences: dict[str, tuple[float, float]] = {}
        self.unavailable: dict[str, str] = {}

    def start(self, program: str) -> None:
        """Start every contender in a process of its own."""
        plan = self._plan
        for contender in plan.contenders:
            self._tell(f"starting {contender.name}")
            try:
                self.starts[contender.name] = measure_starts(
                    program, contender.name, plan.batch, plan.threads, self._directories[contender.name]
                )
            except StartError as error:
                self.unavailable[contender.name] = str(error)

    def prepare(self) -> None:
        """Prepare every contender in this process, and compare what it computes with eager PyTorch's."""
        torch._dynamo.reset()
        expected = tensors_of(self._module(*self._args))
        for contender in self._plan.contenders:
            self._tell(f"preparing {contender.name}")
            if contender.name in self.unavailable:
                continue
            try:
                contender.load()
                call = contender.prepare(
                    self._module, self._args, self._directories[contender.name], self._plan.threads
                )
                difference = difference_of(tensors_of(call()), expected)
            except Exception as error:  # noqa: BLE001  whatever a contender raises is why it has no figure
                self.unavailable[contender.name] = reason_for(error)
                continue
            self.differences[contender.name] = difference
            if difference[1] <= TOLERANCE:
                self._calls[contender.name] = call
            else:
                self.unavailable[contender.name] = f"it computes something else: it differs by {difference[0]:.3g}"

    def time(self) -> dict[str, Timing]:
        """Time the calls in turn; the one before each is not timed, so that its weights are in the caches."""
        eager = self._calls[EAGER]
        return time_calls(self._calls, calls_per_round(eager, MOST_CALLS), self._plan.rounds, settle=1)

    def where(self) -> Where | None:
        """Measure where kagent's time goes, if it is to be known."""
        cost, plan = self._plan.report_cost, self._plan
        if cost is None:
            return None
        self._tell("asking where the time goes")
        if KAGENT not in self._calls:
            return None
        return measure_where(self._module, self._args, self._directories[KAGENT], plan.threads, plan.rounds, cost)


def difference_of(results: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest difference of a value, and that over the largest value that is expected.

    Values that are not finite must be the same ones.

    Raises
    ------
    ValueError
        When number or shapes of the results are others.
    """
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (results, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"its results have shapes {shapes[0]}, expected {shapes[1]}")
    absolute, largest = 0.0, 0.0
    for result, right in zip(results, expected, strict=True):
        one, other = result.double(), right.double()
        finite = other.isfinite()
        if not torch.allclose(one[~finite], other[~finite], equal_nan=True):
            return math.inf, math.inf
        differences = (one[finite] - other[finite]).abs()
        if differences.numel():
            absolute = max(absolute, float(differences.nan_to_num(math.inf).max()))
            largest = max(largest, float(other[finite].abs().max()))
    return absolute, absolute / largest if largest else absolute


def _forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    session_for(load_config(options={"device": "cpu"})).close_abandoned()
