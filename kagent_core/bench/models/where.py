"""Where kagent's time goes in a model: kernel by kernel, and outside of all kernels."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kagent_core.bench.figures import rounded
from kagent_core.bench.models.contenders import CONTENDERS, KAGENT, kagent_options
from kagent_core.bench.models.machine import Machine
from kagent_core.bench.models.work import flops_of_task, nbytes_of_task
from kagent_core.bench.timing import no_collection
from kagent_core.hooks import hookimpl
from kagent_core.profile.problem import problem_key
from kagent_core.session import use_plugin
from kagent_core.specs import KernelTask, TaskFinished

_CHAIN = 32

_ROUND_MS, _MOST_REPEATS = 20.0, 10
"""Of the calls of a round, which count one by one: the shorter they are, the more of them are disturbed."""


@dataclass(frozen=True)
class KernelFigures:
    """Tasks of a model that are alike.

    Attributes
    ----------
    kernel, problem
        What runs, and on what.
    count
        How many there are.
    time_ms
        Of all of them.
    flops, nbytes
        Of all of them; flops are None where there is neither product nor convolution nor attention.
    """

    kernel: str
    problem: str
    count: int
    time_ms: float
    flops: int | None
    nbytes: int

    @property
    def gflops(self) -> float | None:
        """10⁹ floating-point operations per second."""
        return None if self.flops is None or self.time_ms <= 0 else self.flops / self.time_ms / 1e6

    @property
    def gbytes_per_s(self) -> float | None:
        """10⁹ bytes per second that are read and written."""
        return self.nbytes / self.time_ms / 1e6 if self.time_ms > 0 else None

    def share(self, machine: Machine) -> float | None:
        """Return what a kernel reaches of what the machine can do: of operations where it has some, else of bytes."""
        if self.gflops is not None:
            return self.gflops / machine.gflops
        return None if self.gbytes_per_s is None else self.gbytes_per_s / machine.bandwidth(self.nbytes // self.count)

    def as_dict(self, machine: Machine) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "kernel": self.kernel,
            "problem": self.problem,
            "count": self.count,
            "time_ms": round(self.time_ms, 4),
            "flops": self.flops,
            "nbytes": self.nbytes,
            "gflops": rounded(self.gflops, 1),
            "gbytes_per_s": rounded(self.gbytes_per_s, 1),
            "share_of_machine": rounded(self.share(machine)),
        }


@dataclass(frozen=True)
class Where:
    """Where the time of a call goes.

    Attributes
    ----------
    call_ms, kernels_ms
        The least that a call takes, and the kernels of a call; measured in turn, and so not those of other tables.
    kernels
        What takes longest comes first.
    dynamo_ms
        The least that Dynamo takes, with a backend that computes nothing, after a call: the part of a call that it
        takes with any backend, to check its guards and to collect the model's parameters.
    """

    call_ms: float
    kernels_ms: float
    kernels: Sequence[KernelFigures]
    dynamo_ms: float = 0.0

    @property
    def outside(self) -> float:
        """What is spent outside of kernels, of the time of a call."""
        return 1 - self.kernels_ms / self.call_ms

    def as_dict(self, machine: Machine) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "call_ms": round(self.call_ms, 4),
            "kernels_ms": round(self.kernels_ms, 4),
            "outside": round(self.outside, 4),
            "dynamo_ms": round(self.dynamo_ms, 4),
            "kernels": [kernel.as_dict(machine) for kernel in self.kernels],
        }


@dataclass(frozen=True)
class ReportCost:
    """What launching and reporting add to a task's time, in ms: to one with a generated kernel, and to another."""

    generated_ms: float
    other_ms: float

    def of(self, task: KernelTask) -> float:
        """Return what it adds to the time of one task."""
        return self.other_ms if task.kernel.source is None else self.generated_ms


class _Observer:
    """A plugin that keeps the tasks of a run with their times."""

    def __init__(self) -> None:
        self.run: list[tuple[KernelTask, float]] = []

    @hookimpl
    def kagent_task_finished(self, event: TaskFinished) -> None:
        """Keep a task's time."""
        self.run.append((event.task, event.elapsed_ms))


