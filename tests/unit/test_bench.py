"""``kagent bench``: what is timed is what the tables say, and the figures come out as they went in."""

import functools
import gc
import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Interpreter

from kagent_core.bench import functions, overhead
from kagent_core.bench.extraction import PARTS, ExtractionFigures, measure_extraction
from kagent_core.bench.figures import Figures
from kagent_core.bench.functions import FunctionFigures, measure_functions, own_function
from kagent_core.bench.graphs import mixed_graph, mixed_inputs
from kagent_core.bench.replay import CASES, ReplayFigures
from kagent_core.bench.timing import Timing, calls_per_round, no_collection, one_thread, time_calls
from kagent_core.cli.output import make_console
from kagent_core.config import Config
from kagent_core.errors import KagentError
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import Session


@pytest.fixture
def session() -> Session:
    return Session(Config(device="cpu", generated_kernels="off"))


# -- timing


def test_contenders_take_turns_and_warming_up_does_not_count() -> None:
    called: list[str] = []
    finished: list[int] = []

    def first() -> None:
        if len(called) < 3:
            time.sleep(0.01)  # only the first round is slow
        called.append("a")

    contenders: dict[str, Callable[[], object]] = {"a": first, "b": lambda: called.append("b")}
    timings = time_calls(contenders, calls=3, rounds=2, on_round=lambda: finished.append(len(called)))
    assert "".join(called) == "aaabbb" * 3
    assert finished == [6, 12, 18]
    assert timings["a"].median < 10_000


def test_small_tensors_are_computed_on_many_times_in_a_round() -> None:
    assert calls_per_round(lambda: None, most=50) == 50
    assert calls_per_round(lambda: time.sleep(0.01), most=50) == 1


def test_a_round_counts_as_the_mean_of_its_calls() -> None:
    timing = time_calls({"sleep": lambda: time.sleep(0.002)}, calls=5, rounds=3)["sleep"]
    assert 2_000 <= timing.minimum <= timing.median


def test_a_timing_is_minimum_and_median() -> None:
    assert Timing.of([5.0, 1.0, 3.0]) == Timing(1.0, 3.0)
    assert Timing(1.0, 3.0).per(10) == Timing(0.1, 0.3)


def test_nothing_is_collected_while_the_clock_runs() -> None:
    enabled: list[bool] = []
    assert gc.isenabled()
    time_calls({"look": lambda: enabled.append(gc.isenabled())}, calls=1, rounds=1)
    assert enabled == [False, False]
    assert gc.isenabled()
    with pytest.raises(KeyError), no_collection():
        raise KeyError
    assert gc.isenabled()


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- extraction


@pytest.mark.parametrize("operators", [10, 70])
def test_the_mixed_graph_is_one_that_kagent_runs_right(session: Session, operators: int) -> None:
    graph = mixed_graph(operators)
    compiled = CompiledGraph(session, graph)
    [result] = compiled(mixed_inputs())
    [expected] = Interpreter(graph.graph_module).run(*mixed_inputs())
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert result.abs().max() > 1e-3
    [plan] = compiled.plans()
    assert len(plan.tasks) == operators * 8 // 10
    assert any(task.kernel.allocates for task in plan.tasks)
    assert not all(task.kernel.allocates for task in plan.tasks)
    assert "layers.py:" in (plan.tasks[-1].calls[0].provenance.line or "")


@pytest.mark.parametrize("operators", [0, 15])
def test_a_graph_of_another_size_is_refused(operators: int) -> None:
    with pytest.raises(ValueError, match=rf"a graph of {operators} operators .* a multiple of 10"):
        mixed_graph(operators)


def test_the_parts_of_extraction_make_up_the_whole() -> None:
    finished: list[None] = []
    figures = measure_extraction((10, 30), rounds=1, on_round=lambda: finished.append(None))
    assert len(finished) == 2
    assert [(one.operators, one.tasks) for one in figures] == [(10, 8), (30, 24)]
    for one in figures:
        assert list(one.parts) == list(PARTS)
        assert all(part.minimum > 0 for part in one.parts.values())
        assert sum(part.minimum for part in one.parts.values()) == pytest.approx(one.total.minimum)


