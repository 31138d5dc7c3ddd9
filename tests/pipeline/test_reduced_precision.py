"""Models in bfloat16 round as eager PyTorch; products of float32 models are computed in bfloat16 by request only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kagent_core
import kagent_cpu.reduced_precision
from kagent_core import hookimpl, load_config
from kagent_core.errors import ConfigError
from kagent_core.session import session_for
from kagent_core.testing import FakeDevice

CPU = {"device": "cpu"}
REQUESTED = {**CPU, "float32_products": "bfloat16"}
PRODUCTS = {"kagent::panel_product", "mkldnn::_linear_pointwise", "mkldnn::_convolution_pointwise"}

needs_units = pytest.mark.skipif(
    kagent_cpu.reduced_precision.why_not_in("bfloat16") is not None, reason="the processor has no bfloat16 units"
)


class Calls:
    """Notes the calls that are run: signature and dtype of the result."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []

    @hookimpl
    def kagent_task_finished(self, event: Any) -> None:
        self.made += [(call.signature, call.outputs[0].dtype.name) for call in event.task.calls if call.outputs]

    def product_dtypes(self) -> list[str]:
        return [dtype for signature, dtype in self.made if signature.partition(".")[0] in PRODUCTS]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def calls() -> Iterator[Calls]:
    noted = Calls()
    with kagent_core.use_plugin(noted):
        yield noted


def compiled(model: Callable[..., torch.Tensor], options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="kagent", options=options)


def linear(*behind: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40), *behind).eval()


def convolution(*behind: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(5, 8, 1), *behind).eval()


INPUTS: dict[Callable[..., nn.Module], Callable[[], torch.Tensor]] = {
    linear: lambda: torch.linspace(-3, 3, 33 * 48).sin().view(33, 48),
    convolution: lambda: torch.linspace(-3, 3, 2 * 5 * 9 * 7).sin().view(2, 5, 9, 7),
}


@pytest.mark.parametrize("activation", [nn.Identity, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.ReLU])
@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_each_operator_rounds_as_in_eager(make: Any, activation: type[nn.Module], how: str, calls: Calls) -> None:
    model, x = make(activation()), INPUTS[make]()
    if how == "parameters":
        model, x = model.bfloat16(), x.bfloat16()

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            return model(x)

    with torch.no_grad():
        came, expected = compiled(run, CPU)(x), run(x)
    assert came.dtype is expected.dtype
    assert came.stride() == expected.stride()
    # math functions may differ in their last float32 digit; a rounding that is left out changes every tenth element
    assert (came != expected).sum() <= came.numel() // 500
    torch.testing.assert_close(came, expected)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert calls.product_dtypes() == ["bfloat16"]


@pytest.mark.parametrize("rows", [1, 7])
def test_products_of_any_number_of_rows_are_packed(rows: int, calls: Calls) -> None:
    model, x = linear().bfloat16(), torch.linspace(-1, 1, rows * 48, dtype=torch.bfloat16).view(rows, 48)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, CPU)(x), model(x))
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert calls.product_dtypes() == ["bfloat16"]


def test_nan_and_infinities_come_through() -> None:
    model = linear(nn.SiLU()).bfloat16()
    x = torch.zeros(3, 48, dtype=torch.bfloat16)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, CPU)(x), model(x), equal_nan=True)


@needs_units
@pytest.mark.parametrize("make", INPUTS)
def test_float32_products_are_computed_in_bfloat16_by_request(
    make: Any, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kagent.capture")
    model, x = make(), INPUTS[make]()
    half = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        came = compiled(model, REQUESTED)(x)
        exact = model(x)
        assert came.dtype is torch.float32
        assert came.stride() == exact.stride()
        torch.testing.assert_close(came, half(x.bfloat16()).float(), rtol=0, atol=0)
    assert not torch.equal(came, exact)
    assert calls.product_dtypes() == ["bfloat16"]
    assert "1 products and convolutions of float32 tensors are computed in bfloat16" in caplog.text
    assert session_for(load_config(options=REQUESTED)).reports[-1].float32_products == "bfloat16"


def test_without_a_request_products_stay_in_float32(calls: Calls) -> None:
    model, x = linear(), INPUTS[linear]()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, CPU)(x), model(x))
    assert calls.product_dtypes() == ["float32"]


