"""What the plugin template makes runs whole models: all on the device where it has a language, else with reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import kagent_core
from kagent_core.config import load_config
from kagent_core.errors import KernelExecutionError, KernelNotFoundError
from kagent_core.inspect.report import PlanReport
from kagent_core.session import session_for
from kagent_core.testing.compare import assert_as_exact, check_against_eager

aten = torch.ops.aten


def reports(device: str) -> list[PlanReport]:
    return list(session_for(load_config({"device": device})).reports)


def check(function: Any, *args: Any) -> None:
    """Equal to eager PyTorch, with nothing on the fallback device."""
    session = session_for(load_config({"device": "toy:0"}))
    session.reports.clear()
    check_against_eager(function, *args, device="toy:0", every_stride=False)
    assert session.reports
    assert [report.fallbacks for report in session.reports if report.fallbacks] == []


x = torch.randn(5, 7)
w = torch.randn(7, 6)

PROGRAMS = {
    "pointwise": lambda a, b: functional.gelu(a * 2) + a.exp(),
    "several results": lambda a, b: (a + 1, (a + 1).sin(), a.cos()),
    "broadcast": lambda a, b: a[:, :1] + a[0],
    "transposed": lambda a, b: (a.t() + 1, a.t().contiguous()),
    "views": lambda a, b: a[1::2, ::3] * a.flip(0)[1::2, ::3],
    "0-dim": lambda a, b: (a[1, 2] * 2, a.sum()),
    "rows": lambda a, b: (a.softmax(-1), a.sum(-1), functional.layer_norm(a, (7,))),
    "columns": lambda a, b: (a.softmax(0), a.mean(0), a.amax(0, keepdim=True)),
    "everything": lambda a, b: (a.mean(), a.std(), a.argmax()),
    "positions": lambda a, b: (a.argmin(0), a.max(1).indices, a.sort(1).values),
    "products": lambda a, b: (a @ b, functional.relu(a @ b + 1), torch.addmm(b[0], a, b)),
    "batched": lambda a, b: torch.bmm(a.expand(3, 5, 7), b.expand(3, 7, 6)),
    "cat": lambda a, b: torch.cat([a, b.t()], 0),
    "index": lambda a, b: (a[torch.tensor([4, -1, 0])], a.gather(1, torch.tensor([[6], [0]]))),
    "embedding": lambda a, b: functional.embedding(torch.tensor([[1, 4], [0, 0]]), a),
    "scatter": lambda a, b: a.index_add(0, torch.tensor([1, 1, 4]), a[:3]),
    "cumsum": lambda a, b: (a.cumsum(0), a.cumsum(1)),
    "integers": lambda a, b: ((a * 9).long() // 4, (a * 9).long() % -4, (a > 0) & (a < 1)),
    "halves": lambda a, b: (a.half() * 3 + 1, a.bfloat16().softmax(-1)),
    "doubles": lambda a, b: a.double().erf(),
    "made": lambda a, b: (torch.arange(9), torch.full((2, 3), 7), torch.ones_like(a), torch.tril(a)),
    "attention": lambda a, b: functional.scaled_dot_product_attention(*a.expand(3, 1, 2, 5, 7), is_causal=True),
    "written": lambda a, b: a.clone().add_(1).mul_(2),
    "written slice": lambda a, b: torch.slice_scatter(a, b.t()[:2], 0, 1, 3),
    "empty": lambda a, b: (a[:0] + 1, a[:0].sum(0), torch.cat([a[:0], a[:0]]), a[:, :0] @ b[:0]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_language_is_enough(toy: Any, name: str) -> None:
    check(PROGRAMS[name], x, w)


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        (functional.conv1d, ((2, 4, 9), (6, 4, 3))),
        (functional.conv2d, ((2, 4, 7, 8), (6, 4, 3, 3))),
        (functional.conv3d, ((1, 2, 4, 5, 6), (3, 2, 2, 2, 2))),
        (functional.conv_transpose2d, ((2, 4, 5, 5), (4, 3, 3, 3))),
    ],
)
def test_convolutions_and_their_gradients(toy: Any, operator: Any, shape: Any) -> None:
    def results(function: Any, image: torch.Tensor, weight: torch.Tensor) -> Any:
        out = function(image, weight)
        return (out, *torch.autograd.grad(out.square().sum(), (image, weight)))

    def convolution(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return operator(image, weight, stride=2, padding=1)

    torch.manual_seed(0)
    args = [torch.randn(s, requires_grad=True) for s in shape]
    exact = results(convolution, *(arg.detach().double().requires_grad_() for arg in args))
    found = results(kagent_core.compile(convolution, device="toy:0"), *args)
    assert_as_exact(found, results(convolution, *args), exact, 2, "convolution")
    assert [report.fallbacks for report in reports("toy:0") if report.fallbacks] == []


def test_symbolic_sizes(toy: Any) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(a, a.shape[-1:]).sum(0)

    compiled = kagent_core.compile(function, device="toy:0", dynamic=True)
    for rows, columns in ((3, 4), (1, 9), (17, 2), (3, 4)):
        a = torch.randn(rows, columns)
        torch.testing.assert_close(compiled(a), function(a))


# -- what kernels report


@pytest.mark.parametrize(
    ("function", "args", "kind"),
    [
        (lambda a, i: a[i] + 1, (x, torch.tensor([0, 5])), IndexError),
        (lambda a, i: functional.embedding(i, a), (x, torch.tensor([-1])), IndexError),
        (lambda a, i: a.gather(0, i), (x, torch.tensor([[9]])), RuntimeError),
        (lambda a, i: i // (i - i), (x, torch.tensor([3])), RuntimeError),
    ],
)
def test_an_error_of_the_users_is_eagers(toy: Any, function: Any, args: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as wanted:
        function(*args)
    compiled = kagent_core.compile(function, device="toy:0")
    for _ in range(2):
        with pytest.raises(KernelExecutionError) as got:
            compiled(*args)
        assert isinstance(got.value, kind)
        assert str(wanted.value).splitlines()[0] in str(got.value)
        assert "test_rendered_plugins.py" in str(got.value)


def test_after_a_report_the_plan_is_right_again(toy: Any) -> None:
    compiled = kagent_core.compile(lambda a, i: a[i] * 2, device="toy:0")
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 7])
    torch.testing.assert_close(compiled(x, good), x[good] * 2)
    with pytest.raises(IndexError):
        compiled(x, bad)
    torch.testing.assert_close(compiled(x, good), x[good] * 2)


def test_a_report_is_told_though_its_memory_was_written_since(toy: Any) -> None:
    def function(a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        places = i + 1
        for _ in range(6):  # the plan's memory is used over and over
            a = (a[places] @ a[places].t()) @ a[:2]
        return a

    with pytest.raises(IndexError, match=r"aten::index"):
        kagent_core.compile(function, device="toy:0")(x, torch.tensor([0, 6]))


# -- what is not on the device


def test_what_cannot_be_generated_says_why(toy: Any) -> None:
    with pytest.raises(KernelNotFoundError, match=r"none can be generated: there is no lowering rule for aten::_fft"):
        kagent_core.compile(torch.fft.fft, device="toy:0", missing_kernel="error")(x)
    kagent_core.compile(lambda a: torch.fft.fft(a).real, device="toy:0")(x)
    [fallback] = {f.reason for report in reports("toy:0") for f in report.fallbacks if "_fft_r2c" in f.signature}
    assert fallback.endswith("none can be generated: there is no lowering rule for aten::_fft_r2c")


def test_a_fixed_set_of_kernels_and_the_rest_elsewhere(npu: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.LayerNorm(9), torch.nn.Linear(9, 3))
    with torch.no_grad():
        torch.testing.assert_close(kagent_core.compile(model, device="npu:0")(x), model(x))
    report = reports("npu:0")[-1]
    assert {fallback.signature for fallback in report.fallbacks} == {"aten::native_layer_norm"}
    assert {fallback.device for fallback in report.fallbacks} == {"cpu"}
    assert report.tasks > len(report.fallbacks)


def test_strided_tensors_are_made_contiguous_for_a_kernel_that_asks(npu: Any) -> None:
    check_against_eager(lambda a, b: a.t() @ b.t(), torch.randn(4, 5), torch.randn(3, 4), device="npu:0")
    assert reports("npu:0")[-1].compactions == 2
    assert reports("npu:0")[-1].fallbacks == ()
