"""What watches parameters is made while a graph is being captured."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import kagent_core.inference
from kagent_core.config import load_config
from kagent_core.errors import ConfigError
from kagent_core.watch import memory as memory_module


@pytest.fixture
def slow_watch(monkeypatch: pytest.MonkeyPatch):
    """Return what makes watches, slowly, and what lets it go on; and whom it was made for."""
    made: list[Path] = []
    begun, goes_on = threading.Event(), threading.Event()

    def make(directory: Path) -> None:
        begun.set()
        assert goes_on.wait(60)
        made.append(directory)

    monkeypatch.setattr(memory_module, "make_memory_watch", make)
    return memory_module._OwnWatches(), begun, goes_on, made


def test_who_needs_a_watch_waits_for_the_one_that_is_being_made(slow_watch, tmp_path: Path) -> None:
    watches, begun, goes_on, made = slow_watch
    watches.prepare(tmp_path)
    assert begun.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    assert watches.of(tmp_path) is None
    watches.prepare(tmp_path)
    assert made == [tmp_path]


def test_a_forked_process_does_not_wait_for_its_parents_watch(slow_watch, tmp_path: Path) -> None:
    watches, begun, goes_on, _ = slow_watch
    watches.prepare(tmp_path)
    assert begun.wait(60)
    watches.unlock()  # as in the child: nobody there lets go of the lock
    goes_on.set()
    assert watches.of(tmp_path) is None


def test_an_error_while_a_watch_is_made_ahead_reaches_those_who_need_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(directory: Path) -> None:
        raise ConfigError("nothing works", hint="mend it")

    monkeypatch.setattr(memory_module, "make_memory_watch", fail)
    watches = memory_module._OwnWatches()
    watches.prepare(tmp_path)
    with pytest.raises(ConfigError, match="nothing works"):
        watches.of(tmp_path)


@pytest.mark.parametrize(
    ("gradients", "parameters", "prepared"), [(False, "checked", 1), (False, "version", 0), (True, "checked", 0)]
)
def test_it_is_made_ahead_where_parameters_are_constants(
    monkeypatch: pytest.MonkeyPatch, gradients: bool, parameters: str, prepared: int
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(kagent_core.inference, "prepare_memory_watch", asked.append)
    model = torch.nn.Linear(4, 4)
    options = {"device": "cpu", "parameters": parameters}
    with torch.set_grad_enabled(gradients):
        torch.compile(model, backend="kagent", options=options)(torch.randn(2, 4))
    assert asked == [load_config().cache_dir] * prepared


def test_a_function_without_parameters_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kagent_core.inference, "prepare_memory_watch", lambda directory: pytest.fail("asked for"))
    with torch.no_grad():
        torch.compile(torch.sin, backend="kagent", options={"device": "cpu"})(torch.randn(2, 4))