# -- replay


@pytest.mark.parametrize("make_case", CASES)
def test_contenders_compute_the_same(session: Session, make_case: Any) -> None:
    case = make_case(session, 5)
    with torch.no_grad():
        results = {name: contender().clone() for name, contender in case.contenders.items()}
        again = case.contenders["kagent"]()
    assert list(results) == ["kagent", "bare calls", "eager"]
    assert results["eager"].abs().max() > 0
    for result in (*results.values(), again):
        torch.testing.assert_close(result, results["eager"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make_case", "tasks", "planned", "views"), list(zip(CASES, (5, 5, 5, 1), (4, 0, 4, 0), (0, 0, 5, 0), strict=True))
)
def test_a_case_measures_what_its_name_says(
    monkeypatch: pytest.MonkeyPatch, session: Session, make_case: Any, tasks: int, planned: int, views: int
) -> None:
    made: list[CompiledGraph] = []

    def remember(*args: Any) -> CompiledGraph:
        made.append(CompiledGraph(*args))
        return made[0]

    monkeypatch.setattr("kagent_core.bench.replay.CompiledGraph", remember)
    case = make_case(session, 5)
    with torch.no_grad():
        case.contenders["kagent"]()
    [plan] = made[0].plans()
    assert case.tasks == len(plan.tasks) == tasks
    [step] = plan.steps
    assert len(step.segment.offsets) == planned  # type: ignore[union-attr]
    bases = set(plan.program.inputs)
    read = [spec for task in plan.tasks for spec in task.calls[0].inputs]
    inputs = {spec.buffer for spec in bases}
    assert sum(spec.buffer in inputs and spec not in bases for spec in read) == views


def test_overhead_is_what_replay_takes_longer() -> None:
    per_task = {"kagent": Timing(3.0, 5.0), "bare calls": Timing(1.0, 2.0), "eager": Timing(0.5, 0.5)}
    assert ReplayFigures("case", 1, per_task).overhead == Timing(2.0, 3.0)


# -- functions


def test_every_contender_has_a_code_object_of_its_own() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    one, other = own_function(double), own_function(double)
    codes = [function.__code__ for function in (double, one, other)]  # type: ignore[attr-defined]
    assert len({id(code) for code in codes}) == 3
    assert one(torch.ones(1)) == 2


def test_functions_are_compiled_by_every_backend_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("there is no compiler")

    monkeypatch.setitem(functions.BACKENDS, "default backend", {"backend": broken})
    figures = measure_functions(rounds=1)
    assert [one.name for one in figures] == list(functions.FUNCTIONS)
    for one in figures:
        assert list(one.per_call) == ["eager", "aot_eager", "kagent"]
        assert list(one.first_call_ms) == ["aot_eager", "kagent"]
        assert one.unavailable == {"default backend": "RuntimeError: there is no compiler"}
        assert one.ratio("kagent", "default backend") is None


@pytest.mark.slow
def test_the_default_backend_is_a_contender_where_it_can_compile() -> None:
    for one in measure_functions(rounds=1):
        assert {*one.per_call, *one.unavailable} == {"eager", *functions.BACKENDS}
        assert set(one.unavailable) <= {"default backend"}


def test_that_kagent_fails_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "BACKENDS", {"kagent": {"backend": "kagent", "options": {"device": "nowhere"}}})
    with pytest.raises(Exception, match="nowhere"):
        measure_functions(rounds=1)


def test_a_ratio_is_that_of_the_minima() -> None:
    figures = FunctionFigures("f", {"eager": Timing(2.0, 100.0), "kagent": Timing(6.0, 7.0)}, {}, {})
    assert figures.ratio("kagent", "eager") == 3.0
    assert figures.ratio("eager", "eager") == 1.0


# -- figures


def extraction(operators: int, minimum: float) -> ExtractionFigures:
    total = Timing(minimum, 2 * minimum)
    return ExtractionFigures(operators, operators, total, dict.fromkeys(PARTS, total.per(len(PARTS))))


