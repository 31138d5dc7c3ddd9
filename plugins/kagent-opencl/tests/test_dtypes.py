"""On a device without float64 no kernel has it inside; float32 stays there, and float64 goes elsewhere, told why."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import kagent_core
from kagent_core.config import Config, load_config
from kagent_core.errors import KagentError
from kagent_core.session import session_for
from kagent_core.specs import Device, DeviceInfo
from kagent_core.testing.compare import assert_as_exact
from kagent_core.testing.conformance import operators
from kagent_core.testing.conformance.architectures import ARCHITECTURES
from kagent_core.testing.conformance.case import Target
from kagent_core.testing.conformance.models import check_model, inference, training
from kagent_opencl.language import OpenClLanguage
from kagent_opencl.platforms import list_devices
from kagent_opencl.plugin import OpenClPlugin
from kagent_opencl.programs import Programs

aten = torch.ops.aten
NAME = "masked:0"
NIGHTLY = pytest.mark.nightly
REASON = f"{NAME} has no float64 (cl_khr_fp64)"
DOUBLE = re.compile(
    r"double|(?<![A-Za-z0-9])f64|fp64"
    r"|(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?(?![\w.])"  # a number without f is a double, too
)


class MaskedPlugin(OpenClPlugin):
    """The first OpenCL device, as if it had no float64."""

    device_type = "masked"

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        info = next(info for info in list_devices() if info.available)
        return [replace(info, device=Device("masked", info.device.index), lacks={"float64": REASON})]


@pytest.fixture
def sources(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every source that is compiled while the masked device is there; at the end, none may have had a double."""
    compiled: list[str] = []
    real = Programs.build

    def noted(self: Programs, source: str) -> Any:
        compiled.append(source)
        return real(self, source)

    monkeypatch.setattr(Programs, "build", noted)
    with kagent_core.use_plugin(MaskedPlugin()):
        yield compiled
    for source in compiled:
        found = DOUBLE.search(re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.DOTALL))
        assert found is None, f"{found[0]!r} in {source[found.start() - 100 : found.end() + 60]}"


def test_what_is_looked_for_is_found() -> None:
    for text in ("double x", "f64 x", "mad_f64x8(", "(f64)y", "x * 0.5 + y", "1e-5;", "cl_khr_fp64"):
        assert DOUBLE.search(text)
    for text in ("0.5f", "1e-5f", "x.s0", "x1.lo", "0x7f800000u", "1L", "abcf640", "v8", "3"):
        assert not DOUBLE.search(text)


def run(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, dict[str, str]]:
    """Return what a function gives on the masked device, and by signature why what did not run there did not."""
    session = session_for(load_config({"device": NAME, **options}))
    torch._dynamo.reset()
    session.reports.clear()
    compiled = torch.compile(function, backend="kagent", options={"device": NAME, **options}, dynamic=False)
    with torch.no_grad():
        made = compiled(*args)
    return made, {fall.signature: fall.reason for report in session.reports for fall in report.fallbacks}


def check_native(function: Callable[..., Any], *args: Any) -> None:
    """Compare with eager PyTorch; everything runs on the device."""
    made, fallbacks = run(function, *args)
    assert fallbacks == {}
    torch.testing.assert_close(made, function(*args), equal_nan=True)


# -- sums in no wider type


def error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float((made.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 1003), (3, 200_001), (7, 33, 65), (5000, 40)])
@pytest.mark.parametrize("mean", [0.5, 1000.0])
def test_sums_are_as_accurate_as_eagers(
    sources: list[str], shape: tuple[int, ...], dtype: torch.dtype, mean: float
) -> None:
    x = torch.randn(shape).add(mean).to(dtype)
    for dims in ([0], [-1], list(range(len(shape)))):
        function = functools.partial(aten.sum.dim_IntList, dim=dims)
        made, fallbacks = run(function, x)
        assert fallbacks == {}
        assert_as_exact(made, function(x), function(x.double()), 2, f"sums along {dims}")
    assert sources


