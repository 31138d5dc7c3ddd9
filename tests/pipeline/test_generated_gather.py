"""Operators whose elements are elements of other places, as generated kernels, against eager PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.loops import write_loops
from kagent_core.specs import flatten_tensors
from kagent_cpu.language import CLanguage

from ..codegen_programs import generator, kernels, listed, program
from .traced import CPU, close, compiled, traced

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of a type, all different as far as it goes."""
    made = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)
    if dtype == torch.bool:
        return made % 3 == 0
    if not dtype.is_floating_point:
        return (made % 120).to(dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def kinds(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A tensor in several layouts: contiguous, transposed, with an offset and gaps, expanded, channels-last."""
    made = [values(*shape, dtype=dtype), values(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))]
    made.append(values(*(2 * size + 1 for size in shape), dtype=dtype)[tuple(slice(1, None, 2) for _ in shape)])
    made.append(values(1, *shape[1:], dtype=dtype).expand(shape))
    if len(shape) == 4:
        made.append(values(*shape, dtype=dtype).to(memory_format=torch.channels_last))
    return made


def run(cases: list[Case], **options: Any) -> tuple[list[Any], set[str]]:
    """Run some cases as one graph; return the results of each, and the operators that no kernel was generated for."""
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
    graph = traced(function, *tensors, **{**CPU, "generated_kernels": "all", "fusion": False, **options})
    try:
        flat = iter(graph(tensors))
        got = [tuple(itertools.islice(flat, count)) for count in counts]
        tasks = [task for plan in graph.plans() for task in plan.tasks]
        other = {str(task.calls[0]) for task in tasks if task.kernel.origin != "generated"}
    finally:
        close(graph)
    return got, other


def one(op: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Compile one function that returns a tensor."""
    return traced(lambda x, i: [op(x, i)], *args, **CPU, generated_kernels="all")


def check(cases: list[Case], **options: Any) -> None:
    """Run some cases and compare with eager PyTorch."""
    got, other = run(cases, **options)
    assert not other, "no kernels were generated for:\n" + "\n".join(sorted(other))
    wrong = []
    for number, ((op, operands), mine) in enumerate(zip(cases, got, strict=True)):
        exact = listed(op(*(t.double() if t.dtype in HALVES else t for t in operands)))
        for got_one, want_one, exact_one in zip(mine, listed(op(*operands)), exact, strict=True):
            try:
                torch.testing.assert_close(got_one, want_one, equal_nan=True, check_stride=True)
            except AssertionError as error:
                if not is_as_near(got_one, want_one, exact_one):
                    wrong.append(f"case {number}, line {op.__code__.co_firstlineno}: {error}")
    assert not wrong, "\n".join(wrong)


def is_as_near(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether half types are as near to the exact result as eager's own: at most three times its error."""
    if got.dtype not in HALVES or got.stride() != want.stride():
        return False
    return bool((got - exact).abs().max() <= 3 * (want - exact).abs().max())


def over(op: Callable[..., Any], *operands: list[torch.Tensor]) -> list[Case]:
    """A case for each layout of some operands; for every second one where the type is not the usual one."""
    cases = [(op, tuple(each)) for each in zip(*operands, strict=True)]
    return cases if operands[0][0].dtype == torch.float32 else cases[::2]


def joining(dtype: torch.dtype) -> list[Case]:
    a, b = kinds(3, 4, dtype=dtype), kinds(3, 2, dtype=dtype)
    other = torch.int32 if dtype != torch.bool else torch.uint8
    return [
        *over(lambda x, y: aten.cat([x, y], 1), a, b),
        *over(lambda x, y: aten.cat([x, y, x], -2), a, kinds(1, 4, dtype=dtype)),
        *over(lambda x: aten.cat([x] * 16, 1), a),
        (lambda x, y: aten.cat([x, y], 0), (a[0], values(2, 4, dtype=other))),
        (lambda e, x, y: aten.cat([e, x, y, e], 0), (torch.empty(0), a[1], a[2])),
        (lambda e, x: aten.cat([e, x, e, x], 0), (torch.empty(0, 4, dtype=dtype), a[1])),
        (lambda x, y: aten.cat([x, y], 1), (kinds(2, 3, 4, 2, dtype=dtype)[4], kinds(2, 2, 4, 2, dtype=dtype)[4])),
        *over(lambda x, y: aten.stack([x, y, x], 1), a, a[::-1]),
        (lambda x, y: aten.stack([x, y], -1), (values(3, 4, dtype=dtype), values(3, 4, dtype=other))),
        (lambda x, y: aten.stack([x, y]), (values(dtype=dtype), values(dtype=dtype))),
    ]


def turning(dtype: torch.dtype) -> list[Case]:
    a = kinds(3, 4, 5, dtype=dtype)
    return [
        *over(lambda x: aten.flip(x, [0, -1]), a),
        *over(lambda x: aten.roll(x, [2, -7, 11], [0, 1, -1]), a),
        *over(lambda x: aten.roll(x, [1, 1, 5], [1, 1, 2]), a[:2]),
        *over(lambda x: aten.roll(x, [7]), a),
        *over(lambda x: aten.roll(x, [0, 4], [0, 1]), a[:1]),
        *[case for k in (-1, 0, 1, 2, 3) for case in over(lambda x, k=k: aten.rot90(x, k, [2, 0]), a[:2])],
        *over(lambda x: aten.repeat(x, [2, 3, 1, 2]), a),
        *over(lambda x: aten.repeat(x, [2, 1, 3]), a),
        (lambda x: aten.repeat(x, [3]), (values(dtype=dtype),)),
        (lambda x: aten.flip(x, []), (values(dtype=dtype),)),
    ]


def copying(dtype: torch.dtype) -> list[Case]:
    a = kinds(3, 4, 5, dtype=dtype)
    return [
        *over(lambda x: aten.view_copy(x, [-1, 6]), [values(3, 4, 5, dtype=dtype)]),
        *over(lambda x: aten.permute_copy(x, [2, 0, -2]), a),
        *over(lambda x: aten.slice_copy(x, 1, -3, 99, 2), a),
        *over(lambda x: aten.select_copy(x, -1, -2), a),
        *over(lambda x: aten.unsqueeze_copy(x, -2), a),
        (lambda x: (aten.squeeze_copy(x), aten.squeeze_copy(x, 1), aten.squeeze_copy(x, [0, 2])), (values(1, 3, 1),)),
        *over(lambda x: aten.expand_copy(x, [2, -1, 4, -1]), [values(3, 1, 5, dtype=dtype)]),
        *over(lambda x: (aten.diagonal_copy(x, 1, 0, 2), aten.diagonal_copy(x, -1, -1, 0)), a),
        *over(lambda x: aten.transpose_copy(x, 0, -1), a),
        (lambda x: aten.t_copy(x), (values(3, 4, dtype=dtype).t(),)),
        *over(lambda x: aten.unfold_copy(x, 1, 2, 1), a),
        (lambda x: aten.as_strided_copy(x, [2, 3, 2], [3, 1, 2]), (values(3, 4, dtype=dtype),)),
        *over(lambda x: aten.split_copy(x, 2, 1), a),
        *over(lambda x: aten.unbind_copy(x, 2), a),
        *over(lambda x: (aten.alias_copy(x), aten.detach_copy(x)), a),
        (lambda x: aten.pixel_shuffle(x, 3), (values(2, 18, 2, 3, dtype=dtype),)),
        (lambda x: aten.pixel_unshuffle(x, 2), (values(2, 3, 4, 6, dtype=dtype),)),
        *over(lambda x: aten.channel_shuffle(x, 3), kinds(2, 6, 2, 3, dtype=dtype)[:3]),
    ]


def inserting(dtype: torch.dtype) -> list[Case]:
    a = kinds(4, 5, dtype=dtype)
    return [
        *over(lambda x, y: aten.slice_scatter(x, y, 1, 1, -1, 2), a, kinds(4, 2, dtype=dtype)),
        *over(lambda x, y: aten.slice_scatter(x, y, 0, None, None, 1), a, a[::-1]),
        *over(lambda x, y: aten.slice_scatter(x, y, 0, -3, 99, 1), a, kinds(3, 5, dtype=dtype)),
        *over(lambda x, y: aten.select_scatter(x, y, 1, -2), a, kinds(4, dtype=dtype)),
        *over(lambda x, y: aten.diagonal_scatter(x, y, 2), a, kinds(3, dtype=dtype)),
        *over(lambda x, y: aten.diagonal_scatter(x, y, -1, 1, 0), a, kinds(4, dtype=dtype)),
        (lambda x, y: aten.as_strided_scatter(x, y, [2, 3], [7, 2], 1), (a[0], values(2, 3, dtype=dtype))),
        (lambda x, y: aten.as_strided_scatter(x, y, [4, 1, 2], [1, 3, 10]), (a[0], values(4, 1, 2, dtype=dtype))),
        *over(lambda y: aten.slice_backward(y, [4, 7], 1, 1, 6, 3), kinds(4, 2, dtype=dtype)),
        *over(lambda y: aten.select_backward(y, [4, 3, 2], 1, -1), kinds(4, 2, dtype=dtype)),
        *over(lambda y: aten.diagonal_backward(y, [3, 4, 2], 1, 0, 1), kinds(2, 3, dtype=dtype)),
        *over(lambda y: aten.diag_embed(y, -1, 0, 2), kinds(2, 3, dtype=dtype)),
        *over(lambda x: (aten.tril(x), aten.triu(x, 1), aten.tril(x, -2), aten.triu(x, -9), aten.tril(x, -9)), a),
        *over(lambda x: (aten.tril(x, 1), aten.triu(x)), kinds(2, 3, 4, dtype=dtype)),
    ]


def padding(dtype: torch.dtype) -> list[Case]:
    a, b = kinds(2, 3, 4, 5, dtype=dtype), kinds(2, 3, 4, dtype=dtype)
    found = [
        *over(lambda x: aten.constant_pad_nd(x, [1, 2, 0, 3], 1), a),
        *over(lambda x: aten.constant_pad_nd(x, [-1, 2, 1, -2, 0, 0, 3, -1]), a),
        *over(lambda x: aten.constant_pad_nd(x, [9, 8], 0), b),
        (lambda x: aten.constant_pad_nd(x, [1, 1, 2, 0], 1), (torch.empty(0, 3, dtype=dtype),)),
    ]
    if dtype.is_floating_point:
        found += [
            *over(lambda x: aten.reflection_pad1d(x, [3, 2]), b),
            *over(lambda x: aten.reflection_pad2d(x, [4, 1, -1, 3]), a),
            *over(lambda x: aten.reflection_pad3d(x, [1, 2, 3, 0, 1, 2]), a[:3]),
            *over(lambda x: aten.replication_pad1d(x, [7, 2]), b),
            *over(lambda x: aten.replication_pad2d(x, [4, 1, -1, 9]), a),
            *over(lambda x: aten.replication_pad3d(x, [1, 2, 3, 0, 1, 2]), a[:3]),
        ]
    return found


def looking_up(dtype: torch.dtype, index: torch.dtype) -> list[Case]:
    a = kinds(5, 4, 3, dtype=dtype)
    i, j = torch.tensor([[0, 4, 2], [3, 3, 1]], dtype=index), torch.tensor([[1], [-4]], dtype=index)
    i_t = torch.tensor([[0, 3], [4, 3], [2, 1]], dtype=index).t()
    return [
        *over(lambda x, i: aten.embedding(x, i, 2), [x[:, :, 1] for x in a], [i, i_t, i[0], i[0, 0]]),
        *over(lambda x, i: aten.index_select(x, 0, i), a, [i[0], i_t[1], i[0, 1], i[1]]),
        *over(lambda x, i: aten.index_select(x, -2, i), a, [i[0] % 4, i_t[1], i[0, 2], i[1]]),
        (lambda x, i: aten.index_select(x, 0, i), (values(dtype=dtype), torch.zeros(1, dtype=index))),
        *over(lambda x, i, j: aten.index(x, [i, j]), a, [i] * 4, [j] * 4),
        *over(lambda x, i, j: aten.index(x, [i, None, j % 3]), a, [i] * 4, [j] * 4),
        *over(lambda x, i, j: aten.index(x, [None, i % 4, j % 3]), a, [i, i, i[1], i[0, 1]], [j, j, j[0], j]),
        *over(lambda x, i: aten.index(x, [None, None, i % 3]), a, [i, i[1], i[0, 0], i]),
        *over(lambda x, i: aten.index(x, [i - 5]), a, [i, i[1], i[0, 0], i]),
        (lambda x, i: aten.index(x, [i, None, i % 3]).contiguous(), (a[1], i_t)),
        *over(lambda x, i: aten._unsafe_index(x, [i, None, i % 3]), a, [i] * 4),
        (lambda x, i: aten.index(x, [i, i]), (values(1, 1, 3, dtype=dtype), torch.zeros(2, 3, dtype=index))),
    ]


def looking_up_int64(dtype: torch.dtype) -> list[Case]:
    a = kinds(5, 4, 3, dtype=dtype)
    i = torch.randint(0, 3, (2, 3, 2), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True])
    far = torch.tensor([4, 900, -5])
    return [
        *over(lambda x, i: aten.gather(x, 0, i), a, [i, i.mT[:, :2], i[:1], i[:, :, :1].expand(2, 3, 3)]),
        *over(lambda x, i: aten.gather(x, -1, i), a, [i] * 4),
        (lambda x, i: aten.gather(x, 0, i), (values(dtype=dtype), torch.tensor(0))),
        (lambda x, i: aten.gather(x, 0, i), (values(4, dtype=dtype), torch.tensor(2))),
        *over(lambda x, i: aten.take(x, i * 17 - 34), a, [i] * 4),
        (lambda x, m, i: aten._unsafe_masked_index(x, m, [i], 7), (values(5, dtype=dtype), mask, far % 5)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moving(dtype):
    check([*joining(dtype), *turning(dtype), *copying(dtype), *inserting(dtype), *padding(dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_looking_up(dtype):
    check([*looking_up(dtype, torch.int32), *looking_up(dtype, torch.int64), *looking_up_int64(dtype)])


def upsampling(dtype: torch.dtype) -> list[Case]:
    lines, planes, bodies = (
        kinds(2, 3, 5, dtype=dtype),
        kinds(2, 3, 4, 5, dtype=dtype),
        [values(1, 2, 3, 4, 5, dtype=dtype)],
    )
    found = []
    for nearest in ("upsample_nearest", "_upsample_nearest_exact"):
        one, two, three = (getattr(aten, f"{nearest}{n}d") for n in (1, 2, 3))
        found += [
            *over(lambda x, op=one: (op(x, [10]), op(x, [7]), op(x, [3]), op(x, [11], 2.3), op(x, [15])), lines),
            *over(lambda x, op=two: (op(x, [8, 10]), op(x, [3, 11]), op(x, [9, 14], 2.3, 2.9), op(x, [4, 5])), planes),
            *over(lambda x, op=three: (op(x, [6, 8, 10]), op(x, [2, 5, 9])), bodies),
        ]
    for aligned in (False, True):
        one, two, three = aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d
        cubic = aten.upsample_bicubic2d
        found += [
            *over(lambda x, al=aligned, op=one: (op(x, [10], al), op(x, [3], al), op(x, [11], al, 2.3)), lines),
            *over(lambda x, al=aligned, op=two: (op(x, [8, 10], al), op(x, [3, 1], al)), planes),
            *over(lambda x, al=aligned, op=two: (op(x, [4, 11], al), op(x, [9, 14], al, 2.3, 2.9)), planes),
            *over(lambda x, al=aligned, op=three: (op(x, [6, 8, 10], al), op(x, [2, 5, 9], al)), bodies),
            *over(lambda x, al=aligned, op=cubic: (op(x, [8, 10], al), op(x, [3, 7], al)), planes),
        ]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_upsampling(dtype):
    check(upsampling(dtype))


def test_sampling():
    x = kinds(2, 3, 5, 4)
    grid = torch.rand(2, 3, 4, 2, generator=torch.Generator().manual_seed(1)) * 3 - 1.5
    cases: list[Case] = []
    every = itertools.product((0, 1, 2), (0, 1, 2), (False, True))
    for number, (mode, padding_mode, aligned) in enumerate(every):
        read = x[number % len(x)]
        cases += [(lambda x, g, m=mode, p=padding_mode, a=aligned: aten.grid_sampler_2d(x, g, m, p, a), (read, grid))]
    body, far = values(1, 2, 3, 4, 5), torch.rand(1, 2, 2, 3, 3, generator=torch.Generator().manual_seed(2)) * 3 - 1.5
    for mode, padding_mode, aligned in itertools.product((0, 1), (0, 1, 2), (False, True)):
        cases += [(lambda x, g, m=mode, p=padding_mode, a=aligned: aten.grid_sampler_3d(x, g, m, p, a), (body, far))]
    check(cases)


def test_sampling_at_places_that_are_no_numbers():
    grid = torch.tensor([[[[float("nan"), 0.0], [float("inf"), 0.0], [-1e38, 1e38], [-float("inf"), float("nan")]]]])
    ops = [
        lambda x, g, m=mode, p=padding_mode: aten.grid_sampler_2d(x, g, m, p, False)
        for mode, padding_mode in itertools.product((0, 1, 2), (0, 1, 2))
    ]
    run([(op, (values(1, 2, 5, 4), grid)) for op in ops])  # no address lies outside of the tensor


def pooling(dtype: torch.dtype) -> list[Case]:
    x, body = kinds(2, 3, 7, 6, dtype=dtype), [values(1, 2, 4, 5, 6, dtype=dtype)]
    ties = [(t * 2).round() for t in x] if dtype.is_floating_point else x
    op, three = aten.max_pool2d_with_indices, aten.max_pool3d_with_indices
    found = [
        *over(lambda x: op(x, [2, 2]), ties),
        *over(lambda x: op(x, [3, 2], [2, 1], [1, 0], [1, 2]), ties),
        *over(lambda x: op(x, [3], [2], [1], 2, True), ties),
        *over(lambda x: three(x, [2], [1, 2, 2], 1), body),
    ]
    if dtype.is_floating_point:
        holes = values(2, 3, 7, 6, dtype=dtype)
        holes[0, :, 1:3, 2:4] = float("nan")
        holes[1, :, 3:, :] = -float("inf")
        avg, adaptive, largest = aten.avg_pool2d, aten._adaptive_avg_pool2d, aten.adaptive_max_pool2d
        found += [
            *over(lambda x: op(x, [3, 3], [1, 1], [1, 1]), [holes, holes.to(memory_format=torch.channels_last)]),
            *over(lambda x: (avg(x, [2, 2]), avg(x, [3, 2], [2, 1], [1, 1])), x),
            *over(lambda x: (avg(x, 3, 2, 1, True), avg(x, 3, 2, 1, True, False), avg(x, 3, 2, 1, False, True, 5)), x),
            *over(lambda x: (adaptive(x, [3, 2]), adaptive(x, [7, 6]), adaptive(x, [2, 4]), adaptive(x, [9, 8])), x),
            *over(lambda x: aten._adaptive_avg_pool3d(x, [3, 2, 3]), body),
            *over(lambda x: (largest(x, [3, 2]), largest(x, [4, 5]))[0], [*x, holes]),
            *over(lambda x: (largest(x, [3, 2]), largest(x, [4, 5]))[1], [*x, holes]),
            *over(lambda x: aten.adaptive_max_pool3d(x, [3, 2, 3]), body),
        ]
    if dtype == torch.float32:
        found += over(lambda x: (aten.avg_pool3d(x, 2, 2, 1, True), aten.avg_pool3d(x, [2, 3, 1], 1, 0)), body)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_pooling(dtype, monkeypatch):
    # by the rules here, not by the parametrised kernels that outrank them
    own = ExpressionGenerator(CLanguage(), write_loops, prefers_all=True)
    monkeypatch.setattr("kagent_cpu.generate.code_generator", lambda config: own)
    columns = over(lambda x: aten.im2col(x, [2, 3], [2, 1], [1, 2], [1, 2]), kinds(2, 3, 7, 6, dtype=dtype))
    check(pooling(dtype) + (columns if dtype.is_floating_point else []), plan_cache_size=31)  # a session of its own


LOOKUPS = {
    "embedding": (lambda x, i: aten.embedding(x, i), IndexError),
    "index": (lambda x, i: aten.index(x, [i]), IndexError),
    "index twice": (lambda x, i: aten.index(x, [i, i]), IndexError),
    "index_select 0": (lambda x, i: aten.index_select(x, 0, i[0]), IndexError),
    "index_select 1": (lambda x, i: aten.index_select(x, 1, i[0]), RuntimeError),
    "gather": (lambda x, i: aten.gather(x, 0, i), RuntimeError),
    "gather 1": (lambda x, i: aten.gather(x, 1, i), RuntimeError),
    "take": (lambda x, i: aten.take(x[0], i), IndexError),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("size", [1, 4])
def test_wrong_indices_are_reported_and_read_nothing(name, size):
    op, error = LOOKUPS[name]
    x = values(size, size)
    right, wrong = torch.zeros(1, size, dtype=torch.int64), torch.full((1, size), size)
    graph = one(op, x, right)
    for value in (size, -size - 1, 2**62, -(2**63), 2**31):
        wrong[0, -1] = value
        with pytest.raises(error) as mine:
            graph((x, wrong))
        with pytest.raises(error) as theirs:
            op(x, wrong)
        assert isinstance(mine.value, type(theirs.value))
        assert name.partition(" ")[0] in str(mine.value)
    torch.testing.assert_close(graph((x, right))[0], op(x, right))  # a report is forgotten
    tasks = [task for plan in graph.plans() for task in plan.tasks]
    assert all(task.kernel.origin == "generated" for task in tasks)
    close(graph)


def test_a_wrong_index_counts_where_the_tensor_read_is_computed_or_constant():
    wrong = torch.tensor([1])
    for op in (
        lambda x, i: aten.index(aten.exp(x), [i]),
        lambda x, i: aten.embedding(aten.full([1, 4], 2.0), i),
        lambda x, i: aten.index(x.expand(1, 4), [i]),
    ):
        graph = one(op, values(1, 4), wrong)
        with pytest.raises(IndexError):
            graph((values(1, 4), wrong))
        close(graph)


def test_operators_that_are_left_to_aten():
    cases: list[Case] = [
        (lambda x: aten.cat([x] * 17, 1), (values(3, 4),)),
        (lambda x: aten.cat([x] * 18, 0), (values(3, 4),)),
    ]
    got, other = run(cases)
    assert len(other) == len(cases)
    for (op, operands), mine in zip(cases, got, strict=True):
        torch.testing.assert_close(mine[0], op(*operands))


def compositions() -> list[Case]:
    x, y, i = values(4, 6), values(4, 6) + 3, torch.tensor([3, 0, 5, 2])
    image = values(1, 2, 4, 4)
    return [
        (lambda x, y, i: aten.index_select(functional.pad(aten.cat([x, aten.exp(y)], 1), [1, 2]), 1, i), (x, y, i)),
        (lambda x, y: aten.cat([x * 2, aten.relu(y), x], 0) + 1, (x, y)),
        (lambda x: torch.tril(torch.softmax(x, -1)), (x,)),
        (lambda x: torch.softmax(torch.tril(x), -1), (x,)),
        (lambda x: aten.flip(torch.softmax(x, -1), [1]), (x,)),
        (lambda x: aten.roll(torch.softmax(x, -1), [1], [0]), (x,)),
        (lambda x: aten.roll(torch.softmax(x, -1), [2], [1]), (x,)),
        (lambda x: aten.constant_pad_nd(torch.softmax(x, -1), [1, -1], 7), (x,)),
        (lambda x: aten.constant_pad_nd(torch.softmax(x, -1), [0, 0, 1, -1], 7), (x,)),
        (lambda x: aten.constant_pad_nd(aten.exp(x).view(2, 12), [2, 1, 1, 0], 0.5) * 2, (x,)),
        (lambda x: aten.constant_pad_nd(aten.exp(x).t(), [2, -1, -1, 0], 0.5).exp(), (x,)),
        (lambda x, y: aten.cat([aten.exp(x).view(3, 8), aten.neg(y).view(3, 8)], 1).view(6, 8).sin(), (x, y)),
        (lambda x, y: aten.slice_scatter(aten.exp(x), aten.neg(y)[:, :3], 1, 1, 6, 2), (x, y)),
        (lambda x, y: aten.slice_scatter(aten.exp(x).view(3, 8), aten.neg(y).view(3, 8)[:, :3], 1, 1, 6, 2), (x, y)),
        (lambda x, y: aten.cat([x, y], 1)[:, 2:10] * 2, (x, y)),
        (lambda x, i: aten.embedding(aten.exp(x).view(6, 4), i) + 1, (x, i)),
        (lambda x: aten.roll(aten.exp(x).view(12, 2), [3]).view(8, 3) * 2, (x,)),
        (
            lambda x: aten.max_pool2d_with_indices(aten.reflection_pad2d(aten.relu(x), [1, 1, 2, 1]), [3], [1], [1]),
            (image,),
        ),
        (lambda x: aten.upsample_bilinear2d(aten.upsample_nearest2d(aten.sin(x), [8, 8]), [5, 9], False) * 2, (image,)),
        (lambda x: aten.sum(aten.cat([x * 2, x], 0), [1]), (x,)),
        (lambda x: aten.cat([aten.sum(x, [1], True), x], 1), (x,)),
        (
            lambda x, y: aten.remainder(
                aten.constant_pad_nd((x * 9).int(), [1, 1]), aten.constant_pad_nd((y * 9).int(), [1, 1], 3)
            ),
            (x, y),
        ),
    ]


def test_compositions():
    check(compositions())
    check(compositions(), fusion=True)


def is_one_kernel(op: Callable[..., Any], operands: tuple[torch.Tensor, ...]) -> bool:
    """Whether all of a composition can be one kernel that writes nothing but its results."""
    made = program(op, *operands)
    returned = {spec.buffer for spec in flatten_tensors(made.outputs)}
    inner = [spec.buffer for call in made.calls for spec in call.outputs if spec.buffer not in returned]
    return generator().can_generate(made.calls, inner) is None


def test_one_kernel_of_several():
    taken = [case for case in compositions() if is_one_kernel(*case)]
    assert len(taken) > 15
    for (op, operands), made in zip(taken, kernels(taken), strict=True):
        for mine, theirs in zip(made(*operands), listed(op(*operands)), strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda text, op=op: f"{op.__code__.co_firstlineno}: {text}")


def test_through_torch_compile():
    def function(x, table, ids, mask):
        rows = functional.embedding(ids, table)
        joined = torch.cat([rows, functional.pad(x, (1, 1))], -1)
        turned = torch.roll(joined.flip(-1), 2, 0)
        up = functional.interpolate(turned[None], scale_factor=2.0, mode="linear")
        return (
            up,
            functional.interpolate(x[None, None], scale_factor=2.0),
            turned[ids % 2, ids],
            turned.masked_fill(mask, 0.0).tril(),
        )

    x, table, ids = values(2, 3, 4)[0], values(10, 5), torch.tensor([1, 9, 4])
    mask = torch.tensor([True, False, False])[:, None]
    torch._dynamo.reset()
    got = compiled(lambda *a: function(*a), **CPU, generated_kernels="all")(x, table, ids % 3, mask)
    torch.testing.assert_close(got, function(x, table, ids % 3, mask), check_stride=True)