FIGURES = Figures(
    machine={"processor": "Abacus 8", "python": "3.11.0", "torch": "2.9.0", "threads": 1},
    plan_rounds=10,
    call_rounds=50,
    extraction=[extraction(100, 90.0), extraction(1_000, 40.0), extraction(10_000, 60.0)],
    replay=[
        ReplayFigures("light", 200, {"kagent": Timing(3, 3), "bare calls": Timing(2, 2)}),
        ReplayFigures("heavy", 200, {"kagent": Timing(9, 9), "bare calls": Timing(2, 2)}),
    ],
    functions=[FunctionFigures("f(x)", {"eager": Timing(1, 1), "kagent": Timing(4, 5)}, {"kagent": 70.04}, {})],
    elapsed_s=12.34,
)


def test_aims_are_held_against_the_worst_case() -> None:
    speed, growth, replay = FIGURES.aims()
    assert (speed.case, speed.measured, speed.met) == ("100 operators", 90.0, True)
    assert (growth.case, growth.measured, growth.met) == ("from 1,000 to 10,000 operators", 1.5, False)
    assert (replay.case, replay.measured, replay.met) == ("heavy", 7.0, False)
    slower = replace(FIGURES, extraction=[extraction(10, 100.0), extraction(20, 100.1)])
    assert [aim.met for aim in slower.aims()[:2]] == [False, True]


def test_the_json_has_every_figure() -> None:
    written = json.loads(json.dumps(FIGURES.as_dict()))
    assert written["schema_version"] == 1
    assert written["machine"] == FIGURES.machine
    assert written["rounds"] == {"extraction": 10, "replay": 50, "functions": 50}
    assert [one["operators"] for one in written["extraction"]] == [100, 1_000, 10_000]
    assert written["extraction"][0]["per_operator"] == {"min_us": 90.0, "median_us": 180.0}
    assert list(written["extraction"][0]["parts"]) == list(PARTS)
    assert written["extraction_growth"] == 1.5
    assert written["replay"][1]["overhead"] == {"min_us": 7, "median_us": 7}
    assert written["functions"][0]["per_call"]["kagent"] == {"min_us": 4, "median_us": 5}
    assert written["functions"][0]["first_call_ms"] == {"kagent": 70.0}
    assert [aim["met"] for aim in written["aims"]] == [True, False, False]


def test_the_command_measures_prints_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(functions.BACKENDS, "default backend")  # it compiles for many seconds
    small = functools.partial(overhead.measure, sizes=(10, 20), tasks=5, plan_rounds=2, call_rounds=2)
    monkeypatch.setattr(overhead, "measure", small)
    console, path = make_console(), tmp_path / "figures.json"
    console.file, console.width = (printed := io.StringIO()), 200
    overhead.run(console, path)
    written = json.loads(path.read_text())
    assert written["machine"]["threads"] == 1
    assert written["machine"]["torch"] == torch.__version__
    lines = printed.getvalue().splitlines()
    assert "\x1b" not in printed.getvalue()
    assert any(line.split()[-2:] == ["10", "20"] for line in lines)
    largest = written["extraction"][1]["per_operator"]
    [total] = [line for line in lines if line.startswith("from captured graph to plan")]
    assert total.endswith(f"{largest['min_us']:.1f} / {largest['median_us']:.1f}")
    for one in written["replay"]:
        [row] = [line for line in lines if line.startswith(one["case"]) and " / " in line]
        assert f"{one['per_task']['eager']['median_us']:.1f}" in row
    for aim in written["aims"]:
        [row] = [line for line in lines if line.startswith(aim["name"] + " ")]
        assert row.rstrip().endswith("met" if aim["met"] else "missed")


def test_a_file_that_cannot_be_written_is_told_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(overhead, "measure", lambda console: pytest.fail("measured"))
    with pytest.raises(KagentError, match=r"cannot write '.*figures\.json': No such file or directory"):
        overhead.run(make_console(), tmp_path / "nowhere" / "figures.json")
