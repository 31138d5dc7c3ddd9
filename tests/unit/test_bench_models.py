"""``kagent bench models``: real models, each contender by itself and compared with eager, figures that agree."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from typer.testing import CliRunner

from kagent_core.bench.functions import FunctionFigures
from kagent_core.bench.models import contenders as known
from kagent_core.bench.models import measuring, run, starts, zoo
from kagent_core.bench.models.contenders import Contender, tensors_of
from kagent_core.bench.models.figures import ModelFigures, ModelsFigures
from kagent_core.bench.models.machine import Machine, measure_machine
from kagent_core.bench.models.measuring import Plan, difference_of, measure_model
from kagent_core.bench.models.networks import LastState, MobileNetV3Small, UNet
from kagent_core.bench.models.process_memory import forget_peak, peak_nbytes, resident_nbytes
from kagent_core.bench.models.starts import StartError, reason_in
from kagent_core.bench.models.tables import print_models
from kagent_core.bench.models.where import KernelFigures, ReportCost, Where
from kagent_core.bench.models.work import flops_of_calls, nbytes_of_task
from kagent_core.bench.models.worker import Start
from kagent_core.bench.models.zoo import MODELS, ZooModel, model_of_file
from kagent_core.bench.timing import Timing
from kagent_core.cli import app
from kagent_core.cli.output import make_console
from kagent_core.errors import KagentError
from kagent_core.optimize.convolution_blocks import block_convolution, block_transposed_convolution
from kagent_core.optimize.panels import panel_product
from kagent_core.specs import KernelDescriptor, KernelTask, MemRange
from kagent_core.specs.devices import Device

from .builders import call, tensor

TINY = ZooModel("tiny", "rows", 4, lambda batch: (nn.Sequential(nn.Linear(8, 8), nn.GELU()), (torch.randn(batch, 8),)))
SMALL = ZooModel(
    "small", "images", 1, lambda batch: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.randn(batch, 3, 8, 8),))
)
OURS = [known.BY_NAME[name] for name in ("eager", "kagent")]


def measure(*contenders: Contender, model: ZooModel = TINY, where: bool = False, directory: Path) -> ModelFigures:
    cost = ReportCost(0.0, 0.0) if where else None
    plan = Plan(contenders or OURS, 1, None, 2, starts=False, report_cost=cost)
    with torch.no_grad():
        return measure_model(model, model.name, plan, directory, lambda step: None)


def contender(name: str, prepare: Callable[..., Any], *modules: str) -> Contender:
    return Contender(name, name, lambda module, args, directory, threads: prepare(module, args), modules)


def figures_of(*models: ModelFigures, **values: Any) -> ModelsFigures:
    given = {
        "environment": {"processor": "P", "torch": "2", "python": "3"},
        "threads": 1,
        "rounds": 2,
        "contenders": list(known.BY_NAME),
        "versions": {},
        "models": models,
        "machine": None,
        "functions": (),
        "elapsed_s": 1.0,
    }
    return ModelsFigures(**{**given, **values})


def printed(figures: ModelsFigures) -> str:
    console = make_console()
    console.file, console.width = (text := io.StringIO()), 200
    print_models(console, figures)
    return text.getvalue()


# -- the models


def test_the_models_that_are_asked_for_are_there() -> None:
    assert [model.name for model in MODELS] == [
        "resnet18", "resnet26", "mobilenetv2", "mobilenetv3", "efficientnet", "convnext", "vit", "swin",
        "bert", "minilm", "gpt2", "llama", "layers", "unet", "lstm",
    ]  # fmt: skip


def test_networks_are_the_published_ones() -> None:
    assert sum(p.numel() for p in MobileNetV3Small().parameters()) == 2_542_856  # as torchvision counts them
    assert UNet()(torch.randn(1, 3, 16, 24)).shape == (1, 2, 16, 24)
    assert LastState(8)(torch.randn(2, 5, 8)).shape == (2, 10)


def test_the_recurrent_network_is_an_lstm_that_compilers_get_as_a_whole() -> None:
    network, x = LastState(8).eval(), torch.randn(2, 5, 8)
    lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True).eval()
    for mine, theirs in zip(network.weights, lstm.parameters(), strict=True):
        theirs.data = mine.data
    with torch.no_grad():
        assert torch.equal(network(x), network.head(lstm(x)[0][:, -1]))
    assert torch._dynamo.explain(network)(x).graph_break_count == 0


@pytest.mark.parametrize("name", ["mobilenetv3", "layers", "unet", "lstm", "llama"])
def test_a_model_is_the_same_in_every_process_and_has_the_batch_that_is_asked_for(name: str) -> None:
    model = zoo.BY_NAME[name]
    first, args = model.build(2)
    torch.manual_seed(7)
    second, same = model.build(2)
    assert not first.training
    assert args[0].shape[0] == 2
    assert torch.equal(args[0], same[0])
    with torch.no_grad():
        result = first(*args)
        assert torch.equal(result, second(*same))
    assert result.isfinite().all()
    assert result.shape[0] == 2


def test_batch_norms_have_statistics_that_show_when_they_are_lost() -> None:
    module, _ = zoo.BY_NAME["mobilenetv3"].build()
    means = [part.running_mean for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    assert all(mean is not None and bool((mean != 0).all()) for mean in means)


def test_building_a_model_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    TINY.build()
    assert torch.equal(torch.rand(1), expected)


PROGRAM = """
import torch

