"""Dumps of extractions: what is in them, and that the published schema describes them exactly."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import kagent_core
from kagent_core import hookimpl
from kagent_core.errors import PackingError
from kagent_core.extract.agent import STAGES
from kagent_core.extract.context import ExtractionContext, ExtractionRequest
from kagent_core.inspect.dump import SCHEMA_FILE, SCHEMA_VERSION, context_as_dict, dump_extraction_context

VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


class Keep:
    """Keeps every context that was extracted."""

    def __init__(self) -> None:
        self.contexts: list[ExtractionContext] = []

    @hookimpl(wrapper=True)
    def kagent_assemble(self, ctx: ExtractionContext) -> Iterator[None]:
        tasks = yield
        self.contexts.append(ctx)
        return tasks


def dumps_of(program: Callable[[], object], tmp_path: Path) -> list[dict[str, Any]]:
    """Run a program and return the dump of each of its extractions, as it reads back from its file."""
    keep = Keep()
    with kagent_core.use_plugin(keep):
        program()
    assert keep.contexts
    return [
        _no_constants(dump_extraction_context(ctx, tmp_path / f"{number}.json"))
        for number, ctx in enumerate(keep.contexts)
    ]


def _no_constants(path: Path) -> dict[str, Any]:
    """Read strict JSON: ``NaN`` and ``Infinity``, which Python would take, are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    return document


def run_op(signature: str, *args: Any, **kwargs: Any) -> Callable[[], object]:
    return lambda: kagent_core.run_op(signature, *args, device="cpu", **kwargs)


def run_compiled(function: Callable[..., Any], *args: Any) -> Callable[[], object]:
    def program() -> object:
        torch._dynamo.reset()
        return kagent_core.compile(function, device="cpu")(*args)

    return program


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def train() -> None:
    torch._dynamo.reset()
    kagent_core.compile(model(), device="cpu")(torch.randn(3, 8)).sum().backward()


def view_and_write(x: torch.Tensor) -> torch.Tensor:
    x.t()[0].mul_(2)
    return x[1:, :2] + 1