def measure_where(
    module: nn.Module, args: tuple[Any, ...], directory: Path, threads: int, rounds: int, cost: ReportCost
) -> Where:
    """Call a model as it is and task by task, in turn.

    Parameters
    ----------
    module, args
        The model and its arguments.
    directory
        kagent's cache directory.
    threads
        That a call may use.
    rounds
        Rounds that count, of one call of either kind, or of several short ones.
    cost
        See `measure_report_cost`; it is no time of a kernel.
    """
    [kagent] = [one for one in CONTENDERS if one.name == KAGENT]
    call = kagent.prepare(module, args, directory, threads)
    observer, observed = _observed(module, args, directory)
    idle = _idle(module, args)
    [once_ms] = _calls_ms(call, 1)
    repeats = max(1, min(_MOST_REPEATS, int(_ROUND_MS / once_ms)))
    calls_ms: list[float] = []
    totals_ms: list[float] = []
    dynamo_ms: list[float] = []
    times: dict[int, float] = defaultdict(lambda: math.inf)
    tasks: dict[int, KernelTask] = {}
    with no_collection():
        for _ in range(rounds):
            calls_ms += _calls_ms(call, repeats)
            for _ in range(repeats):
                call()  # leaves in the caches what it leaves there before another call
                dynamo_ms.append(_call_ms(idle))
            observed()  # the weights that the call before has packed for itself leave the caches
            for _ in range(repeats):
                observer.run.clear()
                observed()
                kernels = [(n, task, max(0.0, ms - cost.of(task))) for n, (task, ms) in enumerate(observer.run)]
                totals_ms.append(sum(ms for _, _, ms in kernels))
                for number, task, ms in kernels:
                    tasks[number], times[number] = task, min(times[number], ms)
    return Where(min(calls_ms), min(totals_ms), _grouped(tasks, times), min(dynamo_ms))


def _observed(function: Callable[..., Any], args: tuple[Any, ...], directory: Path, **options: Any) -> Any:
    """Return an observer and a call of a function that it is told the tasks of."""
    observer = _Observer()
    with use_plugin(observer):
        compiled: Any = torch.compile(
            function, backend="kagent", options={**kagent_options(directory), "profile": True, **options}
        )
        compiled(*args)
    return observer, lambda: compiled(*args)


def _idle(module: nn.Module, args: tuple[Any, ...]) -> Callable[[], object]:
    """Return a call of a model that Dynamo compiles for a backend which computes nothing."""

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        results = graph(*inputs)
        return lambda *args: results

    compiled: Any = torch.compile(module, backend=backend)
    compiled(*args)
    return lambda: compiled(*args)


def _calls_ms(call: Callable[[], object], count: int) -> list[float]:
    """Return what some calls take, one by one, after one that does not count."""
    call()
    return [_call_ms(call) for _ in range(count)]


def _call_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _grouped(tasks: dict[int, KernelTask], times: dict[int, float]) -> list[KernelFigures]:
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, task in tasks.items():
        alike[task.kernel.name, problem_key(task.calls)].append(number)
    found = [
        KernelFigures(
            kernel,
            problem,
            len(numbers),
            sum(times[number] for number in numbers),
            None if (flops := flops_of_task(tasks[numbers[0]])) is None else flops * len(numbers),
            nbytes_of_task(tasks[numbers[0]]) * len(numbers),
        )
        for (kernel, problem), numbers in alike.items()
    ]
    return sorted(found, key=lambda one: -one.time_ms)


def measure_report_cost(directory: Path, rounds: int) -> ReportCost:
    """Measure what launching and reporting add to a task's time: by tasks on 8 floats, with little to compute.

    Parameters
    ----------
    directory
        kagent's cache directory.
    rounds
        Calls that count.
    """
    x = torch.linspace(-1, 1, 8)

    def generated(x: Tensor) -> Tensor:
        for _ in range(_CHAIN):
            x = x * 0.5 + 1
        return x

    def other(x: Tensor) -> Tensor:
        for _ in range(_CHAIN):
            x = torch.neg(x)
        return x

    result = torch.empty_like(x)
    bare_ms = min(_many_ms(lambda: torch.neg(x, out=result)) for _ in range(rounds))
    return ReportCost(
        _least_task_ms(generated, x, directory, rounds, generated_kernels="all", fusion=False),
        max(0.0, _least_task_ms(other, x, directory, rounds, generated_kernels="off") - bare_ms),
    )


def _least_task_ms(
    function: Callable[[Tensor], Tensor], x: Tensor, directory: Path, rounds: int, **options: Any
) -> float:
    observer, observed = _observed(function, (x,), directory, **options)
    means: list[float] = []
    with no_collection():
        for _ in range(rounds):
            observer.run.clear()
            observed()
            means.append(sum(ms for _, ms in observer.run) / len(observer.run))
    return min(means)


def _many_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(_CHAIN):
        call()
    return (time.perf_counter() - began) * 1e3 / _CHAIN