def pair():
    return torch.nn.Linear(4, 4).eval(), torch.ones(2, 4)

def named():
    return (lambda a, b: a - b), {"b": torch.ones(2), "a": torch.zeros(2)}

def function():
    return torch.sub, (torch.ones(2), torch.zeros(2))
"""


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM)
    model = model_of_file(f"{file}:pair")
    assert model.name == "pair"
    module, args = model.build()
    assert module(*args).shape == (2, 4)
    for name, expected in (("named", -1.0), ("function", 1.0)):
        module, args = model_of_file(f"{file}:{name}").build()
        assert module(*args).tolist() == [expected, expected]


# -- comparing


def test_everyone_is_compared_with_eager_and_timed(tmp_path: Path) -> None:
    figures = measure(directory=tmp_path)
    assert list(figures.per_call) == ["eager", "kagent"]
    assert figures.unavailable == {}
    assert figures.batch == 4
    assert figures.differences["kagent"][1] < 1e-5
    assert figures.speed("kagent") == figures.per_call["eager"].minimum / figures.per_call["kagent"].minimum


def test_who_computes_something_else_has_no_figure(tmp_path: Path) -> None:
    wrong = contender("wrong", lambda module, args: lambda: module(*args) + 1)
    figures = measure(*OURS, wrong, directory=tmp_path)
    assert "wrong" not in figures.per_call
    assert figures.unavailable["wrong"].startswith("it computes something else: it differs by 1")
    assert figures.differences["wrong"][0] == pytest.approx(1)


def test_who_fails_or_is_not_installed_has_a_reason(tmp_path: Path) -> None:
    def broken(module: Any, args: Any) -> Any:
        raise RuntimeError("no such operator\nand more")

    missing = contender("missing", lambda module, args: lambda: None, "no_such_module")
    figures = measure(*OURS, contender("broken", broken), missing, directory=tmp_path)
    assert figures.unavailable == {
        "broken": "RuntimeError: no such operator",
        "missing": "ModuleNotFoundError: No module named 'no_such_module'",
    }
    text = printed(figures_of(figures))
    assert "no figure for broken in any model: RuntimeError: no such operator" in text


def test_a_model_that_cannot_be_built_is_told_with_the_reason(tmp_path: Path) -> None:
    def make(batch: int) -> Any:
        raise KagentError("there is no model", hint="install it")

    figures = measure(model=replace(TINY, make=make), directory=tmp_path)
    assert figures.unavailable == {"kagent": "there is no model; install it"}
    assert figures.per_call == {}
    with pytest.raises(KagentError, match="kagent has no figure for tiny; for tiny: there is no model"):
        run._reject_failures([figures])


@pytest.mark.parametrize(
    ("result", "expected", "difference"),
    [
        (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), (0.5, 0.25)),
        (torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, 2.0]), (0.0, 0.0)),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), (0.0, 0.0)),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), (math.inf, math.inf)),
        (torch.tensor([0.0, 2.0]), torch.tensor([math.nan, 2.0]), (math.inf, math.inf)),
        (torch.tensor([math.nan, 2.0]), torch.tensor([1.0, 2.0]), (math.inf, math.inf)),
        (torch.tensor([], dtype=torch.float32), torch.tensor([], dtype=torch.float32), (0.0, 0.0)),
        (torch.tensor([3]), torch.tensor([1]), (2.0, 2.0)),
    ],
)
def test_the_difference_of_results(result: Tensor, expected: Tensor, difference: tuple[float, float]) -> None:
    assert difference_of([result], [expected]) == difference


def test_results_of_other_shapes_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"its results have shapes \[\(3,\)\], expected \[\(2,\)\]"):
        difference_of([torch.ones(3)], [torch.ones(2)])


def test_tensors_of_any_result() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    assert [t.shape for t in tensors_of({"a": one, "b": (two, None)})] == [(1,), (2,)]
    assert torch.equal(tensors_of([one.numpy()])[0], one)


# -- contenders


def test_compilers_do_not_share_code() -> None:
    module, args = TINY.build()
    codes = [known.own_call(module).__code__ for _ in range(3)]
    assert len({id(code) for code in codes}) == 3
    assert torch.equal(known.own_call(module)(*args), module(*args))


def test_freezing_freezes_and_the_default_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, Any, Any]] = []

    def compile_call(module: Any, args: Any, **arguments: Any) -> Any:
        settings = torch._inductor.config
        seen.append((settings.freezing, arguments.get("options"), os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        return lambda: None

    monkeypatch.setattr(known, "_compiled", compile_call)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    for name in ("inductor", "freezing"):
        known.BY_NAME[name].prepare(nn.Identity(), (), tmp_path / name, 1)
    assert seen == [(False, None, str(tmp_path / "inductor")), (True, {"freezing": True}, str(tmp_path / "freezing"))]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "before"


def test_an_engine_that_was_exported_before_is_only_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def __init__(self, path: str, options: Any, providers: list[str]) -> None:
            self.path = path
            assert options.intra_op_num_threads == 3

        def get_inputs(self) -> list[Any]:
            given = ModuleType("input")
            given.name = "x"  # type: ignore[attr-defined]
            return [given]

        def run(self, names: None, feeds: dict[str, Any]) -> list[Any]:
            return [feeds["x"] + 1]

    module: Any = ModuleType("onnxruntime")
    module.SessionOptions = type("SessionOptions", (), {})
    module.GraphOptimizationLevel = type("Level", (), {"ORT_ENABLE_ALL": 99})
    module.InferenceSession = Session
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    (tmp_path / "model.onnx").write_text("exported")
    called = known.BY_NAME["onnxruntime"].prepare(nn.Identity(), (torch.ones(2),), tmp_path, 3)
    assert torch.equal(tensors_of(called())[0], torch.full((2,), 2.0))


def test_an_engine_takes_tensors_only(tmp_path: Path) -> None:
    from kagent_core.bench.models.engines import _arrays

    with pytest.raises(TypeError, match="an argument is a int"):
        _arrays((torch.ones(2), 3))


# -- starts


def test_a_start_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM)
    (tmp_path / "cache").mkdir()
    first, second = starts.measure_starts(f"{file}:pair", "kagent", None, 1, tmp_path / "cache")
    assert second is not None
    assert first.compile_s > 0
    assert any((tmp_path / "cache").iterdir())  # what the second one found
    if sys.platform == "linux":
        assert first.calling_nbytes is not None
        assert first.starting_nbytes is not None
        assert first.starting_nbytes > 0


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"KagentError: there is no file '.*none\.py'"):
        starts.measure_starts(f"{tmp_path}/none.py:model", "eager", None, 1, tmp_path)


def test_who_does_not_start_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(model: str, name: str, *rest: Any) -> Any:
        if name == "peer":
            raise StartError("it cannot")
        return Start(0.1, 1.5, 10, 20), None

    monkeypatch.setattr(measuring, "measure_starts", start)
    plan = Plan([*OURS, contender("peer", lambda module, args: lambda: 1 / 0)], 1, None, 2, True, None)
    told: list[str] = []
    with torch.no_grad():
        figures = measure_model(TINY, "tiny", plan, tmp_path, told.append)
    assert figures.unavailable == {"peer": "it cannot"}
    assert figures.compile_s("kagent") == 1.5
    assert len(told) == plan.steps


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")
def test_the_peak_is_that_since_it_was_forgotten() -> None:
    nbytes = 2**27
    before = resident_nbytes()
    forget_peak()
    block = torch.ones(nbytes // 4)
    del block
    peak = peak_nbytes()
    forget_peak()
    later = peak_nbytes()
    assert before is not None
    assert peak is not None
    assert later is not None
    assert peak - before > nbytes * 3 // 4
    assert later - before < nbytes // 4


def test_the_reason_is_the_last_exception() -> None:
    chained = (
        "Traceback (most recent call last):\n  File\nKeyError: 1\n\nTraceback (most recent call last):\n  File\nE: 2\n"
    )
    assert reason_in(chained) == "E: 2"
    assert reason_in("killed\n") == "killed"
    assert reason_in("") == ""


# -- where the time goes


def test_kernels_and_what_is_outside_of_them(tmp_path: Path) -> None:
    figures = measure(where=True, directory=tmp_path)
    assert figures.where is not None
    kernels = figures.where.kernels
    assert sum(kernel.flops or 0 for kernel in kernels) == 2 * 4 * 8 * 8
    assert [kernel.time_ms for kernel in kernels] == sorted((k.time_ms for k in kernels), reverse=True)
    assert figures.where.outside == 1 - figures.where.kernels_ms / figures.where.call_ms
    assert 0 < figures.where.dynamo_ms < figures.where.call_ms
    machine = Machine(100.0, [(1024, 50.0)])
    text = printed(figures_of(figures, machine=machine))
    assert "where tiny's time goes" in text
    assert figures.as_dict(machine)["where"]["kernels"][0]["count"] == 1


def test_speeds_are_compared_with_the_machines() -> None:
    machine = Machine(200.0, [(1000, 100.0), (4000, 40.0)])
    product = KernelFigures("mm", "", 2, 0.5, 50_000_000, 3000)
    assert product.gflops == pytest.approx(100)
    assert product.share(machine) == pytest.approx(0.5)
    pointwise = KernelFigures("relu", "", 2, 0.001, None, 4000)  # two of 2000 bytes: the second copy moves as much
    assert pointwise.gbytes_per_s == pytest.approx(4)
    assert pointwise.share(machine) == pytest.approx(0.1)
    assert machine.bandwidth(10**6) == 40.0
    assert KernelFigures("nothing", "", 1, 0.0, None, 8).share(machine) is None


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kagent_core.bench.models.machine._SECONDS", 0.01)
    machine = measure_machine()
    assert machine.gflops > 0
    assert all(speed > 0 for _, speed in machine.copies)


def test_the_work_of_calls() -> None:
    linear = call(0, "mkldnn::_linear_pointwise", {"X": tensor(0, 3, 4), "W": tensor(1, 5, 4)}, [tensor(2, 3, 5)])
    assert flops_of_calls([linear]) == 2 * 3 * 4 * 5
    arguments = {"self": tensor(0, 3, 4), "panels": tensor(1, 1, 4, 16), "columns": 5}
    assert flops_of_calls([call(0, f"kagent::{panel_product.__name__}", arguments, [tensor(2, 3, 5)])]) == 2 * 3 * 4 * 5
    arguments = {"X": tensor(0, 1, 6, 8, 8), "other": tensor(1, 4, 3, 3, 3)}
    convolution = call(0, "mkldnn::_convolution_pointwise", arguments, [tensor(2, 1, 4, 6, 6)])
    assert flops_of_calls([convolution]) == 2 * (4 * 6 * 6) * 27
    arguments = {"input": tensor(0, 1, 6, 8, 8), "weight": tensor(1, 6, 4, 2, 2), "transposed": True}
    transposed = call(0, "aten::convolution", arguments, [tensor(2, 1, 4, 16, 16)])
    assert flops_of_calls([transposed]) == 2 * (6 * 8 * 8) * (4 * 2 * 2)
    arguments = {"source": tensor(0, 1, 3, 8, 8), "weight": tensor(1, 2, 3, 5, 3, 16), "channels": 20}
    blocks = call(0, f"kagent::{block_convolution.__name__}", arguments, [tensor(2, 1, 20, 6, 4)])
    assert flops_of_calls([blocks]) == 2 * (20 * 6 * 4) * (3 * 5 * 3)
    arguments = {"source": tensor(0, 1, 3, 8, 8), "weight": tensor(1, 2, 2, 2, 3, 16), "channels": 20}
    taps = call(0, f"kagent::{block_transposed_convolution.__name__}", arguments, [tensor(2, 1, 20, 16, 16)])
    assert flops_of_calls([taps]) == 2 * (20 * 16 * 16) * 3
    relu = call(0, "aten::relu", {"self": tensor(0, 3)}, [tensor(1, 3)])
    assert flops_of_calls([relu]) is None
    assert flops_of_calls([linear, relu, linear]) == 4 * 3 * 4 * 5


def test_bytes_that_ranges_share_count_once() -> None:
    reads = (MemRange(0, 0, 100), MemRange(0, 50, 100), MemRange(0, 60, 10), MemRange(1, 0, 8))
    task = KernelTask(
        0, KernelDescriptor("aten::x", "x"), (), reads, (MemRange(2, 4, 6),), None, Device("cpu", 0), 0, (), ()
    )
    assert nbytes_of_task(task) == 150 + 8 + 6


def test_kernels_are_printed_with_what_they_get() -> None:
    problem = "aten::convolution(f32[1,2]:c, f32[3,4]) -> f32[5]:c"
    kernels = [KernelFigures(name, problem, 1, 1.0, 10**9, 8) for name in ("aten::convolution", "generated_1")]
    one = model_figures("one", 2.0, where=Where(3.0, 2.0, kernels, 0.3))
    text = printed(figures_of(one, machine=Machine(2000.0, [(1, 1.0)])))
    assert "\n  (f32[1,2], f32[3,4]) -> f32[5] " in text
    assert "\n  aten::convolution(f32[1,2], f32[3,4]) -> f32[5] " in text
    row = next(line.split() for line in text.splitlines() if line.startswith("generated_1"))
    assert row == ["generated_1", "1", "1.000", "50.0", "1000", "0.0", "50.0"]
    told = " ".join(text.split())
    assert (
        "outside of kernels: 1.000 ms, 33.3% of a call; Dynamo's part of it, with any backend: 0.300 ms, 10.0%" in told
    )


# -- figures


def model_figures(name: str, kagent: float, **values: Any) -> ModelFigures:
    times = {"eager": 8.0, "inductor": 5.0, "freezing": 4.0, "onnxruntime": 2.0, "kagent": kagent}
    start = {"inductor": (Start(0, 10.0, 1, 2), Start(0, 3.0, 1, 5)), "kagent": (Start(0, 1.0, 1, 2), None)}
    return ModelFigures(name, "x", 1, {n: Timing(t, t) for n, t in times.items()}, start, **values)


def test_aims_follow_from_the_minima() -> None:
    one = model_figures("one", 2.0, where=Where(10.0, 9.6, ()))
    two = model_figures("two", 8.0, where=Where(10.0, 9.9, ()))
    function = FunctionFigures("f", {"default backend": Timing(2, 2), "kagent": Timing(3, 3)}, {}, {})
    figures = figures_of(one, two, machine=Machine(1, [(1, 1)]), functions=[function])
    aims = {aim.name: aim for aim in figures.aims()}
    every = aims["time / the better of torch.compile's modes"]
    assert (every.case, every.measured, every.met) == ("two", 2.0, False)
    assert aims["mean time / eager's: 1.4 times as fast"].measured == pytest.approx(0.5)
    assert aims["mean time / eager's: 1.65 times as fast"].met
    assert aims["mean time / onnxruntime's"].measured == pytest.approx(2.0)
    assert "mean time / openvino's" not in aims
    assert aims["compile time / inductor's"].measured == pytest.approx(0.1)
    assert aims["time outside kernels, %"].measured == pytest.approx(4.0)
    assert aims["time of one operator / inductor's"].measured == 1.5
    assert figures.speeds()["kagent"] == pytest.approx(2.0)
    assert figures.speeds()["openvino"] is None


def test_what_was_not_measured_is_no_aim() -> None:
    figures = figures_of(ModelFigures("one", "x", 1, {"eager": Timing(1, 1)}))
    assert figures.aims() == []
    assert "openvino (not installed) is an ahead-of-time engine" in printed(figures)


def test_memory_is_that_of_the_second_start() -> None:
    figures = model_figures("one", 2.0)
    assert figures.memory_nbytes("inductor") == 5
    assert figures.memory_nbytes("kagent") == 2
    assert figures.memory_nbytes("eager") is None
    assert figures.compile_s("inductor", again=True) == 3.0


# -- the command


def test_the_command_measures_and_writes_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BY_NAME", {"tiny": TINY, "small": SMALL})
    file = tmp_path / "figures.json"
    arguments = ["--rounds", "2", "--contenders", "kagent", "--no-starts", "--batch", "2", "--json", str(file)]
    done = CliRunner().invoke(app, ["bench", "models", *arguments])
    assert done.exit_code == 0, done.output
    figures = json.loads(file.read_text())
    assert [model["model"] for model in figures["models"]] == ["tiny", "small"]
    assert {model["batch"] for model in figures["models"]} == {2}
    assert all(set(model["speed_over_eager"]) == {"eager", "kagent"} for model in figures["models"])
    assert figures["geometric_means"]["speed_over_eager"]["kagent"] > 0
    assert (figures["threads"], figures["rounds"]) == (1, 2)


def test_the_command_takes_a_model_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM)
    written = tmp_path / "figures.json"
    arguments = ["--model", f"{file}:pair", "--rounds", "2", "--contenders", "kagent", "--no-starts"]
    done = CliRunner().invoke(app, ["bench", "models", *arguments, "--json", str(written)])
    assert done.exit_code == 0, done.output
    [model] = json.loads(written.read_text())["models"]
    assert (model["model"], model["batch"]) == ("pair", None)
    done = CliRunner().invoke(app, ["bench", "models", *arguments, "--batch", "3"])
    assert done.exit_code == 1
    assert "--batch 3 is no use with --model" in done.output


@pytest.mark.parametrize(
    ("option", "hint"), [(["--models", "resnet81"], "resnet18"), (["--contenders", "kagnet"], "kagent")]
)
def test_a_name_that_does_not_exist_is_an_error(option: list[str], hint: str) -> None:
    done = CliRunner().invoke(app, ["bench", "models", *option])
    assert done.exit_code == 1
    assert f"did you mean '{hint}'?" in done.output


def test_where_needs_kagent() -> None:
    with pytest.raises(KagentError, match="--contenders inductor leaves it out"):
        run.Asked(contenders="inductor", where=True).named_contenders()


def test_eager_always_runs() -> None:
    assert [one.name for one in run.Asked(contenders="kagent").named_contenders()] == ["eager", "kagent"]
