"""``kagent kernels``: the kernels of a device, and what a program needs and the device lacks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import importlib_metadata
import pytest
import torch
from typer.testing import CliRunner

import kagent_cpu.plugin
from kagent_core.cli import app
from kagent_core.layout import CONTIGUOUS, at_most
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.fake import FakeDevice, FakeRuntime

CONTRACTS = KernelDescriptor(
    "aten::mm",
    "careful_mm",
    dtypes={"float64", "float32"},
    layout=CONTIGUOUS & at_most(2),
    layouts={"mat2": CONTIGUOUS},
    priority=7,
    origin="careful.py:12",
)
MISSPELT = KernelDescriptor("aten::reluu", "typo", origin="careful.py:20")
FLOATS_ONLY = KernelDescriptor("aten::sub.Tensor", "sub", dtypes={"float32"}, origin="careful.py:30")


class Runtime(FakeRuntime):
    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


@pytest.fixture(autouse=True)
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KAGENT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KAGENT_CONFIG", os.devnull)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Pretends that the plugins of the CPU and of a fake device, and no others, are installed."""
    runtime = Runtime()
    fake = FakeDevice(kernels=[CONTRACTS, MISSPELT, FLOATS_ONLY], runtime=runtime)
    plugins = {"cpu": kagent_cpu.plugin, "fake": fake}
    points = [
        SimpleNamespace(
            name=name,
            load=lambda plugin=plugin: plugin,
            value="some.module",
            dist=SimpleNamespace(name=f"kagent-{name}", version="1.2"),
        )
        for name, plugin in plugins.items()
    ]
    found = {"kagent.plugins": points}
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda group: found.get(group, []))
    return runtime


def call(*args: str) -> str:
    """Run a command that must succeed and return what it prints."""
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def fail(*args: str) -> str:
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stdout == ""
    return result.stderr


def rows(output: str) -> list[list[str]]:
    table, _, _ = output.partition("\n\n")
    return [line.split() for line in table.splitlines()[2:]]


# -- what there is


def test_every_kernel_is_a_row(runtime: Runtime) -> None:
    output = call("kernels", "fake")
    header, *_ = output.splitlines()
    assert header.split() == ["signature", "kernel", "dtypes", "layout", "priority", "origin"]
    signatures = [row[0] for row in rows(output)]
    assert signatures == sorted(signatures)
    assert {"aten::relu", "aten::add.Tensor", "aten::mm"} <= set(signatures)
    [careful] = [row for row in rows(output) if "careful_mm" in row]
    assert careful[:4] == ["aten::mm", "careful_mm", "float32,", "float64"]
    assert careful[-2:] == ["7", "careful.py:12"]
    assert " ".join(careful[4:-2]) == "contiguous tensors of at most 2 dimensions; mat2: contiguous tensors"
    [plain] = [row for row in rows(output) if row[0] == "aten::relu"]
    assert plain[1:-1] == ["fake__relu", "all", "any", "strides", "0"]
    count = len(signatures)
    assert f"fake:0 has {count} registered kernels\n" in output
    assert runtime.closed == 1


def test_kernels_that_cannot_be_used_are_told() -> None:
    output = call("kernels", "fake")
    assert "set aside: kernel 'typo' for aten::reluu (careful.py:20) cannot be used: the installed torch" in output
    assert "did you mean 'aten::relu'?" in output
    [told] = json.loads(call("kernels", "fake", "--json"))["set_aside"]
    assert (told["signature"], told["name"], told["origin"]) == ("aten::reluu", "typo", "careful.py:20")
    assert told["reason"].endswith("has no operator 'aten::reluu'")
    assert told["hint"] == "did you mean 'aten::relu'?"


@pytest.mark.parametrize(
    ("pattern", "signatures"),
    [
        ("mm", {"aten::addmm", "aten::mm"}),
        ("aten::mm", {"aten::mm"}),
        ("aten::?m", {"aten::mm"}),
        ("*.Tensor", {"aten::add.Tensor", "aten::mul.Tensor", "aten::sub.Tensor"}),
        ("mm*", set()),
    ],
)
def test_a_pattern_selects(pattern: str, signatures: set[str]) -> None:
    output = call("kernels", "fake:0", pattern)
    assert {row[0] for row in rows(output) if row[0].startswith("aten::")} == signatures
    told = json.loads(call("kernels", "fake", pattern, "--json"))
    assert {kernel["signature"] for kernel in told["kernels"]} == signatures
    assert f"fake:0 has {len(told['kernels'])} registered kernels that match '{pattern}'" in output


def test_one_kernel_is_no_plural() -> None:
    assert "fake:0 has 1 registered kernel that matches 'relu'\n" in call("kernels", "fake", "relu")


