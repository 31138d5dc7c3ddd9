"""Steps behind products and convolutions that other weights cannot do: results are eager PyTorch's all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kagent_core.testing.compare import assert_same

Step = Callable[[Tensor, Tensor], Tensor]

STEPS: dict[str, Step] = {
    "product": lambda made, by: made * by,
    "quotient": lambda made, by: made / by,
    "sum": lambda made, by: by + made,
    "difference": lambda made, by: made - by,
}


class Stepping(nn.Module):
    """A product or a convolution, and a step with a parameter behind it."""

    def __init__(self, linear: nn.Module, step: Step, by: Tensor) -> None:
        super().__init__()
        self.linear, self.step = linear, step
        self.by = nn.Parameter(by)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.linear(x), self.by)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    run: Callable[[Tensor], Tensor] = torch.compile(model.eval(), backend="kagent", options={"device": "cpu"})
    return run


def image() -> Tensor:
    return torch.randn(2, 4, 6, 5)


@torch.no_grad()
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("of", ["convolution", "product"])
def test_a_float64_parameter_makes_float64_of_float32(of: str, step: str) -> None:
    shape = (8, 1, 1) if of == "convolution" else (8,)
    linear = nn.Conv2d(4, 8, 3) if of == "convolution" else nn.Linear(5, 8)
    model = Stepping(linear, STEPS[step], torch.randn(shape, dtype=torch.float64))
    x = image()
    got, want = compiled(model)(x), model(x)
    assert got.dtype is want.dtype is torch.float64
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("number", [0.0, -0.0, math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize("step", STEPS)
def test_numbers_that_make_infinities(step: str, number: float) -> None:
    model = Stepping(nn.Conv2d(4, 8, 3), lambda made, _: STEPS[step](made, number), torch.zeros(1))  # type: ignore[arg-type]
    x = image()
    assert_same(compiled(model)(x), model(x), f"{step} with {number}")


@torch.no_grad()
@pytest.mark.parametrize("number", [0.0, math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("step", STEPS)
def test_parameters_that_make_infinities_and_then_do_not(step: str, number: float) -> None:
    model = Stepping(nn.Conv2d(4, 8, 3), STEPS[step], torch.randn(8, 1, 1))
    model.get_parameter("linear.weight").mul_(10)
    run, x = compiled(model), image() / 100
    for by in (2.0, number, -3.0):
        model.by[3] = by
        for _ in range(2):
            assert_same(run(x), model(x), f"{step} with {by}")


@torch.no_grad()
@pytest.mark.parametrize(
    ("mean", "variance", "weight"), [(0.5, 0, 1), (-9, 0, -2), (9, 0, 0), (1, -1, 1), (0, 1e-44, 3)]
)
def test_batch_normalizations_of_channels_that_never_varied(mean: float, variance: float, weight: float) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8, eps=0)).eval()
    norm: Any = model[1]
    norm.running_mean[2], norm.running_var[2], norm.weight[2] = mean, variance, weight
    x = image()
    assert_same(compiled(model)(x), model(x), "batch normalization")
