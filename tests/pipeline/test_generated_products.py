"""Products of matrices, convolutions and attention as generated kernels, against eager PyTorch and float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.single import run_overload

from ..codegen_programs import kernel, refusal
from .traced import CPU, close, compiled, traced

aten = torch.ops.aten
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
ALL = {**CPU, "generated_kernels": "all"}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, the same ones every time: of integer types all numbers that there are, so that sums overflow."""
    seed = torch.Generator().manual_seed(sum(shape) + len(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=seed, dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=seed, dtype=dtype)


def layouts(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A tensor contiguous, with its last dimensions exchanged, with gaps and an offset, and with a stride of 0."""
    swapped = (*shape[:-2], *reversed(shape[-2:]))
    made = [values(*shape, dtype=dtype)]
    if len(shape) > 1:
        made.append(values(*swapped, dtype=dtype).transpose(-1, -2))
    made.append(values(*(2 * size + 1 for size in shape), dtype=dtype)[tuple(slice(1, None, 2) for _ in shape)])
    made.append(values(1, *shape[1:], dtype=dtype).expand(shape))
    return made


def run(cases: list[Case]) -> list[list[torch.Tensor]]:
    """Run some cases as one graph in which every kernel is generated; return the results of each."""
    counts: list[int] = []

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        made, rest = [], iter(given)
        counts.clear()
        for op, operands in cases:
            results = listed(op(*itertools.islice(rest, len(operands))))
            counts.append(len(results))
            made.extend(results)
        return made

    tensors = tuple(t for _, operands in cases for t in operands)
    graph = traced(function, *tensors, **{**ALL, "fusion": False})
    try:
        flat = iter(graph(tensors))
        got = [list(itertools.islice(flat, count)) for count in counts]
        tasks = [task for plan in graph.plans() for task in plan.tasks]
        other = {str(task.calls[0]) for task in tasks if task.kernel.origin != "generated"}
    finally:
        close(graph)
    assert not other, "no kernels were generated for:\n" + "\n".join(sorted(other))
    return got


def listed(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    return [r for r in (result if isinstance(result, (tuple, list)) else (result,)) if r is not None]


def check(cases: list[Case]) -> None:
    """Run some cases. Integers are eager PyTorch's; floats at most twice as far off float64 as those, halves thrice."""
    for number, ((op, operands), mine) in enumerate(zip(cases, run(cases), strict=True)):
        exact = listed(op(*(t.double() if t.dtype.is_floating_point else t for t in operands)))
        shapes = [tuple(t.shape) for t in operands]
        for part, (got, eager, true) in enumerate(zip(mine, listed(op(*operands)), exact, strict=True)):
            where = f"case {number}, result {part}, of {shapes} {operands[0].dtype}"
            assert (got.dtype, got.shape) == (eager.dtype, eager.shape), where
            assert got.numel() == 0 or got.stride() == eager.stride(), f"{where}: {got.stride()} {eager.stride()}"
            compare(got, eager, true, where)


def compare(got: torch.Tensor, eager: torch.Tensor, true: torch.Tensor, where: str) -> None:
    """Assert that a result is right: see `check`. Doubles must agree in 13 digits of the largest one."""
    if not got.dtype.is_floating_point:
        assert torch.equal(got, eager), where
        return
    finite = true.isfinite()
    torch.testing.assert_close(got.double()[~finite], true[~finite].double(), equal_nan=True, msg=where)
    if finite.any() and got.dtype == torch.float64:  # eager PyTorch is the best that there is
        torch.testing.assert_close(got[finite], true[finite], rtol=0, atol=1e-13 * true[finite].abs().max().item())
    elif finite.any():
        size = true[finite].abs().max().item()
        mine, theirs = ((t.double() - true)[finite].abs().max().item() for t in (got, eager))
        factor = 3 if got.dtype in (torch.float16, torch.bfloat16) else 2
        # what one rounding of the largest result may cost: eager may have been lucky
        assert mine <= factor * theirs + torch.finfo(got.dtype).eps * size, f"{where}: off by {mine}, eager by {theirs}"


# -- products of matrices


def products(dtype: torch.dtype) -> list[Case]:
    """Products of all kinds, sizes and layouts."""

    def v(*shape: int) -> torch.Tensor:
        return values(*shape, dtype=dtype)

    cases: list[Case] = []
    for m, depth, n in ((1, 1, 1), (7, 5, 9), (67, 300, 41), (61, 257, 33)):
        cases.append((aten.mm, (v(m, depth), v(depth, n))))
    pairs = itertools.product if dtype == torch.float32 else zip  # the loops are the same for all types
    for a, b in pairs(layouts(13, 21, dtype=dtype), layouts(21, 35, dtype=dtype)[::-1]):
        cases.append((aten.mm, (a, b)))
    for m, depth, n in ((5, 0, 6), (0, 5, 6), (5, 6, 0)):
        cases.append((aten.mm, (v(m, depth), v(depth, n))))
        cases.append((aten.addmm, (v(n), v(m, depth), v(depth, n))))
    cases += [
        (aten.bmm, (a, b))
        for a, b in zip(layouts(3, 7, 12, dtype=dtype), layouts(3, 12, 5, dtype=dtype)[::-1], strict=True)
    ]
    for added in (v(9), v(1, 9), v(7, 1), v(7, 9), v(1), v()):
        cases.append((lambda c, a, b: aten.addmm(c, a, b, beta=2, alpha=3), (added, v(7, 6), v(6, 9))))
    cases.append((lambda c, a, b: aten.addmm(c, a, b, beta=0), (v(7, 9), v(7, 6), v(6, 9))))
    for added in (v(3, 7, 9), v(9), v(7, 1)):
        cases.append((lambda c, a, b: aten.baddbmm(c, a, b, beta=-1, alpha=2), (added, v(3, 7, 6), v(3, 6, 9))))
    cases.append((lambda c, a, b: aten.addbmm(c, a, b, beta=2, alpha=3), (v(9), v(3, 7, 6), v(3, 6, 9))))
    cases.append((aten.addbmm, (v(7, 9), v(3, 6, 7).transpose(1, 2), v(3, 9, 6).transpose(1, 2))))
    cases += [(aten.mv, (a, v(70))) for a in layouts(50, 70, dtype=dtype)]
    cases.append((aten.mv, (v(4, 0), v(0))))
    cases.append((lambda c, a, b: aten.addmv(c, a, b, beta=2, alpha=3), (v(50), v(50, 70), v(70))))
    cases.append((lambda c, a, b: aten.addmv(c, a, b, beta=2), (v(50), v(70, 50).t(), v(70))))
    cases += [(aten.dot, (a, a.flip(0))) for size in (0, 1, 63, 500) for a in layouts(size, dtype=dtype)[:2]]
    cases.append((aten.vdot, (v(77), v(77) + v(77))))
    return cases


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_products(dtype: torch.dtype) -> None:
    check(products(dtype))


def test_a_factor_of_zero_ignores_what_it_scales() -> None:
    nan = torch.full((4, 6), math.nan)
    batch = nan.expand(2, 4, 6)
    got = run(
        [
            (lambda c, a, b: aten.addmm(c, a, b, beta=0), (nan, values(4, 5), values(5, 6))),
            (lambda c, a, b: aten.baddbmm(c, a, b, beta=0), (batch, values(2, 4, 5), values(2, 5, 6))),
            (lambda c, a, b: aten.addmv(c, a, b, beta=0), (nan[:, 0], values(4, 5), values(5))),
            (lambda c, a, b: aten.addmm(c, a, b, beta=0), (nan, values(4, 0), values(0, 6))),
        ]
    )
    assert all(result.isfinite().all() for results in got for result in results)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_times_0_are_left_out_where_eager_leaves_them_out(dtype: torch.dtype) -> None:
    session = session_for(load_config({"device": "cpu", "generated_kernels": "all"}))
    ones, nan = torch.ones(4, 4, dtype=dtype), torch.full((4, 4), math.nan, dtype=dtype)
    for operator, *given in (
        (aten.addmm.default, ones, nan, nan),
        (aten.baddbmm.default, ones[None], nan[None], nan[None]),
        (aten.addbmm.default, ones, nan[None], nan[None]),
        (aten.addmv.default, ones[0], nan, nan[0]),
    ):
        got = run_overload(session, operator, given, {"alpha": 0})
        assert torch.equal(got.isnan(), operator(*given, alpha=0).isnan()), operator


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    a, b = values(20, 40), values(40, 50)
    a[3, 5], a[19, 0], b[7, 49] = math.nan, math.inf, -math.inf
    check([(aten.mm, (a, b)), (aten.mv, (a, b[:, 49])), (aten.addmm, (values(50), a, b))])


def test_long_sums_stay_exact() -> None:
    long = values(300_000).abs()
    check(
        [
            (aten.dot, (long, long.flip(0))),
            (aten.mm, (long.view(2, -1), long.view(2, -1).t())),
            (aten.mv, (long.view(3, -1), long[:100_000])),
            (aten.mv, (long.view(-1, 3).t(), long[:100_000])),
        ]
    )


def test_what_pytorch_does_not_have_is_refused() -> None:
    yes = torch.ones(2, 2, dtype=torch.bool)
    assert refusal(aten.mm, values(2, 2), values(2, 2)) is None
    assert "no lowering rule" in (refusal(aten.mm, yes, yes) or "")


# -- epilogues


def test_pointwise_operators_are_computed_where_a_product_is_stored() -> None:
    bias, rest = values(9), values(7, 9)
    cases: list[Case] = [
        (lambda a, b, c: torch.relu(aten.mm(a, b) + c), (values(7, 5), values(5, 9), bias)),
        (lambda c, a, b, r: (aten.addmm(c, a, b) * 2 + r).sigmoid(), (bias, values(7, 5), values(5, 9), rest)),
        (lambda a, b: aten.tanh(aten.bmm(a, b)), (values(3, 7, 5), values(3, 5, 9))),
        (lambda a, b: aten.mv(a, b) * 3, (values(7, 5), values(5))),
        (lambda a, b: aten.dot(a, b) + 1, (values(50), values(50).flip(0).clone())),
        (
            lambda x, w, b, r: torch.relu(convolve(x, w, b, padding=1) + r),
            (values(2, 3, 8, 9), values(4, 3, 3, 3), values(4), values(2, 4, 8, 9)),
        ),
    ]
    for number, (function, args) in enumerate(cases):
        assert refusal(function, *args) is None
        exact = function(*(t.double() for t in args))
        compare(kernel(function, *args)(*args)[0], function(*args), exact, f"case {number}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_epilogue_rounds_half_products_first(dtype: torch.dtype) -> None:
    a, b = values(7, 64, dtype=dtype), values(64, 9, dtype=dtype)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return aten.mm(a, b) - 100

    got = kernel(function, a, b)(a, b)[0]
    assert torch.equal(got, (a.float() @ b.float()).to(dtype) - 100)


def test_a_product_that_is_read_elsewhere_too_is_stored_with_what_follows() -> None:
    a, b = values(7, 5), values(5, 9)
    got = kernel(lambda a, b: [product := aten.mm(a, b), torch.relu(product)], a, b)(a, b)
    torch.testing.assert_close(got, [a @ b, torch.relu(a @ b)])


# -- convolutions


def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """A convolution with the same numbers in every dimension."""
    return aten.convolution(x, w, b, *settings(x, **options))


def settings(x: torch.Tensor, **options: Any) -> tuple[Any, ...]:
    """The arguments of a convolution behind its tensors."""
    rank = x.dim() - 2
    each = {name: [options.get(name, default)] * rank for name, default in (("stride", 1), ("padding", 0))}
    dilation, extra = [options.get("dilation", 1)] * rank, [options.get("output_padding", 0)] * rank
    transposed, groups = options.get("transposed", False), options.get("groups", 1)
    return each["stride"], each["padding"], dilation, transposed, extra, groups


GEOMETRIES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9, 11), (5, 3, 3, 3), {"padding": 1}),
    ((2, 40, 7, 7), (70, 40, 1, 1), {}),
    ((2, 40, 9, 8), (7, 40, 3, 2), {"padding": 2, "stride": 2}),
    ((1, 4, 12, 13), (6, 2, 3, 3), {"groups": 2, "padding": 2, "dilation": 2, "stride": 3}),
    ((2, 6, 10, 37), (6, 1, 3, 3), {"groups": 6, "padding": 1}),
    ((2, 5, 10, 11), (10, 1, 3, 5), {"groups": 5, "padding": 2, "stride": 2}),
    ((2, 3, 40), (4, 3, 5), {"padding": 2}),
    ((2, 4, 40), (4, 1, 5), {"groups": 4, "dilation": 3}),
    ((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), {"padding": 1}),
    ((2, 6, 5, 6), (6, 4, 3, 3), {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1}),
    ((2, 6, 5, 6), (6, 2, 3, 3), {"transposed": True, "groups": 3, "dilation": 2}),
    ((2, 6, 5, 6), (6, 1, 3, 3), {"transposed": True, "groups": 6, "stride": 3, "padding": 1}),
    ((2, 6, 9), (6, 3, 4), {"transposed": True, "stride": 3}),
    ((1, 2, 3, 4, 3), (2, 3, 2, 2, 2), {"transposed": True, "stride": 2}),
]


