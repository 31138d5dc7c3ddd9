"""The order in which tasks run: hazards first, then priority, then the order in which they came."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kagent_core.errors import ExecutionError
from kagent_core.specs import KernelTask


def run_order(tasks: Sequence[KernelTask]) -> list[KernelTask]:
    """Return the tasks so that each comes after those it depends on.

    Among tasks that are ready the highest priority goes first, then the lowest id. Dependencies on tasks that are
    not among `tasks` are taken as met: an earlier segment has run them.

    Raises
    ------
    ExecutionError
        When tasks depend on each other in a circle.
    """
    by_id = {task.id: task for task in tasks}
    waiting = {task.id: sum(d in by_id for d in task.depends_on) for task in tasks}
    dependents: dict[int, list[int]] = {}
    for task in tasks:
        for dependency in task.depends_on:
            if dependency in by_id:
                dependents.setdefault(dependency, []).append(task.id)
    ready = [(-task.priority, task.id) for task in tasks if waiting[task.id] == 0]
    heapq.heapify(ready)
    ordered: list[KernelTask] = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(by_id[number])
        for dependent in dependents.get(number, ()):
            waiting[dependent] -= 1
            if waiting[dependent] == 0:
                heapq.heappush(ready, (-by_id[dependent].priority, dependent))
    if len(ordered) != len(tasks):
        stuck = ", ".join(by_id[n].name for n in sorted(waiting) if waiting[n] > 0)
        raise ExecutionError(f"these tasks depend on each other in a circle: {stuck}")
    return ordered
