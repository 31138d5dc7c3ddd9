"""CLBlast's products: right wherever a matrix lies, and taken only where tuning found them faster."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.config import load_config
from kagent_core.kernels import UserKernel, activate
from kagent_core.profile.agent import ProfilerAgent
from kagent_core.profile.file import profile_path
from kagent_core.profile.measured import MeasuredFaster
from kagent_core.profile.problem import problem_key
from kagent_core.session import session_for, use_plugin
from kagent_core.specs import DType, KernelDescriptor, LaunchConfig, OpCall, TaskFinished, TensorSpec
from kagent_core.tune import search as searching
from kagent_core.tune.agent import tune
from kagent_opencl.clblast import Matrix, QueueFunction, _library, refusal

F32 = DType("float32", 4)
r = partial(torch.randn, generator=torch.Generator().manual_seed(0))  # the same numbers for every worker and run

needs_clblast = pytest.mark.skipif(
    _library() is None, reason="CLBlast is not installed, and `make test` could not install it (libclblast1)"
)


@pytest.fixture
def kernels(device: str) -> list[UserKernel]:
    """CLBlast's kernels, taken whether or not they are faster."""
    session = session_for(load_config({"device": device}))
    found = session.open(session.target.device).registry.kernels()
    measured = [kernel for kernel in found if isinstance(kernel.accepts, MeasuredFaster)]
    return [UserKernel(session.target.device, replace(one, accepts=_takes(one))) for one in measured]


def _takes(kernel: KernelDescriptor) -> Any:
    assert isinstance(kernel.accepts, MeasuredFaster)
    return kernel.accepts.takes


def _counting(kernel: UserKernel, counted: list[str]) -> UserKernel:
    """Return a kernel that notes its calls."""
    descriptor = kernel.descriptor

    def function(*args: Any, **kwargs: Any) -> None:
        counted.append(descriptor.name)
        assert descriptor.function is not None
        descriptor.function(*args, **kwargs)

    return UserKernel(kernel.device, replace(descriptor, function=QueueFunction(function)))


NAN = torch.full((21,), float("nan"))
CASES: dict[str, tuple[str, list[torch.Tensor], dict[str, float]]] = {
    "mm": ("mm", [r(33, 47), r(47, 21)], {}),
    "mm of transposed": ("mm", [r(47, 33).t(), r(21, 47).t()], {}),
    "mm of parts": ("mm", [r(40, 60)[3:30, 5:50], r(60, 33)[2:47, 1:20]], {}),
    "mm of a row and a column": ("mm", [r(1, 47), r(47, 1)], {}),
    "outer product": ("mm", [r(30, 1), r(1, 20)], {}),
    "addmm of a vector": ("addmm", [r(21), r(33, 47), r(47, 21)], {"alpha": 0.5, "beta": 2}),
    "addmm of every other element": ("addmm", [r(42)[::2], r(33, 47), r(21, 47).t()], {}),
    "addmm of a matrix": ("addmm", [r(33, 21), r(33, 47), r(47, 21)], {"alpha": -1, "beta": 3}),
    "addmm without what is added": ("addmm", [NAN, r(33, 47), r(47, 21)], {"beta": 0}),
    "bmm": ("bmm", [r(5, 33, 47), r(5, 47, 21)], {}),
    "bmm of transposed": ("bmm", [r(5, 47, 33).transpose(1, 2), r(47, 5, 21).transpose(0, 1)], {}),
    "bmm of one for all": ("bmm", [r(1, 33, 47).expand(5, 33, 47), r(5, 47, 21)], {}),
    "baddbmm": ("baddbmm", [r(5, 33, 21), r(5, 33, 47), r(5, 47, 21)], {"alpha": 2, "beta": 0.5}),
}


@needs_clblast
@pytest.mark.parametrize("case", CASES)
def test_products_are_right(case: str, device: str, kernels: list[UserKernel]) -> None:
    name, args, numbers = CASES[case]
    counted: list[str] = []
    with activate(*(_counting(kernel, counted) for kernel in kernels)):
        result = kagent_core.run_op(f"aten::{name}", *args, device=device, **numbers)
    assert counted == [f"clblast_{name}"]
    function = getattr(torch, name)
    exact = function(*(arg.double() for arg in args), **numbers)
    error = (result.double() - exact).abs().max()
    eagers = (function(*args, **numbers).double() - exact).abs().max()
    last_place = torch.finfo(torch.float32).eps * exact.abs().max()  # of one element, eager's may be rounded luckily
    assert error <= 2 * eagers + last_place


@needs_clblast
def test_what_ran_was_clblasts(device: str, kernels: list[UserKernel]) -> None:
    ran: list[str] = []

    class Observer:
        @kagent_core.hookimpl
        def kagent_task_finished(self, event: Any) -> None:
            ran.append(event.task.kernel.name)

    multiply = kagent_core.compile(torch.mm, device=device)
    with use_plugin(Observer()), activate(*kernels):
        multiply(*CASES["mm"][1])
    assert ran == ["clblast_mm"]


def spec(shape: tuple[int, ...], strides: tuple[int, ...], buffer: int = 0) -> TensorSpec:
    return TensorSpec(F32, shape, strides, 0, buffer)