@pytest.mark.parametrize("shape", [(20, 1003), (3, 20_001), (7, 33, 65), (5000, 40)])
def test_sums_that_nearly_vanish_are_as_accurate_as_eagers(sources: list[str], shape: tuple[int, ...]) -> None:
    # a single sum may be right by luck: what counts is the error over many
    for dims in ([0], [-1], list(range(len(shape)))):
        ours, eagers = [], []
        for _ in range(30):
            x = torch.randn(shape)
            exact = x.double().sum(dims)
            ours.append(error(kagent_core.run_op("aten::sum.dim_IntList", x, dims, device=NAME), exact))
            eagers.append(error(x.sum(dims), exact))
        assert torch.tensor(ours).square().mean().sqrt() <= 2 * torch.tensor(eagers).square().mean().sqrt()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_sums_of_what_is_not_finite(sources: list[str], value: float) -> None:
    x = torch.rand(30, 5000)
    x[3, 7], x[4, 4000:] = value, value
    check_native(lambda x: (x.sum(1), x.sum(0), x.cumsum(1)[:, -1], x.softmax(1)), x)


def test_running_sums(sources: list[str]) -> None:
    x = torch.randn(7, 3000) + 100
    check_native(lambda x: x.cumsum(1), x)
    check_native(lambda x: x.half().cumsum(0), x)
    check_native(lambda x: x.long().cumsum(0), x)


@pytest.mark.parametrize("shape", [(8, 3, 40, 40), (300, 1000)])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_means_and_variances(sources: list[str], shape: tuple[int, ...], mean: float) -> None:
    x = torch.randn(shape) + mean
    check_native(lambda x: tuple(torch.var_mean(x, -1)), x)
    check_native(lambda x: tuple(torch.var_mean(x, 0)), x)
    check_native(lambda x: x.std(), x)
    check_native(lambda x: nn.functional.layer_norm(x, x.shape[-1:]), x)


def test_batch_norm_in_training(sources: list[str]) -> None:
    x, mean, var = torch.randn(8, 5, 30, 30) * 3 + 2, torch.zeros(5), torch.ones(5)
    normed = functools.partial(aten._native_batch_norm_legit_functional, training=True, momentum=0.1, eps=1e-5)
    check_native(lambda x, m, v: tuple(normed(x, None, None, m, v)), x, mean, var)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_are_as_accurate_as_eagers(sources: list[str], dtype: torch.dtype) -> None:
    for m, n, depth in ((5, 7, 3), (33, 65, 2000)):
        x, y = torch.randn(m, depth).to(dtype), torch.randn(depth, n).to(dtype)
        made, fallbacks = run(torch.mm, x, y)
        assert fallbacks == {}
        exact = x.double() @ y.double()
        assert error(made, exact) <= (2 if dtype == torch.float32 else 3) * error(x @ y, exact) + 1e-12


def test_numbers_that_count(sources: list[str]) -> None:
    check_native(lambda: torch.arange(0, 5000, 3, dtype=torch.float32))
    check_native(lambda: torch.arange(2.0, 90.0, 4))
    check_native(lambda x: (x * 0.3 + 1e-5, x.pow(1.7), torch.full_like(x, 0.1), x + float("inf")), torch.rand(100))
    check_native(lambda n: (n * 0.3, n / 7, n.float().mean()), torch.arange(100))


# -- models


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["encoder", *(pytest.param(n, marks=NIGHTLY) for n in ("convnet", "decoder", "llama"))]
)
def test_models_run_on_the_device_alone(sources: list[str], name: str) -> None:
    assert check_model(inference, ARCHITECTURES[name], Target(NAME)).fallbacks == ()
    assert sources


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["convnet", "encoder"])
def test_training_runs_on_the_device_alone(sources: list[str], name: str) -> None:
    assert check_model(training, ARCHITECTURES[name], Target(NAME)).fallbacks == ()


# -- operators

