"""Segments with generated kernels: one translation unit, a table of arguments, neighbours in one call."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.single import run_overload
from kagent_core.specs import TaskFinished
from kagent_cpu.replay import CompiledSegment, CpuSegment
from kagent_cpu.unit import is_generated

from .builders import aten, segment_of


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(
        function, backend="kagent", fullgraph=True, dynamic=False, options={"device": "cpu", **options}
    )


def generated(function: Any, *args: torch.Tensor, **options: Any) -> CompiledSegment:
    return segment_of(function, *args, **{"generated_kernels": "auto", **options})


def names_of(segment: CompiledSegment) -> list[str]:
    return ["generated" if is_generated(task) else task.kernel.name for task in segment.segment.tasks]


# -- one translation unit


def test_neighbours_are_called_from_one_function() -> None:
    x = torch.randn(8, 16)
    segment = generated(lambda x: aten.sum(aten.exp(aten.add(x, 1)), [1]).add(aten.sum(x, [0]).sum()), x, fusion=False)
    assert set(names_of(segment)) == {"generated"}
    code = [line.split("#")[0].strip() for line in segment.source.lines]
    assert [line for line in code if line.startswith("run_")] == ["run_0(table_at + 0)"]
    observed = [line for line in segment.source.observed_lines if "run_" in line]
    assert len(observed) == len(segment.segment.tasks)


def test_a_kernel_that_two_tasks_launch_is_compiled_once() -> None:
    segment = generated(lambda x, y: aten.mm(aten.exp(x), aten.exp(y)), torch.randn(8, 8), torch.randn(8, 8))
    assert names_of(segment) == ["generated", "generated", "aten::mm.out"]
    assert segment.source.unit.kernel_count == 1


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return aten._softmax(aten.add(aten.mul(x, 0.5), w), -1, False)  # type: ignore[no-any-return]


def test_another_shape_runs_the_same_code() -> None:
    texts = {
        generated(layer, torch.randn(rows, columns), torch.randn(columns)).source.unit.text()
        for rows, columns in ((8, 64), (9, 64), (128, 200))
    }
    assert len(texts) == 1


def test_where_a_program_comes_from_does_not_change_its_code() -> None:
    def elsewhere(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return layer(x, w)

    args = torch.randn(8, 64), torch.randn(64)
    assert generated(layer, *args).source.unit.text() == generated(elsewhere, *args).source.unit.text()


# -- addresses


def test_every_call_has_its_own_tensors() -> None:
    function = compiled(layer)
    held = []
    for seed in range(5):
        torch.manual_seed(seed)
        x, w = torch.randn(8, 64), torch.randn(64)
        held.append((function(x, w), torch.softmax(x * 0.5 + w, -1), x, w))
    for got, want, *_ in held:
        torch.testing.assert_close(got, want)


def test_views_of_arguments_begin_where_they_begin() -> None:
    function = compiled(lambda x: x[2:, 1:].exp() + x.t()[1:, :-2].t())
    base = torch.randn(10, 12)
    for x in (base, base.clone()[:, 2:], base[1:, 3:]):
        torch._dynamo.reset()
        torch.testing.assert_close(function(x), x[2:, 1:].exp() + x.t()[1:, :-2].t())


def test_intermediates_stay_where_they_are() -> None:
    """Large ones must not touch fresh pages on every call."""
    segment = generated(lambda x: aten.mm(aten.exp(x), aten.cos(x)), torch.randn(64, 64))
    instance = CpuSegment(segment)
    table = instance._globals["table"]
    slots = [slot for slot, _, _ in segment.source.addresses]
    assert len(slots) == 2
    before = [table[slot] for slot in slots]
    assert all(before)
    for _ in range(3):
        environment: dict[int, Any] = {0: torch.randn(64, 64)}
        instance.run(environment)
        assert [table[slot] for slot in slots] == before


def test_a_planned_result_beside_one_that_the_caller_keeps() -> None:
    """One kernel writes both: into the arena, and into memory that is made on each call."""

    def both(x: torch.Tensor) -> Any:
        y = x.exp()
        return y @ y, (y + 1).sin()

    x = torch.randn(16, 16)
    first, second = compiled(both)(x)
    torch.testing.assert_close(first, x.exp() @ x.exp())
    torch.testing.assert_close(second, (x.exp() + 1).sin())


def test_a_view_without_elements_of_what_a_kernel_could_keep_inside() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x + 1
        return y * 2, y[4:].sort().values, torch.cat([y[4:], y[4:]]).exp()

    for got, want in zip(compiled(function)(torch.arange(4.0)), function(torch.arange(4.0)), strict=True):
        assert torch.equal(got, want)


def test_many_threads() -> None:
    function = compiled(layer)
    w = torch.randn(64)
    function(torch.randn(8, 64), w)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for number in range(40):
            x = torch.full((8, 64), float(seed)) * torch.arange(64) * 0.01 + number
            if not torch.allclose(function(x, w), torch.softmax(x * 0.5 + w, -1), atol=1e-6):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- what a user can choose


def test_an_observed_run_tells_every_task() -> None:
    events: list[TaskFinished] = []

    class Observer:
        @kagent_core.hookimpl
        def kagent_contract_version(self) -> int:
            return 1

        @kagent_core.hookimpl
        def kagent_task_finished(self, event: TaskFinished) -> None:
            events.append(event)

    x, w = torch.randn(8, 64), torch.randn(64)
    with kagent_core.use_plugin(Observer()):
        result = compiled(lambda x, w: layer(x, w).mm(x.t()).exp())(x, w)
    torch.testing.assert_close(result, torch.softmax(x * 0.5 + w, -1).mm(x.t()).exp())
    assert [is_generated(event.task) for event in events] == [True, False, True]
    assert all(event.elapsed_ms > 0 and event.error is None for event in events)


@pytest.mark.parametrize(("choice", "expected"), [("off", False), ("auto", False), ("all", True)])
def test_who_multiplies_matrices(choice: str, expected: bool) -> None:
    segment = generated(aten.mm, torch.randn(4, 5), torch.randn(5, 6), generated_kernels=choice)
    assert [is_generated(task) for task in segment.segment.tasks] == [expected]


@pytest.mark.parametrize(("choice", "expected"), [("off", "aten::exp.out"), ("auto", "aten::exp.out"), ("all", "exp_")])
def test_an_operator_by_itself_is_not_worth_a_compilation(
    choice: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kagent.extract"):
        config = load_config({"device": "cpu", "generated_kernels": choice})
        result = run_overload(session_for(config), aten.exp.default, (torch.zeros(3),), {})
    assert torch.equal(result, torch.ones(3))
    assert f"looked up aten::exp on cpu, found '{expected}" in caplog.text


def test_half_types_round_after_every_operator_unless_told_otherwise() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.1 + 0.25) * 0.7 - 0.125

    x = torch.randn(1000, dtype=torch.bfloat16)
    exact = function(x.double())
    by_operator = compiled(function)(x)
    assert torch.equal(by_operator, function(x))
    torch._dynamo.reset()
    by_kernel = compiled(function, half_rounding="kernel")(x)
    assert (by_kernel.double() - exact).abs().sum() < (by_operator.double() - exact).abs().sum()
    assert torch.equal(by_kernel, exact.to(torch.bfloat16))


NO_COMPILER = """
import torch
compiled = torch.compile(lambda x: x.exp() + 1, backend="kagent", options={"device": "cpu"})
x = torch.randn(4)
assert torch.equal(compiled(x), x.exp() + 1)
"""


def test_without_a_compiler_aten_runs_every_operator(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    environment |= {"PATH": str(tmp_path), "KAGENT_LOGS": "codegen=info", "KAGENT_CACHE_DIR": str(tmp_path / "cache")}
    code = "import importlib.util, sys\nsys.modules['ziglang'] = None\n" + NO_COMPILER
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "operators on the CPU are not fused" in line]
    assert len(told) == 1
    assert "gcc" in told[0]


def test_the_kernels_text_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    function = compiled(lambda x: x.exp() + 1, logs="codegen=debug")
    with caplog.at_level(logging.DEBUG, "kagent.codegen"):
        function(torch.randn(4))
    assert "static void exp_add" in caplog.text
    assert "aten::exp" in caplog.text
    assert f"{__file__}" in caplog.text
