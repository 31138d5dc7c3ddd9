"""Parametrised kernels of pooling, scattering, cumulative, sorting and selecting operators, against eager PyTorch."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from .traced import CPU, close, traced

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
GENERATED = {**CPU, "generated_kernels": "all", "fusion": False}


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, nan: bool = False) -> torch.Tensor:
    """Random numbers of a type; with `nan` also NaN, infinities, both zeros and ties where it has them."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        low, high = (0, 2) if dtype == torch.bool else (0, 100) if dtype == torch.uint8 else (-50, 50)
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    made = torch.randn(shape, generator=generator)
    if nan:
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1.0])
        chosen = torch.randint(0, 3 * len(special), shape, generator=generator)
        made = torch.where(chosen < len(special), special[chosen % len(special)], made)
    return made.to(dtype)


def places(size: int, *shape: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> torch.Tensor:
    """Random indices."""
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """A tensor in several layouts: contiguous, transposed, with an offset and gaps, channels-last."""
    order = list(reversed(range(x.dim())))
    wide = x.new_zeros([2 * size + 1 for size in x.shape])
    gaps = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    made = [x, x.permute(order).contiguous().permute(order), gaps.copy_(x)]
    return made + ([x.to(memory_format=torch.channels_last)] if x.dim() == 4 else [])


@dataclass
class Case:
    """One call of an operator.

    With `exact` its results equal eager's. Else they are as near to float64's as eager's are, up to the factor that
    sums in another order may have.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    exact: bool = False

    def results(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Call it."""
        made = self.op(*args)
        return list(made) if isinstance(made, (tuple, list)) else [made]


def call(op: Callable[..., Any], *args: Any) -> Case:
    """A case that is compared with float64."""
    return Case(op, args)


def exactly(op: Callable[..., Any], *args: Any) -> Case:
    """A case that is compared exactly."""
    return Case(op, args, exact=True)


def run(cases: list[Case]) -> list[list[torch.Tensor]]:
    """Run some cases as one graph, in which every operator must have a generated kernel."""
    leaves, tree = pytree.tree_flatten([case.args for case in cases])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    counts: list[int] = []

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(given)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        made = [case.results(args) for case, args in zip(cases, pytree.tree_unflatten(filled, tree), strict=True)]
        counts[:] = map(len, made)
        return [result for results in made for result in results]

    graph = traced(function, *tensors, **GENERATED)
    try:
        flat = iter(graph(tensors))
        tasks = [task for plan in graph.plans() for task in plan.tasks]
        others = {str(task.calls[0]) for task in tasks if task.kernel.origin != "generated"}
        assert not others, "no kernels were generated for:\n" + "\n".join(sorted(others))
        assert tasks
        return [list(itertools.islice(flat, count)) for count in counts]
    finally:
        close(graph)


def in_float64(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with every floating tensor in float64."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, args)


def near(mine: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """Assert that a result is as good as eager's."""
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    half = mine.dtype in (torch.float16, torch.bfloat16)
    known = truth.isfinite() & theirs.isfinite()
    # eager rounds some sums of half types once per term, so that a better result is not always close to its own
    one, other = (t.masked_fill(known, 0) if half else t for t in (mine, theirs))
    torch.testing.assert_close(one, other, equal_nan=True)
    if mine.dtype == torch.float64 or not known.any():
        return
    ours, eagers = ((t.double() - truth).abs()[known].max().item() for t in (mine, theirs))
    # half a unit in the last place of the greatest result is what rounding alone may cost
    floor = truth[known].abs().max().item() * torch.finfo(mine.dtype).eps / 2
    assert ours <= (3 if half else 2) * max(eagers, floor), f"error {ours}, eager's {eagers}"


def check(cases: Iterable[Case]) -> None:
    """Run some cases and compare with eager PyTorch."""
    cases = list(cases)
    wrong = []
    for number, (case, mine) in enumerate(zip(cases, run(cases), strict=True)):
        wanted = case.results(case.args)
        assert len(mine) == len(wanted)
        truths = wanted if case.exact else case.results(in_float64(case.args))
        for one, theirs, truth in zip(mine, wanted, truths, strict=True):
            try:
                if case.exact or not theirs.is_floating_point():
                    torch.testing.assert_close(one, theirs, rtol=0, atol=0, equal_nan=True)
                else:
                    near(one, theirs, truth)
            except AssertionError as error:
                kinds = [str(a.dtype) + str(tuple(a.shape)) if isinstance(a, torch.Tensor) else a for a in case.args]
                wrong.append(f"case {number}, {case.op} of {kinds}: {error}")
    assert not wrong, "\n".join(wrong)


# -- pooling


def test_max_pooling_and_its_gradient():
    def both(x, *window):
        made, indices = aten.max_pool2d_with_indices(x, *window)
        return made, indices, aten.max_pool2d_with_indices_backward(made, x, *full(window), indices)

    def full(window):
        rest = ([], [0], [1], False)
        given = [*window, *rest[len(window) - 1 :]]
        return [given[0], given[1] or given[0], *given[2:]]

    def both_3d(x, *window):
        made, indices = aten.max_pool3d_with_indices(x, *window)
        return made, indices, aten.max_pool3d_with_indices_backward(made, x, *full(window), indices)

    volume = values(2, 5, 6, 7, nan=True)
    windows = (([2, 2],), ([3], [2], [1]), ([3, 2], [2, 1], [1, 1], [1, 2], True), ([2], [3], [0], [2], True))
    x = values(2, 3, 9, 8, nan=True)
    check(
        [
            *(exactly(both, one, *window) for window in windows for one in layouts(x)),
            *(exactly(both, values(3, 9, 8, dtype=dtype, nan=True), [3, 3], [1, 2], [1]) for dtype in FLOATS),
            *(exactly(aten.max_pool2d_with_indices, values(2, 5, 6, dtype=dtype), [3]) for dtype in INTEGERS),
            *(exactly(both_3d, one, [2, 3, 2], [1, 2, 2], [1, 1, 0]) for one in layouts(volume)[:3]),
            exactly(both_3d, values(1, 2, 6, 6, 5), [2], [], [0], [2], True),
            exactly(aten.max_pool2d_with_indices, torch.full((1, 4, 4), -float("inf")), [2]),
            exactly(aten.max_pool2d_with_indices, values(0, 2, 4, 4), [2]),
        ]
    )


def test_average_pooling_and_its_gradient():
    def gradient_2d(x, grad, *window):
        return aten.avg_pool2d_backward(grad, x, *window)

    def cases():
        options = itertools.product((False, True), (False, True), (None, 3, -2))
        windows = (([3, 2], [2, 1], [1, 1]), ([2, 2], [3, 3], [1, 0]))
        for window, (ceil, pad, divisor) in itertools.product(windows, options):
            x = values(2, 3, 9, 8)
            made = aten.avg_pool2d(x, *window, ceil, pad, divisor)
            yield call(aten.avg_pool2d, x, *window, ceil, pad, divisor)
            yield call(gradient_2d, x, values(*made.shape), *window, ceil, pad, divisor)
        for dtype in FLOATS:
            for one in layouts(values(2, 3, 8, 7, dtype=dtype)):
                yield call(aten.avg_pool2d, one, [3], [], [1])
            yield call(gradient_2d, one, values(2, 3, 3, 3, dtype=dtype), [3, 3], [2, 2], [0, 0], False, True, None)
        yield call(aten.avg_pool2d, values(3, 8, 7, dtype=torch.int64), [3], [2])
        yield call(aten.avg_pool2d, values(0, 3, 8, 7), [3], [2])
        for one in layouts(values(2, 5, 6, 7)):
            yield call(aten.avg_pool3d, one, [2, 3, 2], [1, 2, 2], [1, 1, 0], True, False)
            grad = values(*aten.avg_pool3d(one, [2, 3, 2]).shape)
            yield call(aten.avg_pool3d_backward, grad, one, [2, 3, 2], [2, 3, 2], [0] * 3, False, True, None)

    check(cases())


def test_adaptive_pooling_and_its_gradient():
    def maxima(x, size):
        made, indices = aten.adaptive_max_pool2d(x, size)
        return made, indices, aten.adaptive_max_pool2d_backward(made, x, indices)

    def maxima_3d(x, size):
        made, indices = aten.adaptive_max_pool3d(x, size)
        return made, indices, aten.adaptive_max_pool3d_backward(made, x, indices)

    def cases():
        for dtype, size in itertools.product(FLOATS, ([3, 3], [1, 1], [7, 11], [8, 2])):
            for one in layouts(values(2, 3, 8, 7, dtype=dtype))[: 4 if dtype == torch.float32 else 1]:
                yield call(aten._adaptive_avg_pool2d, one, size)
            yield call(aten._adaptive_avg_pool2d_backward, values(2, 3, *size, dtype=dtype), one)
            yield exactly(maxima, values(2, 3, 8, 7, dtype=dtype, nan=True), size)
        for one in layouts(values(2, 5, 6, 7)):
            yield call(aten._adaptive_avg_pool3d, one, [3, 2, 9])
            yield call(aten._adaptive_avg_pool3d, one.bfloat16(), [3, 2, 4])
            yield call(aten._adaptive_avg_pool3d_backward, values(2, 3, 2, 9), one)
            yield exactly(maxima_3d, one, [3, 2, 4])
        yield call(aten._adaptive_avg_pool2d, values(0, 3, 8, 7), [2, 2])

    check(cases())


# -- scattering


def test_scatter():
    def cases():
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            x, src = values(4, 5, 6, dtype=dtype, nan=True), values(3, 7, 6, dtype=dtype, seed=1, nan=True)
            for dim in (0, 1, -1):
                index = places(x.shape[dim], 3, 5, 4, seed=2)
                yield exactly(aten.scatter.src, x, dim, index, src)
                yield exactly(aten.scatter.value, x, dim, index, 3 if dtype != torch.bool else True)
                yield call(aten.scatter_add, values(4, 5, 6, dtype=dtype), dim, index, values(3, 5, 6, dtype=dtype))
        for one, index, src in itertools.product(
            layouts(values(4, 5)), layouts(places(5, 3, 4)), layouts(values(4, 6, seed=1))
        ):
            yield exactly(aten.scatter.src, one, 1, index, src)
        yield exactly(aten.scatter.value, values(4), 0, places(4, 3, dtype=torch.int32), 1.5)
        yield exactly(aten.scatter.src, values(), 0, places(1), values(seed=1))
        yield exactly(aten.scatter.src, values(4, 5), 0, places(4, 0, 5), values(2, 5))
        yield exactly(aten.scatter.src, values(4, 5), 0, places(4, 3, 0), values(2, 5))
        yield exactly(aten.scatter_add, values(0, 5), 1, places(5, 0, 3), values(0, 3))

    check(cases())


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce_and_index_reduce(reduce):
    def scattered(*args):
        return aten.scatter_reduce.two(*args[:-1], include_self=args[-1])

    def indexed(*args):
        return aten.index_reduce(*args[:-1], include_self=args[-1])

    def cases():
        types = (*FLOATS, *INTEGERS, *((torch.bool,) if reduce != "mean" else ()))
        for dtype, include_self in itertools.product(types, (False, True)):
            x = values(3, 70, dtype=dtype, nan=reduce in ("amax", "amin"))
            src = values(2, 90, dtype=dtype, seed=1, nan=reduce in ("amax", "amin"))
            index = places(60, 2, 90)
            yield call(scattered, x, 1, index, src, reduce, include_self)
            if reduce != "sum" and (dtype != torch.bool or include_self):
                some = places(3, 5)
                given = values(5, 70, dtype=dtype, seed=2)
                yield call(indexed, x, 0, some, given, reduce, include_self)
        for one in layouts(values(4, 5)):
            yield call(aten.scatter_reduce.two, one, 0, places(4, 3, 5), values(3, 5, seed=1), reduce)
        yield call(aten.scatter_reduce.two, values(), 0, places(1), values(seed=1), reduce)
        if reduce in ("sum", "prod"):
            old = {"sum": "add", "prod": "multiply"}[reduce]
            for dtype in FLOATS:
                x, index = values(4, 5, dtype=dtype), places(4, 3, 5)
                yield call(lambda *a: aten.scatter.reduce(*a, reduce=old), x, 0, index, values(3, 5, dtype=dtype))
                yield call(lambda *a: aten.scatter.value_reduce(*a, reduce=old), x, 0, index, 2.5)

    check(cases())


def test_sums_of_many_half_values_are_rounded_once():
    def cases():
        for dtype in (torch.float16, torch.bfloat16):
            zeros, many = torch.zeros(3, dtype=dtype), torch.full((5000,), 0.1, dtype=dtype)
            yield exactly(aten.scatter_add, zeros, 0, torch.ones(5000, dtype=torch.int64), many)
            yield call(aten.index_add, zeros, 0, torch.ones(5000, dtype=torch.int64), many)
            # this one rounds every sum, in ATen
            yield exactly(aten.index_put, zeros, [torch.ones(5000, dtype=torch.int64)], many, True)

    check(cases())


def test_index_put():
    def cases():
        i, j = places(4, 3, 1) - 2, places(5, 1, 2, dtype=torch.int32)
        for dtype, accumulate in itertools.product((*FLOATS, *INTEGERS, torch.bool), (False, True)):
            x = values(4, 5, 6, dtype=dtype)
            put = functools.partial(values, dtype=dtype, seed=3)
            yield exactly(aten.index_put, x, [i.clone(), j.clone()], put(3, 2, 6), accumulate)
            if dtype not in (torch.float32, torch.bfloat16):
                continue
            yield exactly(aten.index_put, x, [None, places(5, 7) - 3], put(4, 7, 6), accumulate)
            yield exactly(aten.index_put, x, [places(4, 7), None, places(6, 7)], put(7, 5), accumulate)
            yield exactly(aten.index_put, x, [None, None, places(6, 9)], put(1, 1), accumulate)
            yield exactly(aten.index_put, x, [None, places(5, 3), places(6, 3)], put(), accumulate)
        for one, given in itertools.product(layouts(values(4, 5, 6)), layouts(values(4, 7, 6, seed=1))):
            yield exactly(aten.index_put, one, [None, places(5, 7)], given)
        yield exactly(aten.index_put, values(4, 5), [places(4)], values(5))
        yield exactly(aten.index_put, values(4, 5), [places(4, 0)], values(0, 5))
        yield exactly(aten.index_put, values(0, 5), [None, places(5, 3)], values(0, 3))
        for accumulate, mask in itertools.product((False, True), (values(4, 5), values(4, 5, 6))):
            yield exactly(aten.index_put, values(4, 5, 6), [mask > 0], values(), accumulate)
        yield exactly(aten.index_put, values(4, 5, 6), [None, values(5) > 0], values(1))
        yield exactly(aten._unsafe_index_put, values(4), [places(4, 9)], values(9), True)

    check(cases())


def test_index_add_copy_and_fill():
    def cases():
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            x = values(4, 5, 6, dtype=dtype)
            for dim in (0, 1, -1) if dtype == torch.float32 else (1,):
                shape = [9 if d == dim % 3 else size for d, size in enumerate(x.shape)]
                index, source = places(x.shape[dim], 9), values(*shape, dtype=dtype, seed=1)
                yield call(aten.index_add, x, dim, index, source)
                yield exactly(aten.index_copy, x, dim, index, source)
                yield exactly(aten.index_fill.int_Scalar, x, dim, index - x.shape[dim] + 1 - index % 2, 2)
        yield call(lambda *a: aten.index_add(*a, alpha=3), values(4, 5), 0, places(4, 9), values(9, 5))
        yield exactly(aten.index_copy, values(), 0, places(1, 1), values(1, seed=1))
        yield exactly(aten.index_fill.int_Scalar, values(4, 5), 0, places(4), 2.5)
        yield exactly(aten.index_fill.int_Tensor, values(4, 5), 0, places(4, 2), values())

    check(cases())


def test_masked_scatter_and_put():
    def cases():
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool):
            x = values(4, 5, dtype=dtype)
            for mask in layouts(values(4, 5) > 0):
                yield exactly(aten.masked_scatter, x, mask, values(3, 9, dtype=dtype, seed=1))
                yield exactly(aten.masked_scatter_backward, x, mask, [7, 4])
            yield exactly(aten.masked_scatter, x, values(5) > 0, values(4, 7, dtype=dtype, seed=1).t())
            for accumulate in (False, True):
                yield exactly(aten.put, x, places(20, 3, 5) - 7, values(15, dtype=dtype, seed=1), accumulate)
                yield exactly(aten.put, x.t(), places(20, 8), values(2, 4, dtype=dtype, seed=1), accumulate)
        yield exactly(aten.masked_scatter, values(4, 5), torch.zeros(4, 5, dtype=torch.bool), values(0))
        yield exactly(aten.masked_scatter, values(), torch.tensor(True), values(1, seed=1))
        yield exactly(aten.masked_scatter, values(0, 5), torch.zeros(5, dtype=torch.bool), values(3))
        yield exactly(aten.put, values(), places(1, 2), values(2))

    check(cases())


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (lambda x, i: aten.scatter.value(x, 0, i, 1.0), 3, 4),
        (lambda x, i: aten.scatter_add(x, 0, i, x), 0, -1),
        (lambda x, i: aten.scatter_reduce.two(x, 0, i, x, "mean"), 3, 4),
        (lambda x, i: aten.index_put(x, [i], x), -4, -5),
        (lambda x, i: aten.index_put(x, [i], x), 3, 4),
        (lambda x, i: aten.put(x, i, x), -4, -5),
        (lambda x, i: aten.searchsorted.Tensor(x, x, sorter=i), 3, 4),
        (lambda x, i: aten.masked_scatter(x, i > 3, x[:0]), 3, 4),
        (lambda x, i: aten.index_copy(x, 0, i, x), 0, -1),
        (lambda x, i: aten.index_fill.int_Scalar(x, 0, i, 1.0), -4, 4),
    ],
)
def test_an_index_out_of_range_is_an_error_and_the_next_call_is_right(function, good, bad):
    x, right, wrong = values(4), torch.tensor([good, 1, 2, 0]), torch.tensor([bad, 1, 2, 0])
    graph = traced(lambda *args: (function(*args),), x, right, **GENERATED)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(x, wrong)
    try:
        with pytest.raises(Exception, match=re.escape(str(eager.value))):
            graph([x, wrong])
        torch.testing.assert_close(graph([x, right])[0], function(x, right))
    finally:
        close(graph)


