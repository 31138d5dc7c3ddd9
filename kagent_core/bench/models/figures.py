"""The figures of ``kagent bench models``, what they should be at most, and their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kagent_core
from kagent_core.bench.figures import Aim, geometric_mean, rounded
from kagent_core.bench.functions import FunctionFigures
from kagent_core.bench.models.contenders import EAGER, ENGINES, FREEZING, INDUCTOR, KAGENT
from kagent_core.bench.models.machine import Machine
from kagent_core.bench.models.where import Where
from kagent_core.bench.models.worker import Start
from kagent_core.bench.timing import Timing

SCHEMA_VERSION = 1
"""Of the JSON; it changes when a key changes its meaning or goes away."""

COMPILERS = (INDUCTOR, FREEZING)

EVERY_MODEL_AIM = 1.0
FIRST_MEAN_AIM, MEAN_AIM = round(1 / 1.4, 3), round(1 / 1.65, 3)
ENGINE_AIM = 1.0
COMPILE_AIM = 0.2
OUTSIDE_AIM = 3.0
FUNCTION_AIM = 1.0


@dataclass(frozen=True)
class ModelFigures:
    """What was measured of one model.

    Attributes
    ----------
    name, what, batch
        What was called.
    per_call
        By contender.
    starts
        By contender: the first start, with empty caches, and the second; None in the place of what was not started.
    differences
        By contender, the largest difference to a value of eager PyTorch's, and the same over the largest such value.
    unavailable
        Contenders without figures, with the reason.
    where
        Where kagent's time goes, when it was asked for.
    """

    name: str
    what: str
    batch: int | None
    per_call: Mapping[str, Timing] = field(default_factory=dict)
    starts: Mapping[str, tuple[Start, Start | None]] = field(default_factory=dict)
    differences: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    where: Where | None = None

    def speed(self, contender: str) -> float | None:
        """How many times as fast as eager PyTorch a contender is, by the minima; None where one is missing."""
        return self.ratio(EAGER, contender)

    def ratio(self, contender: str, peer: str) -> float | None:
        """What a contender takes over what a peer takes, by the minima; None where one is missing."""
        if contender not in self.per_call or peer not in self.per_call:
            return None
        return self.per_call[contender].minimum / self.per_call[peer].minimum

    @property
    def over_compilers(self) -> float | None:
        """What kagent takes over what the better of torch.compile's two modes takes; None without either."""
        ratios = [ratio for name in COMPILERS if (ratio := self.ratio(KAGENT, name)) is not None]
        return max(ratios) if ratios else None

    def compile_s(self, contender: str, again: bool = False) -> float | None:
        """Seconds of the first start, or of the second; None where it was not measured."""
        start = self._start(contender, again)
        return None if start is None else start.compile_s

    @property
    def compile_ratio(self) -> float | None:
        """What compiling takes over what it takes torch.compile's default; None where one is missing."""
        ours, theirs = self.compile_s(KAGENT), self.compile_s(INDUCTOR)
        return None if ours is None or theirs is None or theirs <= 0 else ours / theirs

    def memory_nbytes(self, contender: str) -> int | None:
        """By how much a process with the model grew at most while it was called: the second one's, if there was one."""
        start = self._start(contender, again=True) or self._start(contender, again=False)
        return None if start is None else start.calling_nbytes

    def _start(self, contender: str, again: bool) -> Start | None:
        first, second = self.starts.get(contender, (None, None))
        return second if again else first

    def as_dict(self, machine: Machine | None) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "model": self.name,
            "what": self.what,
            "batch": self.batch,
            "per_call": {name: timing.as_dict() for name, timing in self.per_call.items()},
            "speed_over_eager": {name: rounded(self.speed(name)) for name in self.per_call},
            "kagent_over_better_of_torch_compile": rounded(self.over_compilers),
            "starts": {
                name: {"first": first.as_dict(), "second": None if second is None else second.as_dict()}
                for name, (first, second) in self.starts.items()
            },
            "compile_ratio": rounded(self.compile_ratio),
            "differences": {
                name: {"absolute": absolute, "relative": relative}
                for name, (absolute, relative) in self.differences.items()
            },
            "unavailable": dict(self.unavailable),
            "where": None if self.where is None or machine is None else self.where.as_dict(machine),
        }