def test_json_has_every_field() -> None:
    told = json.loads(call("kernels", "fake", "aten::mm", "--json"))
    assert (told["device"], told["on_demand"]) == ("fake:0", False)
    [careful] = [kernel for kernel in told["kernels"] if kernel["name"] == "careful_mm"]
    assert careful == {
        "signature": "aten::mm",
        "name": "careful_mm",
        "dtypes": ["float32", "float64"],
        "layout": "contiguous tensors of at most 2 dimensions",
        "layouts": {"mat2": "contiguous tensors"},
        "priority": 7,
        "origin": "careful.py:12",
        "on_demand": False,
    }
    [other] = [kernel for kernel in told["kernels"] if kernel["name"] != "careful_mm"]
    assert other["dtypes"] is None


def test_a_device_that_makes_kernels_on_demand_says_so() -> None:
    output = call("kernels", "cpu")
    core = {row[0] for row in rows(output)}
    assert {"aten::relu", "aten::mm", "aten::add.Tensor"} <= core
    assert not any(signature.endswith((".out", "_")) for signature in core)
    assert "aten::logical_xor.out" not in core
    assert f"cpu has {len(core)} kernels, made on demand from core ATen's operators; a pattern looks bey" in output


def test_a_pattern_looks_beyond_core_aten() -> None:
    told = json.loads(call("kernels", "cpu", "aten::*relu6*", "--json"))
    assert told["on_demand"]
    assert {kernel["signature"] for kernel in told["kernels"]} == {"aten::relu6"}
    [relu6] = told["kernels"]
    assert relu6["on_demand"]
    assert relu6["origin"] == f"torch {torch.__version__}"
    told = "cpu has 1 kernel that matches 'aten::*relu6*', made on demand from PyTorch's operators\n"
    assert told in call("kernels", "cpu", "aten::*relu6*")


def test_what_is_the_same_in_every_row_is_said_once() -> None:
    output = call("kernels", "cpu", "relu")
    assert output.splitlines()[0].split() == ["signature", "kernel"]
    listed = rows(output)
    assert ["aten::relu"] in listed
    assert ["aten::leaky_relu", "aten::leaky_relu.out"] in listed
    same = f"each has dtypes: all; layout: any strides; priority: 0; origin: torch {torch.__version__}\n"
    assert output.count(same) == 1
    assert "where no kernel is named, its name is the signature\n" in output