# -- cumulative


def test_cumulative_operators():
    def cases():
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            x, special = values(4, 30, 5, dtype=dtype), values(4, 30, 5, dtype=dtype, nan=True)
            for dim in (0, 1, -1):
                yield exactly(aten.cumsum, x, dim)
                yield exactly(aten.cumprod, x, dim)
                yield exactly(aten.cummax, special, dim)
                yield exactly(aten.cummin, special, dim)
            if dtype.is_floating_point:
                yield call(aten.logcumsumexp, x, 1)
                yield call(aten.logcumsumexp, special, 0)
            for other in (torch.float16, torch.float64, torch.int32, torch.int8):
                yield exactly(lambda *a: aten.cumsum(*a[:-1], dtype=a[-1]), x, 1, other)
        for one in layouts(values(4, 5, 6)):
            yield exactly(aten.cumsum, one, 1)
            yield exactly(aten.cummax, one, 0)
        for shape in ((), (0, 3), (3, 0)):
            for op in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin):
                yield exactly(op, values(*shape), 0)

    check(cases())


# -- sorting


def test_sort():
    def stable(x, dim, descending):
        return aten.sort.stable(x, stable=True, dim=dim, descending=descending)

    def unstable(x, *how):  # the order of equal values is not specified: what lies where the indices point is
        found, at = aten.sort(x, *how)
        return found, x.gather(how[0] if how else -1, at)

    def cases():
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            for descending, shape in itertools.product((False, True), ((5, 40, 2), (1, 3, 1))):
                yield exactly(stable, values(*shape, dtype=dtype, nan=True), 1, descending)
        for one in layouts(values(4, 5, 6, nan=True)):
            yield exactly(stable, one, 1, False)
            yield exactly(unstable, one, 0, True)
        for shape in ((), (0, 3), (3, 0), (4, 1), (4, 2)):
            yield exactly(stable, values(*shape), -1, False)
        yield exactly(unstable, torch.arange(1000).flip(0))
        yield exactly(stable, torch.zeros(1000), 0, True)

    check(cases())


