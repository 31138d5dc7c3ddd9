"""The search for tile sizes: what it tries, what it takes, and that other processes use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kagent_core.cli import app
from kagent_core.config import Config, load_config
from kagent_core.errors import KagentError, LaunchConfigError
from kagent_core.extract.launch_choice import ForcedLaunchConfig, choose_tiles
from kagent_core.profile.agent import ProfilerAgent
from kagent_core.profile.file import profile_path
from kagent_core.profile.measured import MeasuredFaster
from kagent_core.profile.problem import problem_key, size_class
from kagent_core.session import session_for
from kagent_core.specs import KernelDescriptor, LaunchConfig, OpCall, TaskFinished
from kagent_core.specs.tiles import Tiles
from kagent_core.tune import search as searching
from kagent_core.tune.agent import tune
from kagent_core.tune.representative import arguments, program
from kagent_core.tune.search import AXES, CONFIRMATIONS, Found, search
from kagent_core.tune.trials import Problem

from .builders import call, tensor

MM = "aten::mm(f32[19,30]:c, f32[30,21]:c) -> f32[19,21]:c"


def relu() -> OpCall:
    return call(0, "aten::relu", {"self": tensor(0, 4, 4)}, [tensor(1, 4, 4)])


def problem(name: str) -> Problem:
    return Problem(name, (relu(),), frozenset())


class FakeTrials:
    """A device on which the time follows from the tile sizes by a formula."""

    def __init__(self, refused: Mapping[tuple[str, int], str] | None = None) -> None:
        self.tried: list[dict[str, Tiles]] = []
        self.refused = refused or {}
        self.kernels: dict[str, list[KernelDescriptor]] = {}

    def problems(self) -> list[Problem]:
        return [problem("small"), problem("large")]

    def text(self, of: Problem, tiles: Tiles) -> str:
        if dict(tiles).get("depth") == 512:
            raise LaunchConfigError("the tiles take more memory than there is")
        return str({"rows": 8, "columns": 32, "blocks": 8, "depth": 256, **dict(tiles)})

    def times(
        self, tiles: Mapping[str, Tiles], kernels: Sequence[KernelDescriptor] = (), runs: int = 1
    ) -> dict[str, float]:
        self.tried.append(dict(tiles))
        for sizes in tiles.values():
            for pair in sizes:
                if pair in self.refused:
                    raise KagentError(self.refused[pair])
        return {name: self._time(name, dict(tiles.get(name, ())), kernels) for name in ("small", "large")}

    def _time(self, name: str, tiles: dict[str, int], kernels: Sequence[KernelDescriptor]) -> float:
        if kernels:
            return 1.0 if name == "small" else 100.0
        best = {"small": {"rows": 4, "columns": 16}, "large": {"columns": 64, "blocks": 16}}[name]
        return 10.0 - sum(tiles.get(size) == value for size, value in best.items())

    def alternatives(self, of: Problem) -> list[KernelDescriptor]:
        return self.kernels.get(of.key, [])


def found_by(trials: Any) -> dict[str, Found]:
    return {each.problem.key: each for each in search(trials)}


def test_each_problem_gets_its_own_tile_sizes() -> None:
    found = found_by(FakeTrials())
    assert dict(found["small"].tiles) == {"rows": 4, "columns": 16}
    assert dict(found["large"].tiles) == {"columns": 64, "blocks": 16}
    assert (found["small"].default_ms, found["small"].elapsed_ms) == (10.0, 8.0)


def test_no_kernel_is_tried_twice_and_the_devices_own_not_at_all() -> None:
    trials = FakeTrials()
    search(trials)  # type: ignore[arg-type]
    confirming = [{}, *[{"small": {"rows": 4, "columns": 16}, "large": {"columns": 64, "blocks": 16}}] * CONFIRMATIONS]
    texts = [
        (name, trials.text(problem(name), tiles))
        for tried in trials.tried
        if {name: dict(tiles) for name, tiles in tried.items()} not in confirming
        for name, tiles in tried.items()
    ]
    assert len(texts) == len(set(texts)) > 10
    assert ("small", trials.text(problem("small"), ())) not in texts


def test_what_a_device_refuses_is_left_out_with_the_reason() -> None:
    trials = FakeTrials({("rows", 4): "no such rows", ("columns", 64): "no such columns"})
    found = found_by(trials)
    assert dict(found["small"].tiles) == {"columns": 16}
    assert dict(found["large"].tiles) == {"blocks": 16}
    assert found["small"].refusals["tiles: columns=16,rows=4"] == "no such rows"
    assert found["large"].refusals["tiles: columns=64"] == "no such columns"
    assert found["small"].refusals["tiles: columns=16,depth=512"] == "the tiles take more memory than there is"


def test_a_gain_that_may_be_chance_is_none() -> None:
    class Noisy(FakeTrials):
        def _time(self, name: str, tiles: dict[str, int], kernels: Sequence[KernelDescriptor]) -> float:
            return 9.9 if tiles else 10.0

    assert all(each.is_default and each.elapsed_ms == each.default_ms for each in found_by(Noisy()).values())


def test_another_kernel_is_taken_only_where_it_is_faster() -> None:
    trials = FakeTrials()
    library = KernelDescriptor("aten::relu", "library_relu")
    trials.kernels = {"small": [library], "large": [library]}
    found = found_by(trials)
    assert (found["small"].kernel, found["small"].elapsed_ms) == ("library_relu", 1.0)
    assert found["small"].config == LaunchConfig()
    assert found["large"].kernel is None
    assert dict(found["large"].config.tiles) == {"columns": 64, "blocks": 16}


def test_a_kernel_that_fails_is_left_out() -> None:
    class Failing(FakeTrials):
        def times(self, tiles: Any, kernels: Any = (), runs: int = 1) -> dict[str, float]:
            if kernels:
                raise KagentError("the library crashed")
            return super().times(tiles, kernels, runs)

    trials = Failing()
    trials.kernels = {"small": [KernelDescriptor("aten::relu", "library_relu")]}
    found = found_by(trials)["small"]
    assert found.kernel is None
    assert found.refusals["library_relu"] == "the library crashed"


# -- with real kernels, and a clock that likes some tile sizes


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config({"device": "cpu", "generated_kernels": "all", "cache_dir": str(tmp_path / "cache")})


def likes_four_rows(event: TaskFinished) -> float:
    assert event.task.config is not None
    tiles = dict(event.task.config.tiles)
    return 10.0 - 3 * (tiles.get("rows") == 4) - 2 * (tiles.get("columns") == 16)


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"columns": (16, 4096), "rows": (2, 4)}
    monkeypatch.setattr(searching, "AXES", axes)


SCRIPT = """
import torch, kagent_core
multiply = kagent_core.compile(torch.mm, device="cpu", generated_kernels="all")
a, b = torch.randn(19, 30), torch.randn(30, 21)
torch.testing.assert_close(multiply(a, b), a @ b)
"""


def other_process(config: Config, **environment: str) -> str:
    """Compute a product in another process and return what it logs."""
    given = {**os.environ, "KAGENT_CACHE_DIR": str(config.cache_dir), "KAGENT_LOGS": "extract=debug", **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=given, check=True)
    return done.stderr


@pytest.mark.usefixtures("short_search")
def test_what_is_found_is_remembered_and_used_by_another_process(config: Config) -> None:
    other_process(config)
    assert not profile_path(config).exists()  # asking makes no file
    args = torch.randn(19, 30), torch.randn(30, 21)
    [found] = tune(config, lambda a, b: a @ b, args, clock=likes_four_rows)
    assert found.problem.key == MM
    assert dict(found.tiles) == {"rows": 4, "columns": 16}
    assert (found.default_ms, found.elapsed_ms) == (10.0, 5.0)
    refused = {what: reason for what, reason in found.refusals.items() if "columns=4096" in what}
    assert refused
    assert all("memory" in reason for reason in refused.values())
    told = "tiles: columns=16,rows=4, suggested"
    assert told in other_process(config)
    assert "suggested" not in other_process(config, KAGENT_TUNED="off")


@pytest.mark.usefixtures("short_search")
def test_a_second_search_replaces_what_the_first_one_found(config: Config) -> None:
    args = torch.randn(19, 30), torch.randn(30, 21)
    tune(config, torch.mm, args, clock=likes_four_rows)
    info = session_for(config).target
    assert ProfilerAgent(profile_path(config)).tuned(info, "aten::mm", MM) is not None
    tune(config, torch.mm, args, clock=lambda event: 20.0)  # slower, and nothing is better than the device's own
    assert ProfilerAgent(profile_path(config)).tuned(info, "aten::mm", MM) is None


@pytest.mark.usefixtures("short_search")
def test_the_search_leaves_nothing_else_behind(config: Config) -> None:
    tune(config, torch.mm, (torch.randn(19, 30), torch.randn(30, 21)), clock=likes_four_rows)
    assert {path.name for path in config.cache_dir.iterdir()} == {profile_path(config).name}
    assert ProfilerAgent(profile_path(config)).entries() == []


def test_usual_sizes_hold_for_sizes_like_them(config: Config) -> None:
    given = {"self": tensor(0, 250, 500), "mat2": tensor(1, 500, 400)}
    multiply = call(0, "aten::mm", given, [tensor(2, 250, 400)])
    session = session_for(config)
    key = size_class(multiply)
    assert key == "=aten::mm(f32[256,512]:c, f32[512,512]:c) -> f32[256,512]:c"
    agent = ProfilerAgent(profile_path(config))
    agent.record_config(session.target, "aten::mm", key, LaunchConfig(tiles={"rows": 4}), elapsed_ms=1.0)
    kernel = KernelDescriptor("aten::mm", "mm_0123", packed=())
    agent.flush()
    fresh = session_for(config.replace(plan_cache_size=31))
    assert str(fresh.suggest(session.target, kernel, [multiply])) == "tiles: rows=4"
    agent.record_config(
        session.target, "aten::mm", problem_key([multiply]), LaunchConfig(tiles={"rows": 6}), elapsed_ms=2.0
    )
    agent.close()
    fresh = session_for(config.replace(plan_cache_size=30))
    assert str(fresh.suggest(session.target, kernel, [multiply])) == "tiles: rows=6"
    off = session_for(config.replace(tuned=False))
    assert off.suggest(session.target, kernel, [multiply]) is None


def test_tile_sizes_are_forced_on_one_size_of_problem() -> None:
    def multiply(rows: int) -> OpCall:
        given = {"self": tensor(0, rows, 4), "mat2": tensor(1, 4, 5)}
        return call(0, "aten::mm", given, [tensor(2, rows, 5)])

    sized, signed = (LaunchConfig(tiles={"rows": rows}) for rows in (2, 6))
    key = problem_key([multiply(3)])
    forced = {key: ForcedLaunchConfig(key, sized), "aten::mm": ForcedLaunchConfig("aten::mm", signed)}
    assert choose_tiles([multiply(3)], forced).tiles == sized.tiles
    assert choose_tiles([multiply(8)], forced).tiles == signed.tiles
    assert choose_tiles([multiply(8)], {key: forced[key]}).tiles == ()


def test_the_usual_program_computes_what_its_arguments_say() -> None:
    results = program(*arguments())
    assert all(bool(result.isfinite().all()) for result in results)
    assert set(AXES) >= {"columns", "rows", "blocks", "depth"}


# -- kernels that only measuring chooses


def test_a_measured_kernel_is_asked_what_it_takes_first(config: Config) -> None:
    info = session_for(config).target
    never = MeasuredFaster(info, config, "library_relu", lambda call: "takes nothing")
    assert never(relu()) == "takes nothing"
    agent = ProfilerAgent(profile_path(config))
    agent.record_config(info, "library_relu", problem_key([relu()]), LaunchConfig(), elapsed_ms=1.0)
    agent.close()
    assert never(relu()) == "takes nothing"
    assert MeasuredFaster(info, config, "library_relu")(relu()) is None
    assert "kagent tune cpu" in (MeasuredFaster(info, config, "other_relu")(relu()) or "")


# -- the command


@pytest.mark.usefixtures("short_search")
def test_the_command_prints_what_it_found_and_forgets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KAGENT_GENERATED_KERNELS", "all")
    model = tmp_path / "model.py"
    model.write_text("import torch\nmodel = torch.mm\ninputs = (torch.randn(19, 30), torch.randn(30, 21))\n")
    done = CliRunner().invoke(app, ["tune", "cpu", "--model", str(model), "--json"])
    assert done.exit_code == 0, done.output
    [found] = json.loads(done.stdout)
    assert (found["problem"], found["signature"], found["kernel"]) == (MM, "aten::mm", None)
    agent = ProfilerAgent(tmp_path / "cache" / "profile.sqlite3")
    info = session_for(load_config({"device": "cpu"})).target
    agent.record_config(info, "aten::mm", MM, LaunchConfig(tiles={"rows": 4}), elapsed_ms=0.0)
    agent.close()
    done = CliRunner().invoke(app, ["tune", "cpu", "--forget"])
    assert "forgot what was tuned for cpu" in done.output
    assert not ProfilerAgent(tmp_path / "cache" / "profile.sqlite3").has_configs(info)


def test_a_device_without_tiles_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_CACHE_DIR", str(tmp_path / "cache"))
    model = tmp_path / "model.py"
    model.write_text("import torch\nmodel = torch.relu\ninputs = torch.ones(3)\n")
    done = CliRunner().invoke(app, ["tune", "cpu", "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert "nothing to tune" in done.output
