"""The order in which tasks run."""

from __future__ import annotations

import pytest

from kagent_core.errors import ExecutionError

from .builders import relu, run_order, task, tensor


def order(*tasks):
    return [each.id for each in run_order(tasks)]


def test_without_dependencies_tasks_keep_the_order_of_submission():
    assert order(task(2), task(0), task(1)) == [2, 0, 1]


def test_the_highest_priority_goes_first_among_those_that_are_ready():
    assert order(task(0), task(1, priority=5), task(2, priority=-1), task(3, priority=5)) == [1, 3, 0, 2]


def test_dependencies_outrank_priority():
    tasks = task(0), task(1, priority=9, depends_on=[2]), task(2, depends_on=[0]), task(3, priority=1)
    assert order(*tasks) == [3, 0, 2, 1]


def test_a_task_becomes_ready_when_the_last_of_its_dependencies_has_run():
    tasks = task(0), task(1), task(2, priority=9, depends_on=[0, 1]), task(3, depends_on=[0])
    assert order(*tasks) == [0, 1, 2, 3]


def test_a_dependency_named_twice_counts_once():
    assert order(task(0), task(1, depends_on=[0, 0])) == [0, 1]


def test_dependencies_on_earlier_segments_are_met():
    assert order(task(8, depends_on=[3, 7]), task(7, depends_on=[1])) == [7, 8]


def test_nothing_to_order():
    assert order() == []


@pytest.mark.parametrize("circle", [{0: [0]}, {0: [1], 1: [0]}, {0: [2], 1: [0], 2: [1]}])
def test_a_circle_is_an_error_that_names_its_tasks(circle):
    tasks = [
        task(number, depends_on=depends_on, calls=[relu(number, tensor(0, 1), tensor(1, 1))])
        for number, depends_on in circle.items()
    ]
    free = task(7, calls=[relu(7, tensor(0, 1), tensor(1, 1))])
    with pytest.raises(ExecutionError, match="in a circle: " + ", ".join(f"op_{n}" for n in circle)) as caught:
        run_order([*tasks, free])
    assert "op_7" not in str(caught.value)