def test_topk():
    inputs, sizes = [], ((1, 1), (7, -1), (50, 1), (2, 0))
    for dtype, largest in itertools.product((torch.float32, torch.bfloat16, torch.int64, torch.uint8), (False, True)):
        inputs += [(values(3, 50, dtype=dtype, nan=True), k, dim, largest) for k, dim in sizes]
    inputs += [(one, 3, 1, True) for one in layouts(values(4, 5, 6))]
    inputs += [(values(), 1, 0, True), (values(0, 4), 2, 1, True), (values(4), 0, 0, True)]
    made = run([call(aten.topk, *given) for given in inputs])
    for (x, k, dim, largest), (found, at) in zip(inputs, made, strict=True):
        torch.testing.assert_close(found, aten.topk(x, k, dim, largest)[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(x.gather(dim, at), found, rtol=0, atol=0, equal_nan=True)
        # which of equal elements are taken, and in which order, is not specified; each once
        assert at.unsqueeze(-1).sort(dim if at.dim() else 0)[0].diff(dim=dim if at.dim() else 0).ne(0).all()


def test_kthvalue_and_medians():
    inputs = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        for shape, nan in (((3, 20, 2), False), ((3, 21, 2), True), ((3, 1, 2), False)):
            x = values(*shape, dtype=dtype, nan=nan)
            inputs += [(aten.kthvalue, x, k, 1) for k in {1, (shape[1] + 1) // 2, shape[1]}]
            inputs += [(op, x, 1) for op in (aten.median.dim, aten.nanmedian.dim)]
    inputs += [(aten.kthvalue, one, 2, 0, True) for one in layouts(values(4, 5, 6))]
    inputs += [(aten.median.dim, one, -1, True) for one in layouts(values(4, 5, 6))]
    inputs += [(aten.median.dim, values(), 0), (aten.kthvalue, values(), 1, 0)]
    inputs += [(aten.nanmedian.dim, torch.full((2, 3), float("nan")), 1)]
    for (op, x, *rest), (found, at) in zip(inputs, run([call(*given) for given in inputs]), strict=True):
        torch.testing.assert_close(found, op(x, *rest)[0], rtol=0, atol=0, equal_nan=True)
        dim, kept = (rest[1], rest[2:]) if op is aten.kthvalue else (rest[0], rest[1:])
        index = at if kept or not x.dim() else at.unsqueeze(dim)
        there = x.gather(dim, index)
        there = there if kept or not x.dim() else there.squeeze(dim)
        torch.testing.assert_close(there, found, rtol=0, atol=0, equal_nan=True)


def test_medians_of_all_elements():
    shapes = ((), (1,), (4, 5), (3, 7))
    check(
        exactly(op, values(*shape, dtype=dtype, nan=nan))
        for op in (aten.median, aten.nanmedian)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8)
        for shape in shapes
        for nan in (False, True)
    )


def test_searchsorted_and_bucketize():
    def search(row, x, options):
        return aten.searchsorted.Tensor(row, x, **options)

    def sorted_by(row, x, sorter):
        return aten.searchsorted.Tensor(row, x, sorter=sorter)

    def cases():
        for dtype in (*FLOATS, *INTEGERS):
            row = values(30, dtype=dtype).sort()[0]
            x = torch.cat([values(4, 5, dtype=dtype, seed=1, nan=True).flatten(), row[3:6]])
            for options in ({}, {"right": True}, {"side": "right"}, {"side": "left"}, {"out_int32": True}):
                yield exactly(search, row, x, options)
            yield exactly(lambda *a: aten.bucketize.Tensor(*a, right=True), x, row)
            yield exactly(aten.searchsorted.Scalar, row, row[4].item())
            yield exactly(aten.bucketize.Scalar, row[4].item(), row)
        rows = values(3, 30, nan=False)
        yield exactly(search, rows.sort(-1)[0], values(3, 7, seed=1), {})
        yield exactly(sorted_by, rows, values(3, 7, seed=1), rows.argsort(-1))
        yield exactly(search, rows.sort(-1)[0].t().contiguous().t(), values(7, 3, seed=1).t(), {})
        yield exactly(search, values(5).sort()[0], values(), {})
        yield exactly(search, values(0), values(3), {})

    check(cases())


# -- with what follows them


def test_pointwise_operators_join_averages_and_gradients():
    def function(x, bias):
        averages = torch.relu(aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1]) * bias)
        parts = aten._adaptive_avg_pool2d(x, [3, 4]).exp() + bias
        gradient = aten.avg_pool2d_backward(averages, x, [3, 3], [2, 2], [1, 1], False, True, None) - x
        return averages, parts, gradient, aten.upsample_nearest2d_backward(x, [8, 6], [2, 3, 4, 3]).neg()

    for dtype in (torch.float32, torch.bfloat16):
        x, bias = values(2, 3, 8, 6, dtype=dtype), values(3, 1, 1, dtype=dtype)
        graph = traced(function, x, bias, **{**GENERATED, "fusion": True})
        try:
            for mine, theirs in zip(graph([x, bias]), function(x, bias), strict=True):
                torch.testing.assert_close(mine, theirs)
            assert [len(task.calls) for plan in graph.plans() for task in plan.tasks] == [3, 3, 2, 2]
        finally:
            close(graph)


def test_large_tensors_on_many_threads():
    x = values(8, 4, 64, 64)
    check(
        [
            exactly(aten.max_pool2d_with_indices, x, [2]),
            call(aten.avg_pool2d, x, [3], [1], [1]),
            exactly(aten.cumsum, x, 1),
            exactly(lambda t: aten.sort.stable(t, stable=True, dim=2), x),
            exactly(aten.scatter.src, x, 2, places(64, 8, 4, 64, 64), values(8, 4, 64, 64, seed=1)),
            exactly(aten.index_put, x, [None, None, places(64, 90)], values(90, 64, seed=1), True),
        ]
    )


# -- gradients of upsampling and padding, distances


def test_upsampling_gradients():
    def nearest(grad, size, op, *scales):
        return op(grad, grad.shape[2:], size, *scales)

    def linear(grad, size, op, corners, *scales):
        return op(grad, grad.shape[2:], size, corners, *scales)

    def cases():
        sizes = (((7, 6), (7, 6)), ((4, 3), (8, 6)), ((4, 5), (11, 13)), ((9, 8), (4, 5)), ((1, 3), (5, 1)))
        chosen = [*((torch.float32, size) for size in sizes), *((dtype, sizes[2]) for dtype in FLOATS[1:])]
        for dtype, ((h, w), made) in chosen:
            grad = values(2, 3, *made, dtype=dtype)
            for scales in ((), (2.3, 1.7)) if dtype == torch.float32 else ((),):
                yield call(nearest, grad, [2, 3, h, w], aten.upsample_nearest2d_backward, *scales)
                yield call(nearest, grad, [2, 3, h, w], aten._upsample_nearest_exact2d_backward, *scales)
                for corners in (False, True):
                    yield call(linear, grad, [2, 3, h, w], aten.upsample_bilinear2d_backward, corners, *scales)
        for one in layouts(values(2, 3, 11, 13)):
            yield call(nearest, one, [2, 3, 4, 5], aten.upsample_nearest2d_backward)
            yield call(linear, one, [2, 3, 4, 5], aten.upsample_bilinear2d_backward, False)
        yield call(nearest, values(2, 3, 9), [2, 3, 4], aten.upsample_nearest1d_backward)
        yield call(linear, values(2, 3, 9), [2, 3, 4], aten.upsample_linear1d_backward, True)
        yield call(nearest, values(2, 3, 5, 4, 9), [2, 3, 2, 3, 4], aten.upsample_nearest3d_backward)
        yield call(linear, values(2, 3, 5, 4, 9), [2, 3, 2, 3, 4], aten.upsample_trilinear3d_backward, False)

    check(cases())


def test_replication_padding_gradients():
    def cases():
        for dtype in FLOATS:
            for padding in ([1, 2, 3, 0], [-1, 2, 0, -2], [0, 0, 0, 0]):
                x = values(2, 3, 6, 7, dtype=dtype)
                made = values(2, 3, 6 + padding[2] + padding[3], 7 + padding[0] + padding[1], dtype=dtype)
                yield call(aten.replication_pad2d_backward, made, x, padding)
        yield call(aten.replication_pad1d_backward, values(3, 9), values(3, 5), [3, 1])
        yield call(aten.replication_pad1d_backward, values(3, 9), values(3, 1), [3, 5])
        yield call(aten.replication_pad3d_backward, values(2, 4, 5, 6), values(2, 3, 3, 3), [1, 2, 1, 1, 0, 1])

    check(cases())


def test_distances():
    def cases():
        for dtype, p in itertools.product((torch.float32, torch.float64), (0.0, 1.0, 2.0, 3.5, float("inf"))):
            for one in layouts(values(2, 6, 5, dtype=dtype)):
                yield call(aten._cdist_forward, one, values(2, 4, 5, dtype=dtype, seed=1), p, None)
            yield call(aten._pdist_forward, values(9, 4, dtype=dtype), p)
        yield call(aten._cdist_forward, values(6, 5), values(3, 4, 5), 2.0, None)
        yield call(aten._pdist_forward, values(1, 4), 2.0)

    check(cases())