@needs_units
def test_what_is_between_products_stays_in_float32_and_products_share_what_is_rounded(calls: Calls) -> None:
    torch.manual_seed(0)
    first, second, third = nn.Linear(48, 40), nn.Linear(40, 40), nn.Linear(40, 40)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = functional.layer_norm(first(x), (40,))
        return second(x) * third(x) + x

    def rounded(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()

    with torch.no_grad():
        x = INPUTS[linear]()
        came = compiled(run, REQUESTED)(x)
        normed = functional.layer_norm(rounded(first, x), (40,))
        expected = rounded(second, normed) * rounded(third, normed) + normed
    # a last digit of the layer norm may round its neighbour's argument otherwise: one bfloat16 step of 40 terms
    torch.testing.assert_close(came, expected, rtol=1e-2, atol=1e-2)
    assert ((came - expected).abs() > 1e-5).float().mean() < 0.05
    assert calls.product_dtypes() == ["bfloat16"] * 3
    conversions = [signature for signature, dtype in calls.made if dtype == "bfloat16" and "copy" in signature]
    assert len(conversions) == 2  # of the first product's argument, and of what the other two share


@needs_units
def test_changed_weights_are_converted_again() -> None:
    model, x = linear(), INPUTS[linear]()
    run = compiled(model, REQUESTED)
    with torch.no_grad():
        before = run(x)
        model[0].weight.data.mul_(2)
        torch.testing.assert_close(run(x) - model[0].bias, 2 * (before - model[0].bias), rtol=0.05, atol=0.05)


@needs_units
def test_other_types_and_training_are_left_alone(calls: Calls) -> None:
    model, x = linear().double(), INPUTS[linear]().double()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, REQUESTED)(x), model(x))
    torch._dynamo.reset()
    model, x = linear(), INPUTS[linear]()
    torch.testing.assert_close(compiled(model, REQUESTED)(x), model(x))  # gradients are asked for
    assert calls.product_dtypes() == []


@needs_units
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fold_constants": False}, "fold_constants is off"),
        ({"parameters": "copied"}, "parameters = 'copied'"),
        ({"generated_kernels": "all"}, "nothing rewrites graphs for cpu"),
    ],
)
def test_a_request_that_cannot_be_met_is_an_error(options: dict[str, Any], why: str) -> None:
    with torch.no_grad(), pytest.raises(ConfigError, match=f"float32_products is 'bfloat16' on cpu.*{why}"):
        compiled(linear(), {**REQUESTED, **options})(INPUTS[linear]())


def test_a_processor_without_units_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kagent_cpu.reduced_precision, "has_bfloat16_units", lambda: False)
    with torch.no_grad(), pytest.raises(ConfigError, match=r"has no .*bfloat16") as raised:
        compiled(linear(), REQUESTED)(INPUTS[linear]())
    assert "leave float32_products at 'float32'" in str(raised.value)


def test_a_device_without_such_products_is_an_error() -> None:
    with kagent_core.use_plugin(FakeDevice()), torch.no_grad(), pytest.raises(ConfigError, match="fake:0, but"):
        compiled(linear(), {**REQUESTED, "device": "fake:0"})(INPUTS[linear]())


@torch.no_grad()
@pytest.mark.parametrize("behind", [False, True])
def test_groups_that_make_several_channels_of_one(behind: bool) -> None:
    """Of these, oneDNN reads memory that nobody wrote, with steps that are longer than a line."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    convolution = nn.Conv2d(5, 10, 5, (1, 3), (0, 2), (2, 1), groups=5)
    model = (nn.Sequential(nn.Conv2d(5, 5, 1), convolution) if behind else convolution).bfloat16().eval()
    run = torch.compile(model, backend="kagent", options={"device": "cpu"})
    x = torch.randn(1, 5, 17, 1).bfloat16()
    want = copy.deepcopy(model).float()(x.float())
    for _ in range(3):
        spoiled = [torch.full((n * 500,), 1e30) for n in range(1, 12)]
        del spoiled  # whose memory is used again
        got = run(x)
        torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)
