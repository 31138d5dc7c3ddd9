"""Programs on a simulated CUDA driver: streams, graphs, copies and the reports of kernels, as on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kagent_core

from .simulated import DEVICE, Cuda, Plugin


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Iterator[Callable[..., Cuda]]:
    """Start the driver and take it into use."""
    with kagent_core.use_plugin(Plugin()):
        yield lambda **options: Cuda(monkeypatch, cache_dir, **options)


def compiled(program: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(program, backend="kagent", options={"device": DEVICE, "missing_kernel": "error"})


def chains(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Chains that do not depend on each other, and meet."""
    ends = []
    for number in range(4):
        a = (x + number) @ y
        ends.append((a - a.mean(-1, keepdim=True)).relu() @ x)
    return torch.stack(ends).softmax(0).sum(0) @ y


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_replays(seed: int, graphs: bool, start: Callable[..., Cuda], caplog: pytest.LogCaptureFixture) -> None:
    cuda = start(seed=seed, graphs=graphs)
    torch.manual_seed(seed)
    with caplog.at_level(logging.INFO, "kagent"), torch.no_grad():
        program = compiled(chains)
        for _ in range(4):
            x, y = torch.randn(6, 6), torch.randn(6, 6)
            torch.testing.assert_close(program(x, y), chains(x, y), atol=1e-4, rtol=1e-4)
    assert cuda.calls["graph"] == (3 if graphs else 0)
    assert cuda.calls["update"] == 0  # inputs are copied to where they were
    assert ("launches are started one by one" in caplog.text) == (not graphs)
    if graphs:
        [graph] = cuda.graphs
        assert len([node for node in graph.edges if not node]) >= 2, "nothing can run side by side"


@pytest.mark.parametrize("graphs", [True, False])
def test_without_waits_results_are_wrong(graphs: bool, start: Callable[..., Cuda]) -> None:
    """Else the driver would not notice one that is missing."""
    cuda = start(graphs=graphs)
    program, wrong = compiled(chains), 0
    with torch.no_grad():
        program(torch.randn(6, 6), torch.randn(6, 6))
        cuda.ignores_waits = True
        for _ in range(3):
            x, y = torch.randn(6, 6), torch.randn(6, 6)
            wrong += not torch.allclose(program(x, y), chains(x, y), atol=1e-4, rtol=1e-4)
    assert wrong


def test_a_model_that_learns(start: Callable[..., Cuda]) -> None:
    """Parameters change in place, at each step, between graphs for forward and backward."""
    cuda = start()
    torch.manual_seed(0)
    x, target = torch.randn(8, 5), torch.randn(8, 3)

    def train(prepare: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run, losses = prepare(model), []
        for _ in range(5):
            loss = torch.nn.functional.mse_loss(run(x), target)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    assert train(compiled) == pytest.approx(train(lambda model: model), rel=1e-4)
    assert cuda.calls["graph"] >= 8


def test_parameters_that_move(start: Callable[..., Cuda]) -> None:
    cuda = start()
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).requires_grad_(False)
    program, x = compiled(model), torch.randn(4, 5)
    for _ in range(3):
        torch.testing.assert_close(program(x), model(x))
    model[2].weight = torch.nn.Parameter(torch.randn(3, 7), requires_grad=False)
    for _ in range(3):
        torch.testing.assert_close(program(x), model(x))
    assert cuda.calls["graph"] >= 3


def test_reports_are_read_after_a_graph(start: Callable[..., Cuda]) -> None:
    cuda = start()

    def looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index].sort().values @ table

    table, index = torch.randn(6, 6), torch.tensor([3, 0, 5])
    program = compiled(looked_up)
    for _ in range(3):
        torch.testing.assert_close(program(table, index), looked_up(table, index))
    assert cuda.calls["graph"] == 2
    with pytest.raises(IndexError, match=r"out of bounds|out of range"):
        program(table, torch.tensor([3, 6, 5]))
    assert cuda.calls["graph"] == 3
    torch.testing.assert_close(program(table, index), looked_up(table, index))


def test_memory_is_given_back(start: Callable[..., Cuda]) -> None:
    cuda = start()
    program = compiled(chains)
    with torch.no_grad():
        for _ in range(3):
            program(torch.randn(6, 6), torch.randn(6, 6))
    graph = cuda.graphs[0]
    assert graph.nodes
    del program
    torch._dynamo.reset()
    compiled(torch.relu)(torch.ones(2))  # plans that nobody has any more are given up when another one is made
    assert not graph.nodes
