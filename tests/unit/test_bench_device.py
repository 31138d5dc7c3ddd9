"""``kagent bench device``: it compares what computes the same, and says why a contender has no figure."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kagent_core.bench import device as benchmark
from kagent_core.bench.device_figures import DeviceFigures, RowFigures, TaskFigures
from kagent_core.bench.device_rows import BY_NAME, ROWS, ResNet18, Row
from kagent_core.bench.device_tables import print_device
from kagent_core.bench.device_tasks import flops_of
from kagent_core.bench.peers import NotMeasuredError, Tinygrad, peer_named
from kagent_core.bench.timing import Timing
from kagent_core.cli import app
from kagent_core.cli.output import make_console
from kagent_core.errors import KagentError

from .builders import call, tensor

TINY = Row("tiny", "a product", lambda: (torch.matmul, (torch.ones(3, 4), torch.ones(4, 5))), 2 * 3 * 4 * 5)


class Peer:
    """A library that computes a row in some way, or says why not."""

    name = "peer"

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        self._compute = compute

    def call(self, row: str, function: Any, args: Any) -> tuple[Callable[[], object], torch.Tensor]:
        return lambda: self._compute(*args), self._compute(*args)


def measure(*peers: Any, tasks: int = 0, rows: Any = (TINY,)) -> DeviceFigures:
    return benchmark.measure(make_console(), "cpu", rows, peers, rounds=2, tasks=tasks)


def printed(figures: DeviceFigures) -> str:
    console = make_console()
    console.file, console.width = (text := io.StringIO()), 200
    print_device(console, figures)
    return text.getvalue()


def test_everyone_is_timed_and_compared() -> None:
    [row] = measure(Peer(torch.matmul)).rows
    assert list(row.per_call) == ["eager", "kagent", "peer"]
    assert row.fallbacks == 0
    assert row.ratio("peer") == row.per_call["kagent"].minimum / row.per_call["peer"].minimum
    assert row.first_call_ms is not None


def test_a_contender_that_computes_something_else_ends_the_benchmark() -> None:
    with pytest.raises(KagentError, match="peer computes row 'tiny' wrong"):
        measure(Peer(lambda a, b: a @ b + 1))


def test_a_peer_without_a_figure_is_told_with_the_reason() -> None:
    class Missing(Peer):
        def call(self, row: str, function: Any, args: Any) -> Any:
            raise NotMeasuredError("it is not installed")

    figures = measure(Missing(torch.matmul))
    [row] = figures.rows
    assert list(row.per_call) == ["eager", "kagent"]
    assert "no figure for peer in tiny: it is not installed" in printed(figures)
    assert figures.as_dict()["rows"][0]["unavailable"] == {"peer": "it is not installed"}


def test_a_row_that_cannot_be_made_is_told_with_the_reason() -> None:
    def make() -> Any:
        raise KagentError("there is no model", hint="install it")

    figures = measure(rows=(Row("model", "a model", make), TINY))
    assert "no figure for kagent in model: there is no model; install it" in printed(figures)
    assert list(figures.rows[1].per_call) == ["eager", "kagent"]


def test_the_longest_tasks_come_first_and_have_their_speed() -> None:
    row = Row("two", "a small product and a large one", lambda: (_two, (torch.randn(8, 8), torch.randn(256, 256))))
    [figures] = measure(rows=(row,), tasks=2).rows
    first, second = figures.tasks
    assert first.problem == "aten::mm(f32[256,256]:c, f32[256,256]:c) -> f32[256,256]:c"
    assert first.count * first.minimum_ms >= second.count * second.minimum_ms
    assert first.flops == 2 * 256**3
    assert first.gflops == pytest.approx(2 * 256**3 / first.minimum_ms / 1e6)


def _two(small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    return small @ small + (large @ large)[:8, :8]


def test_ratios_and_speeds_follow_from_the_minima() -> None:
    row = RowFigures(TINY, {"eager": Timing(4.0, 9.0), "kagent": Timing(2.0, 3.0)}, 1.0, 0, {"peer": "not here"})
    assert row.ratio("eager") == 0.5
    assert row.ratio("peer") is None
    assert row.gflops("kagent") == pytest.approx(120 / 2.0 / 1e3)
    figures = DeviceFigures({"processor": "P", "threads": 1, "torch": "2", "python": "3"}, "toy:0", "Toy", 2, [row], 1)
    assert figures.contenders == ["eager", "kagent", "peer"]
    values = figures.as_dict()["rows"][0]
    assert values["ratios"] == {"eager": 0.5}
    assert TaskFigures("mm", "", "", 2, 0.5, None).as_dict()["gflops"] is None


def test_floating_point_operations_are_counted() -> None:
    linear = {"self": tensor(0, 5), "mat1": tensor(1, 3, 4), "mat2": tensor(2, 4, 5)}
    relu = call(1, "aten::relu", {"self": tensor(3, 3, 5)}, [tensor(4, 3, 5)])
    assert flops_of([call(0, "aten::addmm", linear, [tensor(3, 3, 5)]), relu]) == 2 * 3 * 4 * 5
    assert flops_of([relu]) is None
    convolution = {"input": tensor(0, 1, 3, 8, 8), "weight": tensor(1, 6, 3, 3, 3), "transposed": False}
    assert flops_of([call(0, "aten::convolution", convolution, [tensor(2, 1, 6, 6, 6)])]) == 2 * 216 * 27


@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in ("minilm", "resnet18")], ids=lambda r: r.name)
def test_every_row_computes(row: Row) -> None:
    function, args = row.make()
    assert bool(function(*args).isfinite().all())


def test_the_residual_network_is_the_one_of_18_layers() -> None:
    model = ResNet18()
    assert sum(p.numel() for p in model.parameters()) == 11_689_512  # as published for 1000 classes
    layers = [m for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) - 3 == 18  # the three shortcuts are not counted


# -- tinygrad


def test_a_row_that_is_a_pytorch_model_has_no_figure_in_tinygrad() -> None:
    with pytest.raises(NotMeasuredError, match="the row is a PyTorch model"):
        Tinygrad("").call("resnet18", torch.relu, ())


def test_tinygrad_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinygrad", None)
    with pytest.raises(NotMeasuredError, match=r"it cannot be imported .*; `pip install tinygrad`"):
        Tinygrad("CL").call("gemm", torch.matmul, (torch.ones(2, 2), torch.ones(2, 2)))


def test_tinygrad_without_the_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such device\nand more")

    module = ModuleType("tinygrad")
    module.Tensor = broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tinygrad", module)
    with pytest.raises(NotMeasuredError, match=r"RuntimeError: no such device$"):
        Tinygrad("CL").call("gemm", torch.matmul, (torch.ones(2, 2), torch.ones(2, 2)))


def test_peers_go_by_name_and_device() -> None:
    assert peer_named("tinygrad").name == "tinygrad"
    assert peer_named("tinygrad:CL").name == "tinygrad:CL"
    with pytest.raises(KagentError, match="--peer names 'tinygard', which kagent cannot measure"):
        peer_named("tinygard")


# -- the command


def test_the_command_writes_its_figures_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "BY_NAME", {"tiny": TINY})
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(app, ["bench", "device", "cpu", "--rounds", "2", "--json", str(file)])
    assert done.exit_code == 0, done.output
    figures = json.loads(file.read_text())
    assert (figures["device"], figures["rounds"], figures["rows"][0]["row"]) == ("cpu", 2, "tiny")
    assert set(figures["rows"][0]["ratios"]) == {"eager"}


def test_a_row_that_does_not_exist_is_an_error() -> None:
    done = CliRunner().invoke(app, ["bench", "device", "cpu", "--rows", "gem"])
    assert done.exit_code == 1
    assert "did you mean 'gemm'?" in done.output
    assert set(BY_NAME) >= {"gemm", "minilm", "resnet18"}
