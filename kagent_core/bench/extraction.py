"""What it costs to make a plan of a captured graph, per operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kagent_core.bench.graphs import mixed_graph, mixed_inputs
from kagent_core.bench.timing import PLAN_ROUNDS, Timing, no_collection
from kagent_core.capture.graph import CapturedGraph
from kagent_core.config import Config
from kagent_core.device import CONTRACT_VERSION
from kagent_core.execute.plan import PlannedSegment
from kagent_core.extract.agent import STAGES
from kagent_core.extract.context import ExtractionContext
from kagent_core.hooks import hookimpl
from kagent_core.pipeline import build_plan
from kagent_core.session import Session

SIZES = (10, 100, 1_000, 10_000)
OPERATORS_PER_ROUND = 1_000
"""Small graphs are planned several times in a round, so that a round is long enough for the clock."""

PARTS = ("program", "schedule", *(hook.removeprefix("kagent_") for hook, _ in STAGES), "prepare_and_seal", "instance")
"""What a plan's time goes into: the program of the graph for given shapes, the scheduler's placement, the
extractor's stages, the executor's preparation, and the memory and tensors of the first run."""


@dataclass(frozen=True)
class ExtractionFigures:
    """Times for a graph of one size, per operator.

    Attributes
    ----------
    operators, tasks
        Operators in the graph, and the tasks that they become: a view is no task.
    total
        Everything from the captured graph to a plan that is ready to run.
    parts
        By name, as in `PARTS`.
    """

    operators: int
    tasks: int
    total: Timing
    parts: dict[str, Timing]

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "operators": self.operators,
            "tasks": self.tasks,
            "per_operator": self.total.as_dict(),
            "parts": {name: timing.as_dict() for name, timing in self.parts.items()},
        }


class _Watch:
    """A plugin that keeps the context of every extraction, and when its first stage began."""

    def __init__(self) -> None:
        self.contexts: list[tuple[float, ExtractionContext]] = []

    @hookimpl
    def kagent_contract_version(self) -> int:
        """The core's own parts are always of the core's version."""
        return CONTRACT_VERSION

    @hookimpl(tryfirst=True)
    def kagent_validate(self, ctx: ExtractionContext) -> None:
        """Leave the validation to others."""
        self.contexts.append((time.perf_counter(), ctx))


@dataclass
class _Rounds:
    """What was measured of one size so far, in microseconds per operator: a value per round."""

    graph: CapturedGraph
    operators: int
    tasks: int = 0
    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*PARTS, "total")})


def measure_extraction(
    sizes: Sequence[int] = SIZES, rounds: int = PLAN_ROUNDS, on_round: Callable[[], None] = lambda: None
) -> list[ExtractionFigures]:
    """Plan graphs of several sizes for the CPU, in turn, and return what each part of it took.

    Parameters
    ----------
    sizes
        Operators of each graph.
    rounds
        Rounds that count; one more comes before them.
    on_round
        Called after every round, the first one included.
    """
    watch = _Watch()
    session = Session(Config(device="cpu", generated_kernels="off"), (("kagent-bench", watch),))
    measured = [_Rounds(mixed_graph(size), size) for size in sizes]
    for number in range(rounds + 1):
        with no_collection():
            for one in measured:
                repeats = max(1, OPERATORS_PER_ROUND // one.operators)
                plans = [_plan_once(session, watch, one) for _ in range(repeats)]
                for name, times in one.times.items():
                    if number > 0:
                        times.append(sum(plan[name] for plan in plans) * 1e6 / repeats / one.operators)
        on_round()
    session.close()
    return [
        ExtractionFigures(
            one.operators,
            one.tasks,
            Timing.of(one.times["total"]),
            {name: Timing.of(one.times[name]) for name in PARTS},
        )
        for one in measured
    ]


def _plan_once(session: Session, watch: _Watch, one: _Rounds) -> dict[str, float]:
    """Return the seconds that each part took, and their sum."""
    watch.contexts.clear()
    args = mixed_inputs()
    began = time.perf_counter()
    program = one.graph.program(args)
    captured = time.perf_counter()
    plan = build_plan(session, program, one.graph.constants)
    built = time.perf_counter()
    instances = [step.make() for step in plan.steps if isinstance(step, PlannedSegment)]
    ready = time.perf_counter()
    [(extracting, ctx)] = watch.contexts
    one.tasks = len(plan.tasks)
    for instance in instances:
        instance.close()
    plan.close()
    stages = {record.stage: record.elapsed_ms / 1e3 for record in ctx.records}
    return {
        "program": captured - began,
        "schedule": extracting - captured,
        **stages,
        "prepare_and_seal": built - extracting - sum(stages.values()),
        "instance": ready - built,
        "total": ready - began,
    }
