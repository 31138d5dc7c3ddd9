"""From a captured graph to results: the four agents in a row, plans kept by shape."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kagent_core.capture.graph import CapturedGraph
from kagent_core.execute.plan import Bound, ExecutionPlan, PlannedSegment
from kagent_core.extract.context import ExtractionRequest
from kagent_core.extract.queue import TaskQueue
from kagent_core.inspect.logs import get_logger
from kagent_core.inspect.report import Fallback, PlanReport
from kagent_core.schedule.placed import PlacedCalls, PlacedProgram, Transfer
from kagent_core.specs import Program, TensorSpec

if TYPE_CHECKING:
    from kagent_core.session import Session

log = get_logger("execute")


def build_plan(
    session: Session,
    program: Program,
    constants: Sequence[torch.Tensor],
    args: Sequence[Any] = (),
    parameters: Collection[int] = (),
) -> ExecutionPlan:
    """Place a program, extract its tasks and prepare its segments.

    Parameters
    ----------
    session
        Devices and agents.
    program
        What to run.
    constants
        The captured graph's constants.
    args
        What it will be given, to recognize a model's parameters among; empty when there are none.
    parameters
        Positions of inputs that seldom change, though they are no model's parameters.

    Raises
    ------
    KagentError
        What a stage or an agent raises.
    """
    started = time.perf_counter()
    placed = session.scheduler.place(program, session.target)
    exports = placed.exports()
    steps: list[PlannedSegment | Transfer] = []
    first_task = 0
    inputs = placed.program.inputs
    steady = {spec.buffer for n in parameters if isinstance(spec := inputs[n], TensorSpec)}
    for position, step in enumerate(placed.steps):
        if isinstance(step, Transfer):
            steps.append(step)
            continue
        planned = _build_segment(session, placed, step, exports[position], first_task, steady)
        first_task += len(planned.segment.tasks)
        steps.append(planned)
    plan = ExecutionPlan(placed, steps, session.executor_for, constants, args, parameters)
    fallbacks = tuple(
        Fallback(call.signature, str(placement.device), placement.reason)
        for call, placement in zip(placed.program.calls, placed.placements, strict=True)
        if placement.device != session.target.device
    )
    inserted = [call for call in placed.program.calls if call.inserted is not None]
    session.reports.append(
        PlanReport(
            program=program.name,
            device=str(session.target.device),
            tasks=first_task,
            fallbacks=fallbacks,
            transfers=sum(isinstance(step, Transfer) for step in steps),
            compactions=len(inserted),
            compacted_nbytes=sum(call.outputs[0].range.nbytes for call in inserted),
            arena_nbytes=sum(s.segment.arena_nbytes for s in steps if isinstance(s, PlannedSegment)),
            build_ms=(time.perf_counter() - started) * 1e3,
            in_place=len(placed.in_place),
            not_recorded=tuple(_not_recorded(session, steps)),
            float32_products=session.config.float32_products,
        )
    )
    return plan


def _not_recorded(session: Session, steps: Sequence[PlannedSegment | Transfer]) -> Iterator[str]:
    """For each segment of several launches that its device declines to start as one, why."""
    for step in steps:
        if isinstance(step, PlannedSegment) and len(step.segment.tasks) > 1:
            kernels = [task.kernel for task in step.segment.tasks]
            reason = session.open(step.segment.device).runtime.why_not_recorded(kernels)
            if reason is not None:
                yield reason


def _build_segment(
    session: Session,
    placed: PlacedProgram,
    step: PlacedCalls,
    exports: frozenset[int],
    first_task: int,
    steady: Collection[int],
) -> PlannedSegment:
    program = placed.program
    executor, opened = session.executor_for(step.device), session.open(step.device)
    queue = TaskQueue()
    request = ExtractionRequest(step.calls, step.device, program.buffers, first_task, program.name, exports)
    suggest = functools.partial(session.suggest, opened.info)
    session.extractor.extract(request, opened, queue, suggest, session.forced_launch_configs)
    queue.close()
    segment = executor.prepare(queue, program.buffers, exports, placed.bases, program.name, placed.in_place, steady)
    return PlannedSegment(segment, executor.seal(segment))


class CompiledGraph:
    """A captured graph that runs: one plan per set of shapes, in a bounded cache.

    Parameters
    ----------
    session
        Devices and agents.
    graph
        What was captured.
    parameters
        Positions of inputs that seldom change, beside a model's parameters, which are recognized: a device gets them
        once.
    """

    def __init__(self, session: Session, graph: CapturedGraph, parameters: Collection[int] = ()) -> None:
        self.session = session
        self.graph = graph
        self._parameters = parameters
        self._plans: OrderedDict[Any, ExecutionPlan] = OrderedDict()
        self._latest: ExecutionPlan | None = None
        self._lock = threading.RLock()
        self._told_evictions = False
        weakref.finalize(self, _abandon, session.abandoned, self._plans).atexit = False

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Run the graph. Safe to call from many threads."""
        plan = self._latest
        if plan is not None and plan.accepts(args) and not self.session.watches_every_run:
            if self.session.abandoned:
                self.session.close_abandoned()
            return plan.run(args)
        return self._run_found(args)

    def bound(self, values: Sequence[Any]) -> BoundGraph:
        """Return what runs the graph with its last inputs given already."""
        return BoundGraph(self, values)

    def bind_latest(self, args: Sequence[Any], first: int) -> Bound | None:
        """Bind the arguments from the first of some position on in the plan that was used last, if that accepts them.

        See `ExecutionPlan.bind`.
        """
        plan = self._latest
        return plan.bind(args, first) if plan is not None and plan.accepts(args) else None

    def is_latest(self, plan: ExecutionPlan) -> bool:
        """Whether a plan may run again with nobody but itself being asked."""
        if plan is not self._latest or self.session.watches_every_run:
            return False
        if self.session.abandoned:
            self.session.close_abandoned()
        return True

    def plans(self) -> list[ExecutionPlan]:
        """The plans in the cache, least recently used first."""
        with self._lock:
            return list(self._plans.values())

    def _run_found(self, args: Sequence[Any]) -> list[Any]:
        key = _key(args, self.graph.anchored, self.graph.fixed)
        with self._lock:
            plan = self._plans.get(key)
            fresh = plan is None
            if plan is None:
                self.session.close_abandoned()
                plan = self._build(args)
                self._plans[key] = plan
                while len(self._plans) > self.session.config.plan_cache_size:
                    _, oldest = self._plans.popitem(last=False)
                    oldest.close(keep_memory=True)
                    self._tell_eviction()
            self._plans.move_to_end(key)
            self._latest = plan
        return plan.run(args, self.session.observer(first_run=fresh))

    def _tell_eviction(self) -> None:
        """Planning costs far more than replaying: say once that this graph goes on doing it."""
        if not self._told_evictions:
            self._told_evictions = True
            log.warning(
                "%s has been called with more than %d sets of shapes, strides and integers: a set that comes again is "
                "planned again; plan_cache_size keeps more, and a tensor in place of an integer needs one plan only",
                self.graph.name,
                self.session.config.plan_cache_size,
            )

    def _build(self, args: Sequence[Any]) -> ExecutionPlan:
        program = self.graph.program(args)
        return build_plan(self.session, program, self.graph.constants, args, self._parameters)


