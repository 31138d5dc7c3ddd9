"""Kernels generated for reductions, and for operators that go over their rows again, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kagent_core.codegen import reduced
from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.rules import normalization, reductions
from kagent_core.testing.compare import assert_as_exact

from ..codegen_programs import check, errors, kernel, kernels, listed, refusal

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SHAPES = ((), (1,), (7,), (3, 1, 4), (5, 37), (40, 3), (2, 3, 4, 5))
DIMS = ((0,), (-1,), (1,), (0, 2), (0, -1), (1, -2), ())


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def read_once(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Make kernels that read rows and columns of any size once, block by block or element by element."""
    monkeypatch.setattr(CFamily, "one_pass", how == "elements")
    if how == "blocks":
        for module, names in (
            (reduced, ["CACHED"]),
            (reductions, ["CACHED", "SEARCHED_ROW", "KEPT_ROW"]),
            (normalization, ["KEPT_ROW"]),
        ):
            for name in names:
                monkeypatch.setattr(module, name, 0)


@pytest.fixture(params=["as is best", "blocks", "elements"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make kernels with and without compound reductions."""
    read_once(monkeypatch, request.param)
    return str(request.param)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return elements with many ties."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.7
    if dtype.is_floating_point:
        return (torch.randn(shape) * 2).round(decimals=1).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -4, 5, shape).to(dtype)


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield tensors of a shape that lie in memory in several ways."""
    yield values(shape, dtype)
    if len(shape) > 1:
        yield values(shape[::-1], dtype).permute(*reversed(range(len(shape))))
        yield values((shape[0] * 2 + 1, *shape[1:]), dtype)[1::2]
        yield values((1, *shape[1:]), dtype).expand(shape)


def dims_for(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the lists of dimensions that a shape has, by numbers that are distinct."""
    size = max(len(shape), 1)
    fitting = [dims for dims in DIMS if all(-size <= dim < size for dim in dims)]
    return [dims for dims in fitting if len({dim % size for dim in dims}) == len(dims)]


def over_dims(function: Callable[..., Any], dtype: torch.dtype, single: bool = False) -> None:
    """Check a reduction of every shape over every list of dimensions, in one of several layouts."""
    cases = []
    for shape in SHAPES:
        lists = [dims for dims in dims_for(shape) if len(dims) == 1 or not single]
        for number, dims in enumerate(lists):
            dim = dims[0] if single else list(dims)
            ways = list(layouts(shape, dtype))  # each list of dimensions with one of them
            tensor = ways[(number + len(shape)) % len(ways)]
            cases.append((lambda x, d=dim, k=bool(number % 2): function(x, d, k), (tensor,)))
    check(cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_sums(dtype: torch.dtype) -> None:
    over_dims(aten.sum.dim_IntList, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_means(dtype: torch.dtype) -> None:
    over_dims(aten.mean.dim, dtype)


@pytest.mark.parametrize("operator", [aten.amax.default, aten.amin.default], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.bool], ids=str)
def test_extremes(operator: Any, dtype: torch.dtype) -> None:
    over_dims(operator, dtype)


@pytest.mark.parametrize("operator", [aten.max.dim, aten.min.dim], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_extremes_with_their_places(operator: Any, dtype: torch.dtype) -> None:
    over_dims(operator, dtype, single=True)


@pytest.mark.parametrize("operator", [aten.argmax.default, aten.argmin.default, aten.prod.dim_int], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16], ids=str)
def test_places_and_products(operator: Any, dtype: torch.dtype) -> None:
    over_dims(operator, dtype, single=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    ((ours, eagers),) = errors([(lambda x: aten.prod.dim_int(x, 1), ((torch.rand(50, 20) + 0.5).to(dtype),))])
    assert ours <= eagers


@pytest.mark.parametrize("operator", [aten.any.dims, aten.all.dims], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool], ids=str)
def test_truth(operator: Any, dtype: torch.dtype) -> None:
    over_dims(operator, dtype)


@pytest.mark.parametrize("correction", [0, None, 2.5])
def test_variances(correction: float | None) -> None:
    def both(x: torch.Tensor, dim: list[int], keepdim: bool) -> Any:
        return aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)

    over_dims(both, torch.float32)
    over_dims(both, torch.bfloat16)


@pytest.mark.parametrize("order", [2, 1, 0, 3, 0.5, -1, float("inf"), float("-inf")])
def test_norms(order: float) -> None:
    def norm(x: torch.Tensor, dim: list[int], keepdim: bool) -> Any:
        return aten.linalg_vector_norm(x, order, dim, keepdim)

    # powers and roots amplify what float32 rounds, in eager's results, too
    over_dims(norm, torch.float64 if order in (3, 0.5, -1) else torch.float32)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_everything_of_every_type(dtype: torch.dtype) -> None:
    x = values((3, 4, 5), dtype)
    takes_all = [aten.sum, aten.any, aten.all, aten.max, aten.min, aten.nansum, aten.count_nonzero]
    functions: list[Callable[..., Any]] = [lambda x, f=f: f(x) for f in takes_all]
    functions += [lambda x, f=f: f(x, dim=1) for f in (aten.any, aten.all, aten.count_nonzero, aten.aminmax)]
    if dtype is not torch.bool:
        functions += [lambda x: aten.argmax(x), lambda x: aten.argmin(x, None, True)]
    if dtype not in (torch.float16, torch.bfloat16):  # eager rounds half types after every product
        functions.append(lambda x: aten.prod(x))
    if dtype.is_floating_point:
        functions += [lambda x, f=f: f(x) for f in (aten.mean, aten.var, aten.std, aten.var_mean, aten.std_mean)]
        functions += [lambda x, f=f: f(x, [0, 2], correction=0) for f in (aten.std, aten.std_mean)]
        functions += [lambda x: aten.logsumexp(x, [0, 2]), lambda x: aten.linalg_vector_norm(x)]
    check([(function, (x,)) for function in functions])


@pytest.mark.parametrize("target", [torch.float64, torch.float16, torch.int64, torch.int8, torch.bool], ids=str)
def test_another_type_for_the_result(target: torch.dtype) -> None:
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        x = values((6, 50), dtype)
        cases.append((lambda x: aten.sum.dim_IntList(x, [1], dtype=target), (x,)))
        cases.append((lambda x: aten.prod.dim_int(x[:, :4], 1, dtype=target), (x,)))
        if target.is_floating_point:
            cases.append((lambda x: aten.mean.dim(x, [1], dtype=target), (x,)))
    x = values((6, 50), torch.float32)
    cases.append((lambda x: aten.linalg_vector_norm(x, 2, [1], dtype=torch.float64), (x,)))
    check(cases)


def test_integers_wrap_around() -> None:
    x = torch.full((3, 100), 2**62, dtype=torch.int64)
    check([(lambda x: aten.sum.dim_IntList(x, [1]), (x,)), (lambda x: aten.prod(x), (x + 1,))])


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dim", [0, 1])
def test_nan_and_infinities(dim: int) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, 3.0, nan], [-inf, -inf, -inf, -inf], [inf, 2.0, inf, -inf], [0.0, -0.0, 0.0, 5.0]])
    x = x.repeat_interleave(9, 0).repeat_interleave(9, 1)
    functions: list[Callable[..., Any]] = [
        lambda x: aten.max.dim(x, dim),
        lambda x: aten.min.dim(x, dim),
        lambda x: aten.argmax(x),
        lambda x: aten.amax(x),
        lambda x: aten.sum.dim_IntList(x, [dim]),
        lambda x: aten.nansum(x, [dim]),
        lambda x: aten.var.correction(x, [dim]),
        lambda x: aten.argmin(x, dim),
        lambda x: aten.any.dim(x, dim),
        lambda x: aten._softmax(x, dim, False),
        lambda x: aten._log_softmax(x, dim, False),
        lambda x: aten.logsumexp(x, [dim]),
    ]
    check([(function, (tensor,)) for function in functions for tensor in (x, x.bfloat16())])


@pytest.mark.usefixtures("passes")
def test_reductions_of_nothing() -> None:
    x = torch.empty(3, 0)
    functions: list[Callable[..., Any]] = [
        lambda x: aten.sum.dim_IntList(x, [1]),
        lambda x: aten.sum(x),
        lambda x: aten.prod.dim_int(x, 1),
        lambda x: aten.mean.dim(x, [1]),
        lambda x: aten.any.dim(x, 1),
        lambda x: aten.all.dim(x, 1),
        lambda x: aten.var.correction(x, [1]),
        lambda x: aten.linalg_vector_norm(x, 2, [1]),
    ]
    check([(function, (x,)) for function in functions])
    check([(lambda x: aten.sum(x), (x.long(),))])
    check([(lambda x: aten.sum.dim_IntList(x, [0]), (x,))])  # and nothing to write


@pytest.mark.usefixtures("passes")
def test_rows_of_one_element() -> None:
    x = torch.randn(4, 1, 3)
    functions: list[Callable[..., Any]] = [
        lambda x: aten.sum.dim_IntList(x, [1]),
        lambda x: aten.max.dim(x, 1),
        lambda x: aten.var_mean.correction(x, [1], correction=0),
        lambda x: aten.var.correction(x, [1]),
        lambda x: aten._softmax(x, 1, False),
        lambda x: aten._log_softmax(x, 1, False),
    ]
    check([(function, (x,)) for function in functions])
    made = kernel(lambda x: aten.sum(x), torch.tensor([-0.0]))
    assert str(made(torch.tensor([-0.0]))[0].item()) == "0.0"


def softmaxes(operator: Any, dtype: torch.dtype) -> Any:
    cases = []
    for shape in ((7,), (5, 37), (40, 3), (2, 3, 4, 5)):
        for dim in range(-1, len(shape)):
            ways = list(layouts(shape, dtype))
            cases.append((lambda x, d=dim: operator(x, d, False), (ways[dim % len(ways)],)))
    return cases


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax(dtype: torch.dtype) -> None:
    check(softmaxes(aten._softmax, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log_softmax(dtype: torch.dtype) -> None:
    check(softmaxes(aten._log_softmax, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_log_softmax_of_half_types_is_rounded_once(dtype: torch.dtype) -> None:
    for ours, eagers in errors(softmaxes(aten._log_softmax, dtype)):
        assert ours <= eagers  # eager rounds the logarithm of the sum, too


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_backward(dtype: torch.dtype) -> None:
    cases = []
    for shape in ((5, 37), (40, 3), (2, 3, 4)):
        for dim in range(len(shape)):
            gradient, x = torch.randn(shape).to(dtype), torch.randn(shape)
            soft, log = torch.softmax(x, dim).to(dtype), torch.log_softmax(x, dim).to(dtype)
            cases.append((lambda g, y, d=dim: aten._softmax_backward_data(g, y, d, dtype), (gradient, soft)))
            cases.append((lambda g, y, d=dim: aten._log_softmax_backward_data(g, y, d, dtype), (gradient, log)))
    check(cases)


def test_softmax_of_a_scalar() -> None:
    check([(lambda x: aten._softmax(x, 0, False), (torch.tensor(3.0),))])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(dtype: torch.dtype, affine: bool) -> None:
    cases = []
    for shape, count in (((5, 37), 1), ((4, 3, 8), 1), ((4, 3, 8), 2), ((6,), 1), ((2, 600), 1)):
        inner = list(shape[len(shape) - count :])
        weight, bias = (torch.randn(inner).to(dtype) if affine else None for _ in range(2))
        cases += [
            (lambda x, w, b, n=inner: aten.native_layer_norm(x, n, w, b, 1e-5), (x, weight, bias))
            for x in list(layouts(shape, dtype))[
                :3
            ]  # what is broadcast differs from its mean by eager's rounding alone
        ]
    check(cases)


@pytest.mark.parametrize("how", ["blocks", "elements"])
def test_rows_of_any_shape_are_read_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_once(monkeypatch, how)
    over_dims(aten.max.dim, torch.float32, single=True)
    over_dims(aten.min.dim, torch.bool, single=True)
    over_dims(aten.argmax.default, torch.int16, single=True)
    over_dims(lambda x, dim, keepdim: aten.var_mean.correction(x, dim, keepdim=keepdim), torch.bfloat16)
    check(softmaxes(aten._softmax, torch.float32))
    x, weight = torch.randn(2, 6, 300), torch.randn(300)
    check([(lambda x, w: aten.native_layer_norm(x, [300], w, w, 1e-5), (x.half(), weight.half()))])
    check([(lambda x: aten.native_group_norm(x, None, None, 2, 6, 300, 3, 1e-5), (x.double(),))])


@pytest.mark.usefixtures("passes")
def test_norms_of_rows_of_one_element() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    cases = [
        (lambda x: aten.native_layer_norm(x[:, :1], [1], None, None, 1e-5)[0], (x,)),
        (lambda x, w: aten.native_group_norm(x, w, w, 3, 8, 1, 8, 1e-5)[0], (x, weight)),
    ]
    for ours, eagers in errors(cases):
        assert ours <= eagers  # the mean is the element itself: their difference is 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (3, 8), (1, 4, 9), (2, 6, 1)])
def test_group_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    n, c = shape[:2]
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(c).to(dtype), torch.randn(c).to(dtype)
    size = x.numel() // (n * c)
    cases = [
        (lambda x, w, b, g=groups: aten.native_group_norm(x, w, b, n, c, size, g, 1e-5), (x, *affine))
        for groups in {1, 2, c // 2}
        for affine in ((weight, bias), (None, None))
    ]
    if dtype is torch.float64:
        check(cases)
        return
    for ours, eagers in errors(cases):  # of few elements that are nearly alike, eager's statistics are inexact
        assert ours <= 2 * eagers + 1e-6


BATCHES = ((8, 3), (4, 5, 6), (2, 4, 5, 6), (1, 3, 2, 2, 2))


def batches(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield inputs of a batch norm, with weight, bias, running mean and variance."""
    for shape in BATCHES:
        x = torch.randn(shape).to(dtype)
        for tensor in (x, x.contiguous(memory_format=torch.channels_last)) if x.dim() == 4 else (x,):
            yield tensor, *(torch.rand(shape[1]) + 0.5 for _ in range(4))


def test_batch_norm_in_inference() -> None:
    def whole(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return aten._native_batch_norm_legit_no_training(x, *rest, 0.1, 1e-5)[0]

    cases = [(whole, args) for dtype in (torch.float32, torch.bfloat16) for args in batches(dtype)]
    check(cases)
    check([(lambda x, m, v: whole(x, None, None, m, v), (x, m, v)) for x, _, _, m, v in batches(torch.float32)])


@pytest.mark.usefixtures("passes")
def test_batch_norm_in_training() -> None:
    def whole(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return aten._native_batch_norm_legit_functional(x, *rest, True, 0.1, 1e-5)

    def plain(x: torch.Tensor) -> Any:
        return aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)

    check([(whole, args) for args in batches(torch.float32)])
    check([(plain, args[:1]) for args in batches(torch.float32)])


def test_batch_norm_without_its_statistics_is_refused() -> None:
    x, m = torch.randn(4, 3), torch.rand(3)
    refused = refusal(lambda x, m: aten._native_batch_norm_legit_functional(x, m, m, m, m, False, 0.1, 1e-5), x, m)
    assert refused is not None
    assert "not in training" in refused


NAN, INF = float("nan"), float("inf")

SPECIAL: dict[str, dict[int, float]] = {
    "ties": {100: 9.0, 700: 9.0, 40_000: 9.0, 3: -9.0, 2000: -9.0},
    "nan": {1700: NAN, 30_000: NAN, 5: INF},
    "nan at the end": {-1: NAN, 0: INF},
    "infinities": {600: INF, 20_000: -INF, 50: -INF},
    "a minimum of -inf": dict.fromkeys(range(1500), -INF),
}
"""Elements of a long row that are not like the others."""


def long_rows(dtype: torch.dtype) -> torch.Tensor:
    """Return rows of many blocks, with special elements in some places, and rows of one value."""
    found = []
    for special in SPECIAL.values():
        row = torch.randn(50_003).clamp(-4, 4)
        for place, value in special.items():
            row[place] = value
        found.append(row)
    found += [torch.full((50_003,), value) for value in (-INF, INF, NAN, 0.0)]
    return torch.stack(found).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("how", ["blocks", "elements"])
def test_special_elements_of_long_rows(dtype: torch.dtype, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_once(monkeypatch, how)
    x = long_rows(dtype)
    functions: list[Callable[..., Any]] = [
        lambda x: aten.max.dim(x, 1),
        lambda x: aten.min.dim(x, 1),
        lambda x: aten.argmax(x, 1),
        lambda x: aten.argmax(x),
        lambda x: aten.argmin(x[-1]),
    ]
    check([(function, (x,)) for function in functions])
    # in columns
    across = x.t().contiguous().t()
    check([(function, (across,)) for function in functions])
    softmaxes: list[Callable[..., Any]] = [
        lambda x: aten._softmax(x, 1, False),
        lambda x: aten.logsumexp(x, [1]),
        lambda x: aten._log_softmax(x, 1, False),
    ]
    limit = None if dtype in (torch.float32, torch.float64) else -1  # eager rounds a half type's logarithm in between
    check([(function, (tensor,)) for function in softmaxes[:limit] for tensor in (x, across)])


@pytest.mark.usefixtures("passes")
def test_special_elements_of_spreads() -> None:
    x = long_rows(torch.float32)
    across = x.t().contiguous().t()
    functions: list[Callable[..., Any]] = [
        lambda x: aten.var.correction(x, [1]),
        lambda x: aten.std.correction(x, [1], correction=0),
        lambda x: aten.native_layer_norm(x, [x.shape[1]], None, None, 1e-5)[0],
        lambda x: aten._native_batch_norm_legit.no_stats(x.t()[..., None], None, None, True, 0.1, 1e-5)[0],
    ]
    cases = [(function, (tensor,)) for function in functions for tensor in (x, across)]
    for made, (function, args) in zip(kernels(cases), cases, strict=True):
        exact = listed(function(*(arg.double() for arg in args)))
        got, want = ([result.contiguous() for result in results] for results in (made(*args), listed(function(*args))))
        # where eager sums up float32 in float32, in one thread, its last digits are not the standard
        assert_as_exact(got, want, exact, 2, "spread")


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_places_in_long_rows_of_integers(dtype: torch.dtype) -> None:
    x = values((3, 5001), dtype)
    functions: list[Callable[..., Any]] = [lambda x: aten.max.dim(x, 1), lambda x: aten.min.dim(x, 1)]
    if dtype is not torch.bool:
        functions += [lambda x: aten.argmax(x), lambda x: aten.argmin(x.t())]
        x[1], x[2] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    check([(function, (x,)) for function in functions])


def test_a_large_mean_costs_no_digits(passes: str) -> None:
    functions: list[Callable[..., Any]] = [
        lambda x: aten.var_mean.correction(x, [1]),
        lambda x: aten.native_layer_norm(x, [x.shape[1]], None, None, 1e-5),
        lambda x: aten._native_batch_norm_legit.no_stats(x.t(), None, None, True, 0.1, 1e-5),
        lambda x: aten.native_group_norm(x[..., None], None, None, x.shape[0], x.shape[1], 1, 1, 1e-5),
    ]
    x = torch.randn(4, 100_000) + 1e4
    across = x.t().contiguous().t()
    cases = [(function, (x,)) for function in functions] + [(function, (across,)) for function in functions[:-1]]
    for made, (function, args) in zip(kernels(cases), cases, strict=True):
        exact = listed(function(*(arg.double() for arg in args)))
        got, want = ([result.contiguous() for result in results] for results in (made(*args), function(*args)))
        assert_as_exact(got, want, exact, 2, passes)


LONG: list[Callable[..., Any]] = [
    lambda x: aten.sum.dim_IntList(x, [-1]),
    lambda x: aten.mean.dim(x, [-1]),
    lambda x: aten.sum.dim_IntList(x.transpose(0, 1), [0]),
    lambda x: aten.sum.dim_IntList(x, [0]),
    lambda x: aten.linalg_vector_norm(x, 2, [-1]),
    lambda x: aten.var.correction(x, [-1]),
    lambda x: aten._softmax(x, -1, False),
    lambda x: aten._log_softmax(x, -1, False),
    lambda x: aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5),
]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in ((8, 1 << 18), (11, 70_001), (300, 1000), (5000, 40))),
        *((shape, torch.bfloat16) for shape in ((8, 1 << 18), (300, 1000))),
    ],
    ids=str,
)
def test_errors_are_at_most_twice_eagers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    times = 2 if dtype is torch.float32 else 3
    for make in (torch.rand, torch.randn):
        x = make(shape).to(dtype)
        for ours, eagers in errors([(function, (x,)) for function in LONG]):
            assert ours <= times * eagers


@pytest.mark.parametrize("how", ["blocks", "elements"])
@pytest.mark.parametrize("shape", [(11, 70_001), (5000, 40)], ids=str)
def test_what_is_read_once_is_as_exact(shape: tuple[int, ...], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_once(monkeypatch, how)
    x = torch.randn(shape)
    for ours, eagers in errors([(function, (x,)) for function in LONG[5:]]):
        assert ours <= 2 * eagers


def everything_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return aten.sum(x), aten.amax(x), aten.argmax(x), aten.var(x), aten._softmax(x, 0, False)


def every_column_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return aten.argmax(x, 0), aten.var.correction(x, [0]), aten._softmax(x, 0, False)


@pytest.mark.usefixtures("passes")
def test_a_long_row_gives_the_same_with_any_number_of_threads() -> None:
    for function, x in ((everything_of, torch.randn(1 << 20)), (every_column_of, torch.randn(20_001, 40))):
        made = kernel(function, x)
        before, results = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                results.append(made(x))
        finally:
            torch.set_num_threads(before)
        for found in results[1:]:
            assert all(torch.equal(one, other) for one, other in zip(results[0], found, strict=True))
        check([(function, (x,))])