NATIVE = (
    *("exp", "log1p", "tanh", "erf", "sigmoid", "nn.functional.gelu", "nn.functional.silu", "lgamma", "atan2", "pow"),
    *("add", "sub", "mul", "div.floor_rounding", "remainder", "fmod", "where", "clamp", "maximum", "isclose", "round"),
    *("sum", "mean", "amax", "prod", "var", "std_mean", "argmax", "any", "logsumexp", "softmax", "log_softmax"),
    *(
        "nn.functional.layer_norm",
        "nn.functional.group_norm",
        "nn.functional.batch_norm",
        "cumsum",
        "linalg.vector_norm",
    ),
    *("mm", "addmm", "bmm", "nn.functional.linear", "nn.functional.conv1d", "nn.functional.conv2d"),
    *(
        "nn.functional.conv_transpose2d",
        "nn.functional.max_pool2d",
        "nn.functional.avg_pool2d",
        "gather",
        "scatter_add",
    ),
    *("index_select", "index_put", "nn.functional.embedding", "sort", "topk", "cat", "tril", "roll", "flip", "arange"),
    *("nn.functional.interpolate.bilinear", "nn.functional.cross_entropy", "nn.functional.mse_loss", "masked_fill"),
)
ELSEWHERE = ("erfinv", "digamma", "frexp", "cumprod", "logcumsumexp")
"""Operators of float32 whose kernels need float64 inside."""


@pytest.mark.parametrize("name", [*NATIVE, *ELSEWHERE])
def test_operators_of_the_database(sources: list[str], name: str) -> None:
    cases = {case.name: case for case in operators.cases(Target(NAME))}
    ran = cases[name].run(Target(NAME))
    if name in NATIVE:
        assert ran.fallbacks == ()
    else:
        assert [told for _, told in ran.fallbacks if REASON in told]


# -- what needs float64


def test_float64_runs_elsewhere_with_the_reason(sources: list[str]) -> None:
    x = torch.rand(5, 7, dtype=torch.float64)
    made, fallbacks = run(lambda x: x.exp() + 1, x)
    torch.testing.assert_close(made, x.exp() + 1)
    assert set(fallbacks) == {"aten::exp", "aten::add.Tensor"}
    assert all(REASON in reason for reason in fallbacks.values())


def test_a_program_of_both(sources: list[str]) -> None:
    x = torch.rand(5, 7)
    made, fallbacks = run(lambda x: ((x * 2).exp().double() / 3).float().log(), x)
    torch.testing.assert_close(made, ((x * 2).exp().double() / 3).float().log())
    assert all(REASON in reason for reason in fallbacks.values())
    assert {"aten::mul.Tensor", "aten::exp", "aten::log"}.isdisjoint(fallbacks)
    assert "aten::div.Tensor" in fallbacks


@pytest.mark.parametrize(
    "function", [lambda x: x.double().exp(), torch.erfinv, lambda x: torch.arange(0.0, 1.0, 0.1) + x.sum()]
)
def test_without_fallback_it_is_an_error_with_the_reason(sources: list[str], function: Callable[..., Any]) -> None:
    with pytest.raises(KagentError, match=re.escape(REASON)):
        run(function, torch.rand(3), missing_kernel="error")


def test_reason_of_an_operator_whose_kernel_needs_it(sources: list[str]) -> None:
    made, fallbacks = run(torch.erfinv, torch.rand(9))
    assert made.dtype == torch.float32
    assert fallbacks["aten::erfinv"].endswith(f"aten::erfinv computes in float64 inside, and {REASON}")


# -- the language


def test_only_the_language_of_a_device_without_it_does_without(device: str) -> None:
    [info] = [info for info in list_devices() if str(info.device) == device]
    masked = OpenClLanguage.of(replace(info, lacks={"float64": REASON}))
    assert DOUBLE.search(re.sub(r"/\*.*?\*/", "", masked.preamble(), flags=re.DOTALL)) is None
    assert (masked.wide, dict(masked.lacks)) == ("float32", {"float64": REASON})
    whole = OpenClLanguage.of(replace(info, lacks={}))
    assert "cl_khr_fp64" in whole.preamble()
    assert (whole.wide, dict(whole.lacks)) == ("float64", {})