@dataclass(frozen=True)
class ModelsFigures:
    """Everything that was measured.

    Attributes
    ----------
    environment
        What the figures depend on.
    threads, rounds
        Threads of a call, and rounds that counted.
    contenders
        Who was asked for, in order.
    versions
        Of the engines that are installed.
    models
        One per model.
    machine, functions
        What the machine can do, and functions of one operator, where they were asked for.
    elapsed_s
        Seconds that the measuring took.
    """

    environment: dict[str, Any]
    threads: int
    rounds: int
    contenders: Sequence[str]
    versions: Mapping[str, str]
    models: Sequence[ModelFigures]
    machine: Machine | None
    functions: Sequence[FunctionFigures]
    elapsed_s: float

    def mean(self, value: Callable[[ModelFigures], float | None]) -> float | None:
        """Return the geometric mean of a figure over the models that have it; None where none has."""
        return geometric_mean([value(model) for model in self.models])

    def speeds(self) -> dict[str, float | None]:
        """Return, by contender, the geometric mean of how many times as fast as eager PyTorch it is."""
        return {name: self.mean(lambda model, name=name: model.speed(name)) for name in self.contenders}  # type: ignore[misc]

    def aims(self) -> list[Aim]:
        """Compare the figures with what they should be at most; only those that were measured."""
        aims = [
            self._worst("time / the better of torch.compile's modes", EVERY_MODEL_AIM, lambda m: m.over_compilers),
            self._mean("mean time / eager's: 1.4 times as fast", FIRST_MEAN_AIM, EAGER),
            self._mean("mean time / eager's: 1.65 times as fast", MEAN_AIM, EAGER),
            *(self._mean(f"mean time / {engine}'s", ENGINE_AIM, engine) for engine in ENGINES),
            self._worst("compile time / inductor's", COMPILE_AIM, lambda m: m.compile_ratio),
            self._worst(
                "time outside kernels, %", OUTSIDE_AIM, lambda m: None if m.where is None else 100 * m.where.outside
            ),
            self._function(),
        ]
        return [aim for aim in aims if aim is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON. Times are in microseconds unless their name says otherwise."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kagent": kagent_core.__version__,
            "machine": self.environment | {"can_do": None if self.machine is None else self.machine.as_dict()},
            "threads": self.threads,
            "rounds": self.rounds,
            "versions": dict(self.versions),
            "elapsed_s": round(self.elapsed_s, 1),
            "models": [model.as_dict(self.machine) for model in self.models],
            "geometric_means": {
                "speed_over_eager": {name: rounded(mean) for name, mean in self.speeds().items()},
                "kagent_over_better_of_torch_compile": rounded(self.mean(lambda model: model.over_compilers)),
                "compile_ratio": rounded(self.mean(lambda model: model.compile_ratio)),
            },
            "functions": [one.as_dict() for one in self.functions],
            "aims": [aim.as_dict() for aim in self.aims()],
        }

    def _worst(self, name: str, at_most: float, value: Callable[[ModelFigures], float | None]) -> Aim | None:
        return Aim.of_worst(name, at_most, ((value(model), model.name) for model in self.models))

    def _mean(self, name: str, at_most: float, peer: str) -> Aim | None:
        ratios = [ratio for model in self.models if (ratio := model.ratio(KAGENT, peer)) is not None]
        mean = geometric_mean(ratios)
        return None if mean is None else Aim(name, f"{len(ratios)} of {len(self.models)} models", at_most, mean)

    def _function(self) -> Aim | None:
        found = ((one.ratio("kagent", "default backend"), one.name) for one in self.functions)
        return Aim.of_worst("time of one operator / inductor's", FUNCTION_AIM, found)