def memory_formats(x: torch.Tensor, w: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors as they are, and channels-last where that exists."""
    if x.dim() != 4:
        return [(x, w)]
    last, weight_last = (t.to(memory_format=torch.channels_last) for t in (x, w))
    return [(x, w), (last, weight_last), (last, w), (x.transpose(2, 3).contiguous().transpose(2, 3), w)]


def convolutions(dtype: torch.dtype, gradients: bool) -> list[Case]:
    """Convolutions or their gradients."""
    cases: list[Case] = []
    for size, window, options in GEOMETRIES:
        made = window[1] * options.get("groups", 1) if options.get("transposed") else window[0]
        formats = memory_formats(values(*size, dtype=dtype), values(*window, dtype=dtype))
        for x, w in formats[: 2 if gradients else 4]:
            bias = values(made, dtype=dtype)
            if not gradients:
                cases.append((lambda x, w, b, o=options: convolve(x, w, b, **o), (x, w, bias)))
                continue
            grad = torch.flip(convolve(x, w, bias, **options), [0]).contiguous() / 4
            arguments = settings(x, **options)

            def gradient(
                g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rest: Any = arguments, made: int = made
            ) -> Any:
                return aten.convolution_backward(g, x, w, [made], *rest, [True, True, True])

            cases.append((gradient, (grad, x, w)))
    return cases


@pytest.mark.parametrize("dtype", FLOATS)
def test_convolutions(dtype: torch.dtype) -> None:
    cases = convolutions(dtype, False)
    check(cases if dtype == torch.float32 else cases[::3])


def test_convolutions_of_integers_and_of_nothing() -> None:
    x, w = values(2, 3, 6, 7, dtype=torch.int64), values(4, 3, 3, 3, dtype=torch.int64)
    check(
        [
            (convolve, (x, w)),
            (convolve, (values(0, 3, 6, 7), values(4, 3, 3, 3))),
            (convolve, (values(2, 3, 6, 7), values(4, 3, 3, 3))),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_convolutions(dtype: torch.dtype) -> None:
    cases = convolutions(dtype, True)
    check(cases if dtype == torch.float32 else cases[::5])


WANTED = [[True, False, False], [False, True, False], [False, False, True], [True, False, True]]


@pytest.mark.parametrize("mask", WANTED)
def test_only_the_wanted_gradients_are_computed(mask: list[bool]) -> None:
    def wanted(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        made = aten.convolution_backward(grad, x, w, [4], *settings(x), mask)
        return [result for result, given in zip(made, mask, strict=True) if given]  # eager PyTorch may give more

    check([(wanted, (values(2, 4, 4, 5), values(2, 3, 6, 7), values(4, 3, 3, 3)))])


# -- attention


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator that a CPU computes attention with."""
    if mask is not None:
        mask = mask.to(q.dtype)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, **options)


