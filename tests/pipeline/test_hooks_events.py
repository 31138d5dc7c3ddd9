"""Events of finished tasks: one per task, when they are due and not otherwise."""

from __future__ import annotations

import pytest
import torch

import kagent_core
from kagent_core import hookimpl
from kagent_core.errors import KernelExecutionError
from kagent_core.specs import KernelDescriptor

from .traced import FAKE, compiled, same, session, traced

CPU = {"device": "cpu", "fusion": False}  # a task for each operator

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def function(x):
    return torch.relu(x) + x * 2.0


X = torch.tensor([-1.0, 2.0, 3.0])


class Events:
    def __init__(self):
        self.events = []

    @hookimpl
    def kagent_task_finished(self, event):
        self.events.append(event)

    def names(self):
        return [event.task.name for event in self.events]


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_one_event_per_task_of_the_first_run_only(fake, device):
    events = Events()
    with kagent_core.use_plugin(events):
        run = compiled(function, **device)
        for _ in range(3):
            same(run(X), function(X))
    assert sorted(events.names()) == ["add", "mul", "relu"]
    assert all(event.elapsed_ms >= 0 and event.error is None for event in events.events)
    assert {str(event.task.device) for event in events.events} == {device["device"]}


def test_each_plan_has_a_first_run(fake):
    events = Events()
    with kagent_core.use_plugin(events):
        graph = traced(lambda x: (x * 2.0,), torch.randn(3), symbolic=True, **FAKE)
        for size in (3, 4, 3, 4):
            graph([torch.randn(size)])
    assert events.names() == ["mul", "mul"]


def test_events_of_every_segment(fake):
    events = Events()
    with kagent_core.use_plugin(events):
        compiled(lambda x: torch.relu(torch.sin(torch.relu(x))), **FAKE)(X)
    assert [(event.task.name, str(event.task.device)) for event in events.events] == [
        ("relu", "fake:0"),
        ("sin", "cpu"),
        ("relu_1", "fake:0"),
    ]


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_with_profile_every_run_has_events(fake, device, tmp_path):
    events = Events()
    with kagent_core.use_plugin(events):
        options = {**device, "profile": True, "cache_dir": str(tmp_path)}
        run = compiled(function, **options)
        for count in range(1, 4):
            same(run(X), function(X))
            assert len(events.events) == 3 * count
        session(**options).close()
    assert (tmp_path / "profile.sqlite3").exists()


def test_no_event_for_what_is_not_launched(fake):
    events = Events()
    with kagent_core.use_plugin(events):
        run = compiled(function, **FAKE)
        run(torch.randn(0))
    assert events.events == []


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_a_task_that_fails_is_an_event_with_its_error(fake, device):
    def fails(*args, **kwargs):
        raise ValueError("no")

    kernel = KernelDescriptor("aten::mul.Tensor", "fails", fails, allocates=device == CPU)

    class Override:
        @hookimpl(wrapper=True)
        def kagent_lookup_kernels(self, ctx):
            found = yield
            return [kernel if one.signature == kernel.signature else one for one in found]

    events = Events()
    with kagent_core.use_plugin(events), kagent_core.use_plugin(Override()):
        run = compiled(function, **device)
        with pytest.raises(KernelExecutionError):
            run(X)
    assert events.names()[-1] == "mul"
    last = events.events[-1]
    assert isinstance(last.error, KernelExecutionError)
    assert isinstance(last.error.__cause__, ValueError)
    assert all(event.error is None for event in events.events[:-1])


@pytest.mark.parametrize("device", [CPU, FAKE])
def test_an_observer_that_fails_is_not_taken_for_a_kernel(fake, device):
    class Fails(Events):
        @hookimpl
        def kagent_task_finished(self, event):
            self.events.append(event)
            raise ZeroDivisionError("the observer")

    events = Fails()
    with kagent_core.use_plugin(events):
        run = compiled(function, **device)
        with pytest.raises(ZeroDivisionError, match="the observer"):
            run(X)
        assert len(events.events) == 1
        same(run(X), function(X))  # a replay, which nobody observes