def product(a: TensorSpec, b: TensorSpec, out: TensorSpec, *added: TensorSpec) -> OpCall:
    inputs = (*added, a, b)
    return OpCall(0, "product", "aten::mm", {str(n): one for n, one in enumerate(inputs)}, inputs, (out,), (out,))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((3, 5), (5, 1), Matrix(False, 5)),
        ((3, 5), (8, 1), Matrix(False, 8)),
        ((3, 5), (1, 3), Matrix(True, 3)),
        ((3, 5), (10, 2), None),
        ((3, 5), (0, 1), None),  # one row for all: rows must not overlap
        ((1, 5), (1, 1), Matrix(False, 5)),
        ((3, 1), (1, 7), Matrix(False, 1)),
        ((1, 1), (0, 0), Matrix(False, 1)),
    ],
)
def test_how_a_matrix_lies(shape: tuple[int, ...], strides: tuple[int, ...], expected: Matrix | None) -> None:
    assert Matrix.of(spec(shape, strides)) == expected


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (product(spec((0, 4), (4, 1)), spec((4, 5), (5, 1)), spec((0, 5), (5, 1))), "without elements"),
        (product(spec((3, 0), (1, 1)), spec((0, 5), (5, 1)), spec((3, 5), (5, 1))), "without elements"),
        (product(spec((3, 4), (8, 2)), spec((4, 5), (5, 1)), spec((3, 5), (5, 1))), "neighbouring elements"),
        (product(spec((3, 4), (4, 1)), spec((4, 5), (5, 1)), spec((3, 5), (1, 3))), "row by row"),
        (
            product(spec((3, 4), (4, 1)), spec((4, 5), (5, 1)), spec((3, 5), (5, 1)), spec((3, 1), (1, 1))),
            "adds contiguous tensors",
        ),
        (
            product(spec((3, 4), (4, 1)), spec((4, 5), (5, 1)), spec((3, 5), (5, 1)), spec((5,), (0,))),
            "adds contiguous tensors",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused(call: OpCall, told: str) -> None:
    assert told in (refusal(call) or "")


# -- when it is taken


@needs_clblast
def test_it_is_taken_where_it_was_measured_to_be_faster_and_nowhere_else(device: str, tmp_path: Path) -> None:
    call = product(spec((3, 4), (4, 1)), spec((4, 5), (5, 1), 1), spec((3, 5), (5, 1), 2))
    config = load_config({"device": device, "cache_dir": str(tmp_path)})
    info = session_for(config).target
    unmeasured = MeasuredFaster(info, config, "clblast_mm", refusal)
    assert "was not measured to be the fastest one; `kagent tune" in (unmeasured(call) or "")
    assert not profile_path(config).exists()
    agent = ProfilerAgent(profile_path(config))
    agent.record_config(info, "clblast_mm", problem_key((call,)), LaunchConfig(), elapsed_ms=0.1)
    agent.close()
    assert MeasuredFaster(info, config, "clblast_mm", refusal)(call) is None
    assert MeasuredFaster(info, config, "clblast_bmm", refusal)(call) is not None
    assert MeasuredFaster(info, config.replace(tuned=False), "clblast_mm", refusal)(call) is not None


@needs_clblast
def test_another_process_takes_what_was_found_faster(device: str, tmp_path: Path) -> None:
    """The whole way: what is in the file decides which kernel a plan has, and the log says which one it is."""
    script = (
        "import sys, torch, kagent_core\n"
        "print(kagent_core.compile(torch.mm, device=sys.argv[1])(torch.ones(3, 4), torch.ones(4, 5)).sum())\n"
    )
    environment = {**os.environ, "KAGENT_CACHE_DIR": str(tmp_path), "KAGENT_LOGS": "extract=debug"}

    def run() -> str:
        command = [sys.executable, "-c", script, device]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert "tensor(60.)" in done.stdout
        return done.stderr

    assert "found 'clblast_mm'" not in run()
    config = load_config({"device": device, "cache_dir": str(tmp_path)})
    info = session_for(config).target
    problem = "aten::mm(f32[3,4]:c, f32[4,5]:c) -> f32[3,5]:c"
    agent = ProfilerAgent(profile_path(config))
    agent.record_config(info, "clblast_mm", problem, LaunchConfig(), elapsed_ms=0.1)
    agent.close()
    assert "found 'clblast_mm'" in run()


@needs_clblast
def test_tuning_tries_it_and_remembers_where_it_is_faster(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "AXES", {})
    config = load_config({"device": device, "cache_dir": str(tmp_path)})
    args = r(12, 20), r(20, 8)

    def tuned(clblast_ms: float) -> tuple[str | None, float]:
        def clock(event: TaskFinished) -> float:
            return clblast_ms if event.task.kernel.name == "clblast_mm" else 10.0

        [found] = tune(config, torch.mm, args, clock=clock)
        return found.kernel, found.elapsed_ms

    info = session_for(config).target
    problem = "aten::mm(f32[12,20]:c, f32[20,8]:c) -> f32[12,8]:c"
    assert tuned(1.0) == ("clblast_mm", 1.0)
    assert ProfilerAgent(profile_path(config)).tuned(info, "clblast_mm", problem) is not None
    assert tuned(11.0) == (None, 10.0)
    assert ProfilerAgent(profile_path(config)).tuned(info, "clblast_mm", problem) is None
