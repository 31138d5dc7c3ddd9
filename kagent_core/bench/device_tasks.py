"""Times of single tasks: what a row spends its time on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from kagent_core.bench.device_figures import TaskFigures
from kagent_core.bench.device_rows import Arguments, Function
from kagent_core.hooks import hookimpl
from kagent_core.profile.problem import problem_key
from kagent_core.session import use_plugin
from kagent_core.specs import KernelTask, OpCall, TaskFinished

RUNS = 5
"""Observed runs; the shortest time of each task counts."""


class TaskTimes:
    """A plugin that keeps the times of every task that it is told of."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = defaultdict(list)
        self.tasks: dict[int, KernelTask] = {}

    @hookimpl
    def kagent_task_finished(self, event: TaskFinished) -> None:
        """Keep the time of a task; its number tells it from others of its plan."""
        self.times[event.task.id].append(event.elapsed_ms)
        self.tasks[event.task.id] = event.task


def longest_tasks(function: Function, args: Arguments, device: str, count: int) -> list[TaskFigures]:
    """Run a function task by task, and return the tasks that take longest in all, those that are alike as one.

    Parameters
    ----------
    function, args
        What to compile and call.
    device
        Where.
    count
        How many to return.
    """
    observer = TaskTimes()
    torch._dynamo.reset()
    with use_plugin(observer):
        compiled: Any = torch.compile(function, backend="kagent", options={"device": device, "profile": True})
        for _ in range(RUNS):
            compiled(*args)
    alike: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number, task in observer.tasks.items():
        alike[task.kernel.name, problem_key(task.calls), str(task.config)].append(number)
    figures = [
        TaskFigures(
            *key, len(numbers), min(min(observer.times[n]) for n in numbers), flops_of(observer.tasks[numbers[0]].calls)
        )
        for key, numbers in alike.items()
    ]
    return sorted(figures, key=lambda one: -one.count * one.minimum_ms)[:count]


def flops_of(calls: Sequence[OpCall]) -> int | None:
    """Return the floating-point operations of the products and convolutions among some calls; None without any."""
    found = [flops for call in calls if (flops := _flops(call)) is not None]
    return sum(found) if found else None


def _flops(call: OpCall) -> int | None:
    tensors, name = call.inputs, call.signature.partition("::")[2].partition(".")[0]
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return 2 * call.outputs[0].numel * tensors[-1].shape[-2]
    if name == "convolution" and not call.arguments["transposed"]:
        return 2 * call.outputs[0].numel * math.prod(tensors[1].shape[1:])
    return None
