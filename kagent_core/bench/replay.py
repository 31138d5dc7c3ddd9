"""What a plan's replay costs per task, next to the bare calls of the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kagent_core.bench.graphs import GraphWriter, aten
from kagent_core.bench.timing import CALL_ROUNDS, Timing, time_calls
from kagent_core.capture.graph import CapturedGraph
from kagent_core.config import Config
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import Session

TASKS = 200
TASKS_PER_ROUND = 2_000
WIDTH = 8
"""Elements of every tensor: the kernels have next to nothing to compute."""

_below_autograd = torch._C._AutoDispatchBelowAutograd


@dataclass(frozen=True)
class ReplayCase:
    """A chain of operators, and three ways to compute it.

    Attributes
    ----------
    name
        What its tasks have in common.
    tasks
        Number of operators that compute something.
    contenders
        ``kagent`` replays the plan, ``bare calls`` calls the same kernels with arguments that are ready, ``eager``
        calls PyTorch's functions. Each returns the chain's result.
    """

    name: str
    tasks: int
    contenders: dict[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class ReplayFigures:
    """Times per task, of each contender."""

    name: str
    tasks: int
    per_task: dict[str, Timing]

    @property
    def overhead(self) -> Timing:
        """What the replay takes longer than the bare calls: the difference of the minima, and of the medians."""
        replay, bare = self.per_task["kagent"], self.per_task["bare calls"]
        return Timing(replay.minimum - bare.minimum, replay.median - bare.median)

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "case": self.name,
            "tasks": self.tasks,
            "per_task": {name: timing.as_dict() for name, timing in self.per_task.items()},
            "overhead": self.overhead.as_dict(),
        }


def measure_replay(
    tasks: int = TASKS, rounds: int = CALL_ROUNDS, on_round: Callable[[], None] = lambda: None
) -> list[ReplayFigures]:
    """Replay plans of many small tasks on the CPU and return the times per task."""
    session = Session(Config(device="cpu", generated_kernels="off"))
    figures: list[ReplayFigures] = []
    with torch.no_grad():
        for make_case in CASES:
            case = make_case(session, tasks)
            calls = max(1, TASKS_PER_ROUND // max(case.tasks, 10))
            timings = time_calls(case.contenders, calls, rounds, on_round)
            per_task = {name: timing.per(case.tasks) for name, timing in timings.items()}
            figures.append(ReplayFigures(case.name, case.tasks, per_task))
    session.close()
    return figures


def _into_planned_memory(session: Session, tasks: int) -> ReplayCase:
    x, y = torch.linspace(-1, 1, WIDTH), torch.linspace(0, 0.01, WIDTH)
    outs = [torch.empty(WIDTH) for _ in range(tasks)]
    ready = list(zip([x, *outs[:-1]], outs, strict=True))
    add = aten.add.out._op

    def bare() -> torch.Tensor:
        with _below_autograd():
            for value, out in ready:
                add(value, y, out=out)
        return outs[-1]

    def eager() -> torch.Tensor:
        value = x
        for _ in range(tasks):
            value = torch.add(value, y)
        return value

    graph = _chain(tasks, lambda writer, value, inputs, _: writer.call(aten.add.Tensor, value, inputs[0]), (WIDTH,))
    return _case("into planned memory (add)", session, tasks, graph, (x, y), bare, eager)


def _returned_by_kernels(session: Session, tasks: int) -> ReplayCase:
    x = torch.linspace(-1, 1, WIDTH)
    relu = aten.relu.default._op

    def bare() -> torch.Tensor:
        value = x
        with _below_autograd():
            for _ in range(tasks):
                value = relu(value)
        return value

    def eager() -> torch.Tensor:
        value = x
        for _ in range(tasks):
            value = torch.relu(value)
        return value

    graph = _chain(tasks, lambda writer, value, _, __: writer.call(aten.relu.default, value))
    return _case("made by the kernel (relu)", session, tasks, graph, (x,), bare, eager)


def _views_of_inputs(session: Session, tasks: int) -> ReplayCase:
    x, rows = torch.linspace(-1, 1, WIDTH), torch.linspace(0, 0.01, tasks * WIDTH).view(tasks, WIDTH)
    outs = [torch.empty(WIDTH) for _ in range(tasks)]
    ready = list(zip([x, *outs[:-1]], list(rows), outs, strict=True))
    add = aten.add.out._op

    def bare() -> torch.Tensor:
        with _below_autograd():
            for value, row, out in ready:
                add(value, row, out=out)
        return outs[-1]

    def eager() -> torch.Tensor:
        value = x
        for index in range(tasks):
            value = torch.add(value, rows.select(0, index))
        return value

    def step(writer: GraphWriter, value: Node, inputs: Sequence[Node], index: int) -> Node:
        return writer.call(aten.add.Tensor, value, writer.call(aten.select.int, inputs[0], 0, index))

    graph = _chain(tasks, step, (tasks, WIDTH))
    return _case("on views of an input (select, add)", session, tasks, graph, (x, rows), bare, eager)


def _one_task(session: Session, tasks: int) -> ReplayCase:
    x, y = torch.linspace(-1, 1, WIDTH), torch.linspace(0, 0.01, WIDTH)
    add = aten.add.Tensor._op

    def bare() -> torch.Tensor:
        with _below_autograd():
            return add(x, y)  # type: ignore[no-any-return]

    def eager() -> torch.Tensor:
        return torch.add(x, y)

    graph = _chain(1, lambda writer, value, inputs, _: writer.call(aten.add.Tensor, value, inputs[0]), (WIDTH,))
    return _case("one task only (add)", session, 1, graph, (x, y), bare, eager)


CASES = (_into_planned_memory, _returned_by_kernels, _views_of_inputs, _one_task)
"""What is measured: each makes a `ReplayCase` from a session and a number of tasks."""


Step = Callable[[GraphWriter, Node, Sequence[Node], int], Node]


def _chain(tasks: int, step: Step, *more_inputs: tuple[int, ...]) -> CapturedGraph:
    writer = GraphWriter()
    value = writer.input(WIDTH)
    inputs = [writer.input(*shape) for shape in more_inputs]
    for index in range(tasks):
        value = step(writer, value, inputs, index)
    return writer.finish(value, f"chain{tasks}")


def _case(
    name: str,
    session: Session,
    tasks: int,
    graph: CapturedGraph,
    args: tuple[torch.Tensor, ...],
    bare: Callable[[], torch.Tensor],
    eager: Callable[[], torch.Tensor],
) -> ReplayCase:
    compiled = CompiledGraph(session, graph)

    def replay() -> torch.Tensor:
        return compiled(args)[0]  # type: ignore[no-any-return]

    return ReplayCase(name, tasks, {"kagent": replay, "bare calls": bare, "eager": eager})