class BoundGraph:
    """A graph whose last inputs are given already: at each call, the others alone are looked at.

    Parameters
    ----------
    graph
        The graph.
    values
        The inputs that are given.
    """

    def __init__(self, graph: CompiledGraph, values: Sequence[Any]) -> None:
        self._graph = graph
        self._values = list(values)
        self._bound: Bound | None = None

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Run the graph with the inputs that are not given. Safe to call from many threads."""
        bound, whole = self._bound, [*args, *self._values]
        if bound is not None and bound.accepts(args) and self._graph.is_latest(bound.plan):
            return bound.plan.run(whole, None, bound)
        results = self._graph(whole)
        self._bound = self._graph.bind_latest(whole, len(args))
        return results


def _abandon(abandoned: deque[Any], plans: OrderedDict[Any, ExecutionPlan]) -> None:
    """Let go of a graph's plans. A garbage collection may come while any lock is held, so device memory waits."""
    if all(plan.in_host_memory for plan in plans.values()):
        plans.clear()
    else:
        abandoned.append(plans)


def _key(args: Sequence[Any], anchored: frozenset[int], fixed: frozenset[int]) -> tuple[Any, ...]:
    """What a plan depends on; the storage offset only where the program addresses it absolutely."""
    return tuple(
        (
            arg.dtype,
            tuple(arg.shape),
            arg.stride(),
            arg.storage_offset() if index in anchored else 0,
            arg.is_conj(),
            arg.is_neg(),
            arg.device,
        )
        if isinstance(arg, torch.Tensor)
        else (type(arg), arg)
        for index, arg in enumerate(args)
        if index not in fixed
    )