PROGRAMS: dict[str, Callable[[], object]] = {
    "one operator": run_op("aten::add.Tensor", torch.ones(2, 3), torch.ones(3), alpha=2),
    "a number and infinities": run_op("aten::clamp", torch.ones(3), -math.inf, 1.5),
    "not a number": run_op("aten::nan_to_num", torch.ones(3), math.nan, None, -math.inf),
    "lists and None": run_op("aten::index.Tensor", torch.ones(4, 3), [None, torch.tensor([1, 2])]),
    "a list of tensors": run_op("aten::cat", [torch.ones(2), torch.ones(3)], 0),
    "several results": run_op("aten::topk", torch.arange(6.0), 2),
    "a dtype": run_op("aten::_to_copy", torch.ones(3), dtype=torch.float16),
    "a complex number": run_op("aten::add.Scalar", torch.ones(3, dtype=torch.complex64), 1 + 2j),
    "a lazily conjugated tensor": run_op("aten::add.Tensor", torch.ones(3, dtype=torch.complex64).conj(), 1.0),
    "a string": run_op("aten::div.Tensor_mode", torch.ones(3), torch.ones(3), rounding_mode="floor"),
    "no dimensions": run_op("aten::neg", torch.tensor(2.0)),
    "no elements": run_op("aten::neg", torch.ones(0, 3)),
    "written in place": run_op("aten::mul_.Tensor", torch.ones(4), torch.ones(4)),
    "random numbers": run_op("aten::bernoulli.p", torch.ones(4), 0.5),
    "a model": run_compiled(model(), torch.randn(3, 8)),
    "a model that trains": train,
    "a view and a write": run_compiled(view_and_write, torch.ones(3, 4)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_dumps_fit_the_schema(name: str, tmp_path: Path) -> None:
    for document in dumps_of(PROGRAMS[name], tmp_path):
        VALIDATOR.validate(document)


@pytest.mark.parametrize("name", PROGRAMS)
def test_dumps_are_consistent_in_themselves(name: str, tmp_path: Path) -> None:
    for document in dumps_of(PROGRAMS[name], tmp_path):
        ops = [op["id"] for op in document["ops"]]
        assert [buffer["id"] for buffer in document["buffers"]] == list(range(len(document["buffers"])))
        assert sorted(number for group in document["groups"] for number in group) == sorted(ops)
        for per_group in ("kernels", "packed_args", "launch_configs", "tasks"):
            assert len(document[per_group]) == len(document["groups"])
        assert [task["calls"] for task in document["tasks"]] == document["groups"]
        assert [task["kernel"] for task in document["tasks"]] == [kernel["name"] for kernel in document["kernels"]]
        for position, task in enumerate(document["tasks"]):
            earlier = {other["id"] for other in document["tasks"][:position]}
            assert set(task["depends_on"]) <= earlier
        for decision in document["fusion_decisions"]:
            assert {decision["producer"], decision["consumer"]} <= set(ops)


def test_the_schema_is_itself_valid_and_has_the_version() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    assert VALIDATOR.schema["properties"]["schema_version"] == {
        "description": "Version of this schema.",
        "const": SCHEMA_VERSION,
    }


def test_the_schema_describes_every_field() -> None:
    def check(schema: object, place: str) -> None:
        if isinstance(schema, dict):
            for name, field in schema.get("properties", {}).items() if place != "properties" else ():
                told = field.get("description") or VALIDATOR.schema["$defs"].get(
                    field.get("$ref", "").rpartition("/")[2], {}
                ).get("description")
                assert told, f"{name} has no description"
            if schema.get("type") == "object":
                assert "additionalProperties" in schema, place
            for name, part in schema.items():
                check(part, name)
        elif isinstance(schema, list):
            for part in schema:
                check(part, place)

    check(VALIDATOR.schema, "")


def test_a_dump_says_what_was_computed(tmp_path: Path) -> None:
    x, y = torch.ones(2, 3), torch.ones(3)
    [document] = dumps_of(run_op("aten::add.Tensor", x, y, alpha=2), tmp_path)
    [op] = document["ops"]
    assert op["signature"] == "aten::add.Tensor"
    assert op["arguments"]["alpha"] == 2
    assert op["arguments"]["self"]["tensor"]["text"] == "f32[2, 3]"
    assert [tensor["shape"] for tensor in op["inputs"]] == [[2, 3], [3]]
    assert [tensor["strides"] for tensor in op["results"]] == [[3, 1]]
    [task] = document["tasks"]
    assert task["reads"] == [{"buffer": 0, "offset": 0, "nbytes": 24}, {"buffer": 1, "offset": 0, "nbytes": 12}]
    assert task["writes"] == [{"buffer": 2, "offset": 0, "nbytes": 24}]
    assert [buffer["kind"] for buffer in document["buffers"]] == ["input", "input", "output"]
    assert [stage["stage"] for stage in document["stages"]] == [hook.removeprefix("kagent_") for hook, _ in STAGES]


def test_values_without_a_json_word_are_told_as_python_writes_them(tmp_path: Path) -> None:
    [clamp] = dumps_of(PROGRAMS["a number and infinities"], tmp_path)
    assert clamp["ops"][0]["arguments"]["min"] == {"repr": "-inf"}
    assert clamp["ops"][0]["arguments"]["max"] == 1.5
    [nan] = dumps_of(PROGRAMS["not a number"], tmp_path)
    assert nan["ops"][0]["arguments"]["nan"] == {"repr": "nan"}
    [cast] = dumps_of(PROGRAMS["a dtype"], tmp_path)
    assert cast["ops"][0]["arguments"]["dtype"] == {"repr": "torch.float16"}
    [index] = dumps_of(PROGRAMS["lists and None"], tmp_path)
    assert index["ops"][0]["arguments"]["indices"][0] is None


def test_hazards_are_in_the_dump(tmp_path: Path) -> None:
    [document] = dumps_of(PROGRAMS["a view and a write"], tmp_path)
    writer = next(task for task in document["tasks"] if {r["buffer"] for r in task["writes"]} & {0})
    assert writer["depends_on"] or writer["id"] == 0
    dependent = [task["depends_on"] for task in document["tasks"] if task["depends_on"]]
    assert dependent, "an input is written and read, so some task waits for another"


def test_the_source_line_is_the_users(tmp_path: Path) -> None:
    [document] = dumps_of(PROGRAMS["a view and a write"], tmp_path)
    lines = [op["source"] for op in document["ops"]]
    assert any(line and "test_dump.py" in line and "+ 1" in line for line in lines)


def test_config_dumps_every_extraction_into_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "dumps"
    torch._dynamo.reset()
    compiled = kagent_core.compile(model(), device="cpu", dump=str(folder))
    compiled(torch.randn(3, 8)).sum().backward()
    compiled(torch.randn(3, 8))  # replayed: nothing is extracted
    files = sorted(folder.iterdir())
    assert len(files) == 2
    documents = [_no_constants(path) for path in files]
    for document in documents:
        VALIDATOR.validate(document)
    forward, backward = (document["program"] for document in documents)
    assert forward.endswith("_forward")
    assert backward.endswith("_backward")


def test_the_environment_variable_dumps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_DUMP", str(tmp_path / "dumps"))
    kagent_core.run_op("aten::neg", torch.ones(3), device="cpu")
    [path] = (tmp_path / "dumps").iterdir()
    assert path.name.endswith("aten_neg-cpu.json")
    VALIDATOR.validate(_no_constants(path))


def test_a_context_before_its_stages_can_be_dumped(tmp_path: Path) -> None:
    keep = Keep()
    with kagent_core.use_plugin(keep):
        kagent_core.run_op("aten::neg", torch.ones(3), device="cpu")
    [done] = keep.contexts
    request = ExtractionRequest(done.request.calls, done.request.device, done.request.buffers)
    document = context_as_dict(ExtractionContext(request, done.opened, done.config))
    VALIDATOR.validate(document)
    assert document["tasks"] == document["stages"] == []


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "another version": lambda d: d.update(schema_version=2),
    "an unknown field": lambda d: d.update(extra=1),
    "an unknown field of an op": lambda d: d["ops"][0].update(extra=1),
    "a missing field": lambda d: d.pop("stages"),
    "a missing field of a tensor": lambda d: d["ops"][0]["inputs"][0].pop("conj"),
    "a looser signature": lambda d: d["ops"][0].update(signature="add"),
    "a device without a type": lambda d: d["device"].update(device="0"),
    "an unknown kind of buffer": lambda d: d["buffers"][0].update(kind="scratch"),
    "a negative size": lambda d: d["ops"][0]["inputs"][0].update(shape=[-1]),
    "a value that is an unknown object": lambda d: d["ops"][0]["arguments"].update(alpha={"value": 1}),
    "an unknown access": lambda d: d["packed_args"][0][0].update(access="read"),
    "an empty group": lambda d: d.update(groups=[[]]),
    "a grid of two extents": lambda d: d["launch_configs"][0].update(grid=[1, 1]),
    "an unknown stage": lambda d: d["stages"][0].update(stage="guess"),
    "a range before its buffer": lambda d: d["tasks"][0]["reads"][0].update(offset=-4),
    "a dependency twice": lambda d: d["tasks"][0].update(depends_on=[0, 0]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_document_does_not_fit(mistake: str, tmp_path: Path) -> None:
    [document] = dumps_of(PROGRAMS["one operator"], tmp_path)
    VALIDATOR.validate(document)
    wrong = copy.deepcopy(document)
    WRONG[mistake](wrong)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(wrong)


def test_a_failed_extraction_leaves_its_dump(tmp_path):
    class Refuse:
        @kagent_core.hookimpl
        def kagent_pack_arguments(self, ctx):
            raise PackingError("no such luck")

    with kagent_core.use_plugin(Refuse()):
        compiled = kagent_core.compile(lambda x: x + 1, device="cpu", dump=str(tmp_path))
        with pytest.raises(PackingError, match="no such luck"):
            compiled(torch.ones(2))
    [path] = tmp_path.glob("*.json")
    dumped = json.loads(path.read_text())
    VALIDATOR.validate(dumped)
    assert [stage["stage"] for stage in dumped["stages"]] == ["validate", "analyze_fusion", "lookup_kernels"]
    assert dumped["tasks"] == []