def attend_back(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **options: Any
) -> Any:
    """Its gradients, given its results and perhaps a mask."""
    out, logs, *mask = more
    options["attn_mask"] = mask[0].to(q.dtype) if mask else None
    causal = options.pop("is_causal", False)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, logs, 0.0, causal, **options)


def attentions(dtype: torch.dtype, gradients: bool) -> list[Case]:
    """Attention over lengths shorter and longer than what is computed at a time, masks, causal, layouts."""

    def heads(length: int, size: int, seed: int = 0) -> torch.Tensor:
        return values(2, length + seed, 3, size, dtype=dtype)[:, seed:].transpose(1, 2)

    cases: list[Case] = []
    some = torch.where(values(30, 37) > 0, values(30, 37), -math.inf)
    some[4] = -math.inf
    plain: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ((heads(1, 1), heads(1, 1, 1), heads(1, 1, 2)), {}),
        ((heads(5, 4), heads(7, 4, 1), heads(7, 4, 2)), {"scale": 0.3}),
        ((heads(50, 33), heads(70, 33, 1), heads(70, 33, 2)), {"is_causal": True}),
        ((heads(70, 40), heads(50, 40, 1), heads(50, 40, 2)), {"is_causal": True}),
        ((heads(30, 16), heads(37, 16, 1), heads(37, 16, 2), some), {}),
        ((heads(30, 16), heads(37, 16, 1), heads(37, 16, 2), values(2, 1, 30, 37)), {}),
        ((values(1, 2, 65, 64, dtype=dtype), values(1, 2, 65, 64, dtype=dtype) / 2, heads(65, 64)[:1, :2]), {}),
    ]
    for args, options in plain:
        if not gradients:
            cases.append((lambda *a, o=options: attend(*a, **o), args))
            continue
        out, logs = attend(*args, **options)
        grad = out.flip(2).clone()
        cases.append((lambda *a, o=options: attend_back(*a, **o), (grad, *args[:3], out, logs, *args[3:])))
    return cases


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention(dtype: torch.dtype) -> None:
    check(attentions(dtype, False)[:: 1 if dtype == torch.float32 else 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_attention(dtype: torch.dtype) -> None:
    check(attentions(dtype, True)[:: 1 if dtype == torch.float32 else 2])


def test_attention_that_draws_random_numbers_is_refused() -> None:
    q = values(1, 1, 4, 4)
    reason = refusal(lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5), q)
    assert reason is not None


# -- models


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


def convolutional() -> nn.Module:
    """A small convolutional net with a strided, a depthwise and a transposed convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 1, bias=False),
        nn.GELU(),
        nn.ConvTranspose2d(16, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 12 * 12, 5),
    )


@pytest.mark.parametrize(
    ("make", "shape"), [(convolutional, (2, 3, 12, 12)), (Block, (2, 19, 32))], ids=["convolutional", "attention"]
)
def test_models_forward_and_backward(fresh_dynamo: None, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make()
    mine = compiled(model, **ALL)
    grads = []
    x = values(*shape)
    for forward in (model, mine):
        model.zero_grad()
        torch.manual_seed(0)
        given = x.clone().requires_grad_()
        result = forward(given)
        result.square().mean().backward()
        grads.append([result.detach(), given.grad, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