@pytest.mark.parametrize("width", [60, 100, 140])
def test_no_signature_or_kernel_is_wrapped(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = json.loads(call("kernels", "fake", "--json"))["kernels"]
    monkeypatch.setenv("COLUMNS", str(width))
    lines = call("kernels", "fake").splitlines()
    for kernel in kernels:
        assert [kernel["signature"], kernel["name"]] in [line.split()[:2] for line in lines]
    assert all(len(line) <= width for line in lines)


def test_other_namespaces_are_left_out_until_they_are_named() -> None:
    everything = {kernel["signature"] for kernel in json.loads(call("kernels", "cpu", "relu", "--json"))["kernels"]}
    aten = {signature for signature in everything if signature.startswith("aten::")}
    output = call("kernels", "cpu", "relu")
    assert {row[0] for row in rows(output)} == aten
    assert f"cpu has {len(aten)} kernels that match 'relu', made on demand" in output
    left_out = len(everything) - len(aten)
    assert left_out > 1
    assert (
        f"left out: {left_out} kernels of other namespaces than aten; to list all: kagent kernels cpu '*::*relu*'"
        in output
    )
    assert {row[0] for row in rows(call("kernels", "cpu", "*::*relu*"))} == everything
    assert "to list all: kagent kernels cpu '*::*relu'\n" in call("kernels", "cpu", "*relu")


@pytest.mark.parametrize("pattern", ["quantized", "quantized::*relu*", "q*relu", "linear_relu"])
def test_nothing_is_left_out_where_a_namespace_is_named_or_aten_has_none(pattern: str) -> None:
    everything = {kernel["signature"] for kernel in json.loads(call("kernels", "cpu", pattern, "--json"))["kernels"]}
    assert any(signature.startswith("quantized::") for signature in everything)
    output = call("kernels", "cpu", pattern)
    assert {row[0] for row in rows(output)} == everything
    assert "left out" not in output


def test_a_device_that_is_not_there_is_an_error() -> None:
    assert "no installed plugin brings the device type 'fak'" in fail("kernels", "fak")
    assert "there is no device 'fake:7'" in fail("kernels", "fake:7")


# -- what a program lacks

MODEL = """
import torch
import helper

class Model(torch.nn.Module):
    def forward(self, x, y):
        x = torch.sin(x) + torch.sin(y) + torch.cos(x)
        return torch.relu(x - x.double())

model = Model()
inputs = (torch.ones(2, 3), torch.ones(3))

def as_keywords():
    return model, {"y": torch.ones(3), "x": torch.ones(2, 3)}

def alone():
    return torch.nn.ReLU(), torch.ones(2)

def trained():
    layer = torch.nn.Linear(3, 2)
    return (lambda x: {"loss": torch.tanh(layer(x)), "n": 3}), [torch.ones(4, 3)]

def without_gradient():
    return torch.relu, torch.ones(2)

def data_dependent():
    return (lambda x: torch.sin(x.view(-1))[x.view(-1) > 0] + 1), torch.ones(2, 2)

def broken():
    return torch.relu
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "helper.py").write_text("")
    (folder / "model.py").write_text(MODEL)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield str(folder / "model.py")


def missing(*args: str) -> Any:
    return json.loads(call("kernels", "fake", "--missing", *args, "--json"))


def counts(told: Any) -> dict[str, int]:
    return {entry["signature"]: entry["count"] for entry in told["missing"]}


def test_what_is_missing_is_listed_by_how_often_it_is_needed(program: str) -> None:
    told = missing(program)
    assert list(counts(told).items()) == [
        ("aten::sin", 2),
        ("aten::_to_copy", 1),
        ("aten::cos", 1),
        ("aten::sub.Tensor", 1),
    ]
    assert (told["device"], told["calls"], told["signatures"]) == ("fake:0", 8, 6)
    sin, _, _, sub = told["missing"]
    assert (sin["example"], sin["reasons"]) == ("f32[2, 3]", [])
    assert sub["example"] == "f32[2, 3], f64[2, 3]"
    assert sub["reasons"] == ["'sub' takes float32, not float64"]


def test_a_function_gives_model_and_inputs(program: str) -> None:
    assert missing(f"{program}:as_keywords") == missing(program)


def test_the_table_says_why(program: str) -> None:
    output = call("kernels", "fake", "--missing", program)
    assert output.splitlines()[0].split() == ["count", "signature", "such", "as", "why"]
    assert rows(output)[0] == ["2", "aten::sin", "f32[2,", "3]", "no", "kernel", "for", "it"]
    assert rows(output)[3][-5:] == ["'sub'", "takes", "float32,", "not", "float64"]
    assert "fake:0 lacks a kernel for 5 of the program's 8 calls, for 4 of its 6 signatures" in output
    assert [row[1] for row in rows(call("kernels", "fake", "cos", "--missing", program))] == ["aten::cos"]


def test_nothing_is_missing(program: str) -> None:
    output = call("kernels", "fake", "--missing", f"{program}:alone")
    assert output == "fake:0 has a kernel for the program's only call\n"
    assert missing(f"{program}:alone")["missing"] == []
    assert missing(f"{program}:without_gradient")["calls"] == 1


def test_the_backward_pass_counts_when_asked_for(program: str) -> None:
    inference = missing(f"{program}:trained")
    training = json.loads(call("kernels", "fake", "--missing", f"{program}:trained", "--train", "--json"))
    assert set(counts(inference)) == {"aten::tanh"}
    assert {"aten::tanh", "aten::sum.dim_IntList"} <= set(counts(training))
    assert training["calls"] > inference["calls"]


def test_a_program_that_has_no_plan_is_listed_too(program: str) -> None:
    told = missing(f"{program}:data_dependent")
    assert counts(told) == {"aten::gt.Scalar": 1, "aten::index.Tensor": 1, "aten::sin": 1}
    assert [entry["example"] for entry in told["missing"]] == ["", "", ""]


def test_the_cpu_lacks_nothing(program: str) -> None:
    assert "cpu has a kernel for each of the program's 8 calls" in call("kernels", "cpu", "--missing", program)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.py", "there is no file 'absent.py'"),
        ("model.txt", "'model.txt' is no Python file"),
        ("{program}:modle", "does not define 'modle'\n  hint: did you mean 'model'?"),
        ("{program}:zzzz", "does not define 'zzzz'\n  hint: define `model` and `inputs`, or name a function"),
        ("{program}:broken", "broken() of '{program}' returned a builtin_function_or_method, expected (model, inputs)"),
        ("empty.py", "'empty.py' does not define 'model'"),
    ],
)
def test_mistakes_are_told(program: str, name: str, told: str) -> None:
    Path("model.txt").write_text("")
    Path("empty.py").write_text("")
    assert told.format(program=program) in fail("kernels", "fake", "--missing", name.format(program=program))


def test_training_without_a_gradient_is_an_error(program: str) -> None:
    assert "has a gradient" in fail("kernels", "fake", "--missing", f"{program}:without_gradient", "--train")


def test_train_goes_with_missing() -> None:
    assert "add --missing MODEL.py" in fail("kernels", "fake", "--train")


def test_the_device_is_closed_when_something_fails(runtime: Runtime) -> None:
    fail("kernels", "fake", "--missing", "absent.py")
    assert runtime.closed == 1


def test_an_error_of_the_program_is_its_own() -> None:
    Path("fails.py").write_text("raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["kernels", "fake", "--missing", "fails.py"], catch_exceptions=False)
