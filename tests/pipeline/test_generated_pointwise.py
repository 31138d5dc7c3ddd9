"""Generated kernels of operators that are one expression per element, against eager PyTorch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.single import run_overload
from kagent_core.testing.compare import assert_same

from .pointwise_cases import DTYPES, FLOATS, INTEGERS, Case, Results, cases_of, numbers, overload, pairs
from .traced import CPU, close, traced

aten = torch.ops.aten


def eager(case: Case) -> Results | None:
    """What eager PyTorch gives, or None where it takes no such operands."""
    _, function, operands = case
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(*operands)
    except (RuntimeError, NotImplementedError):
        return None
    results = result if isinstance(result, tuple) else (result,)
    return None if any(r.is_complex() for r in results) else results


def run(cases: list[Case]) -> tuple[list[Results], set[str]]:
    """Run some cases as one graph, each operator a generated kernel; return results, and operators that were none."""
    tensors = {id(t): t for _, _, operands in cases for t in operands}
    places = {key: number for number, key in enumerate(tensors)}
    counts: list[int] = []

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        counts.clear()
        for _, op, operands in cases:
            result = op(*(given[places[id(t)]] for t in operands))
            results = result if isinstance(result, tuple) else (result,)
            counts.append(len(results))
            made.extend(results)
        return made

    graph = traced(function, *tensors.values(), **CPU, generated_kernels="all", fusion=False)
    flat = iter(graph(tuple(tensors.values())))
    got = [tuple(itertools.islice(flat, count)) for count in counts]
    tasks = [task for plan in graph.plans() for task in plan.tasks]
    busy = (task for task in tasks if any(spec.numel for spec in task.calls[0].outputs))
    other = {task.calls[0].signature for task in busy if task.kernel.origin != "generated"}
    close(graph)
    return got, other


def differences(cases: list[Case], got: list[Results], want: list[Results]) -> list[str]:
    """What is not as eager has it, in a vector or alone: ATen's two kinds of loops do not always agree."""
    found = []
    for case, mine, theirs in zip(cases, got, want, strict=True):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            try:
                torch.testing.assert_close(one, other, equal_nan=True)
            except AssertionError as error:
                wrong = _wrong_elements(case, number, one, other)
                if wrong:
                    found.append(f"{case[0]}: {str(error).splitlines()[0]} {wrong}")
    return found


def _wrong_elements(case: Case, number: int, one: torch.Tensor, other: torch.Tensor) -> str:
    _, _, operands = case
    if one.shape != other.shape or one.dtype != other.dtype or any(t.shape != one.shape for t in operands):
        return f"of {[list(t.shape) for t in operands]}: {one.flatten()[:9]} against eager's {other.flatten()[:9]}"
    wrong = []
    for place in itertools.product(*map(range, one.shape)):
        if _close(one[place], other[place]):
            continue
        often = (eager((*case[:2], tuple(t[place].repeat(count) for t in operands))) for count in (1, 64))
        if not any(_close(one[place], results[number][0]) for results in often if results is not None):
            wrong.append(f"of {[t[place].item() for t in operands]}: {one[place]} against eager's {other[place]}")
    return "; ".join(wrong[:4])


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError:
        return False
    return True


def check(cases: list[Case], exactly: bool = False) -> None:
    """Compare generated kernels with eager, where that takes the operands."""
    tried = [(case, eager(case)) for case in cases]
    taken = [case for case, want in tried if want is not None]
    want = [want for _, want in tried if want is not None]
    assert taken, "eager PyTorch takes none of these"
    got, other = run(taken)
    assert not other, f"no kernels were generated for {sorted(other)}"
    wrong = differences(taken, got, want)
    if exactly:
        for (name, *_), mine, theirs in zip(taken, got, want, strict=True):
            equal = (torch.equal(one.nan_to_num(7), two.nan_to_num(7)) for one, two in zip(mine, theirs, strict=True))
            if not all(equal):
                wrong.append(f"{name}: not rounded as in eager")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator_of_a_type(dtype):
    check(list(cases_of(dtype)))


# -- layouts


def layouts(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Operands that broadcast, of many shapes and strides."""
    base = torch.arange(1, 400).to(dtype)
    square, cube = base[: 5 * 13].view(5, 13), base[: 4 * 6 * 8].view(4, 6, 8)
    yield base[3], base[4]
    yield base[:0].view(0, 3), base[:3]
    yield base[:7], base[1]
    yield square, base[100:165].view(5, 13)
    yield square, base[20:33]
    yield base[:5].view(5, 1), base[20:33]
    yield square.t(), base[100:165].view(13, 5)
    yield square[1:4, 2:11:3], base[50:62].view(4, 3)[1:, :]
    yield cube.transpose(0, 2), cube.permute(2, 1, 0).contiguous()
    yield cube[:, 1:5:2, 3:], base[:5].expand(4, 2, 5)
    yield base[:40].view(1, 40, 1), base[30:60].view(30, 1, 1)
    yield cube.as_strided((3, 5), (2, 1), 7), base[:5]  # its elements overlap
    yield base.view(torch.uint8)[: 8 * base.element_size()].view(dtype), base[9:17]
    yield base[:96].view(2, 3, 4, 4).to(memory_format=torch.channels_last), base[:3].view(3, 1, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32], ids=str)
def test_layouts(dtype):
    operators: dict[str, Callable[..., Any]] = {
        "add": aten.add.Tensor,
        "floor_divide": aten.floor_divide,
        "where": lambda x, y: aten.where.self(aten.gt.Scalar(y, 20), x, y),
        "contiguous clone": lambda x, _: aten.clone(x, memory_format=torch.contiguous_format),
        "to float64": lambda x, _: aten._to_copy(x, dtype=torch.float64),
        "log_sigmoid_forward": lambda x, _: aten.log_sigmoid_forward(x),
    }
    pairs_of = list(layouts(dtype))
    check([(name, function, operands) for name, function in operators.items() for operands in pairs_of])


# -- types


@pytest.mark.parametrize("one", DTYPES, ids=str)
def test_two_types(one):
    """Two types are promoted; a tensor without dimensions, and a number, only to its category."""
    cases: list[Case] = []
    for other in DTYPES:
        x, y = pairs(one)[0], numbers(other, 200)
        y = y.repeat(-(-len(x) // len(y)))[: len(x)]
        cases += [
            (f"mul {other}", aten.mul.Tensor, (x, y)),
            (f"mul 0-dim {other}", aten.mul.Tensor, (x, torch.tensor(3).to(other))),
            (f"lt {other}", aten.lt.Tensor, (x, y)),
            (f"where {other}", lambda x, y: aten.where.self(aten.isnan(x), x, y), (x, y)),
        ]
    check(cases)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_as_in_eager(dtype):
    """Numbers and tensors without dimensions are rounded to a half type first by some operators, and not by others."""
    # a whole number of vectors: ATen's loops over what is left of one round otherwise
    x, y = (torch.randn(512, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2))
    number, single = 0.3334567, torch.tensor(0.3334567)
    cases: list[Case] = []
    names = ("add", "sub", "mul", "div", "remainder", "fmod", "lt", "eq", "maximum", "minimum", "pow", "floor_divide")
    for name in names:
        whole = getattr(aten, name)
        for what, function in {
            "x, y": lambda x, y, _, f=whole: f(x, y),
            "x, 0-dim": lambda x, _, s, f=whole: f(x, s),
            "0-dim, x": lambda x, _, s, f=whole: f(s, x),
            "x, number": lambda x, *_, f=whole: f(x, number),
        }.items():
            if name in ("maximum", "minimum") and what == "x, number":
                continue  # there is no such overload
            if name == "floor_divide" and what in ("x, y", "0-dim, x"):
                continue  # eager rounds on the way, and so misses the floor now and then
            cases.append((f"{name} {what}", function, (x, y, single)))
    cases += [
        ("add alpha", lambda x, y: aten.add.Tensor(x, y, alpha=number), (x, y)),
        ("sub alpha", lambda x, y: aten.sub.Tensor(x, y, alpha=number), (x, y)),
        ("rsub", lambda x: aten.rsub.Scalar(x, number), (x,)),
        ("leaky_relu", lambda x: aten.leaky_relu(x, number), (x,)),
        ("threshold", lambda x: aten.threshold(x, number, 0.1), (x,)),
        ("hardshrink", lambda x: aten.hardshrink(x, number), (x,)),
        ("softshrink", lambda x: aten.softshrink(x, 0.375), (x,)),
        ("addcmul", lambda x, y: aten.addcmul(x, y, x, value=number), (x, y)),
        ("addcdiv", lambda x, y: aten.addcdiv(x, y, x, value=number), (x, y)),
        ("lerp", lambda x, y: aten.lerp.Scalar(x, y, number), (x, y)),
        ("threshold_backward", lambda x, y: aten.threshold_backward(x, y, number), (x, y)),
        ("leaky_relu_backward", lambda x, y: aten.leaky_relu_backward(x, y, number, False), (x, y)),
        ("softshrink_backward", lambda x, y: aten.softshrink_backward(x, y, number), (x, y)),
        ("native_dropout_backward", lambda x, y: aten.native_dropout_backward(x, y > 0, number), (x, y)),
        ("square root", aten.sqrt.default, (x.abs(),)),
        ("reciprocal", aten.reciprocal.default, (x,)),
        ("cube", lambda x: aten.pow.Tensor_Scalar(x, 3), (x,)),
        ("inverse square", lambda x: aten.pow.Tensor_Scalar(x, -2), (x,)),
        ("hardswish", aten.hardswish.default, (x,)),
        ("clamp", lambda x: aten.clamp(x, -number, number), (x,)),
    ]
    check(cases, exactly=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_versions_of_pytorch_make_different_things_of_is_left_to_it(dtype):
    x, nan = numbers(dtype, 300), float("nan")
    calls = [(aten.clamp.default, x, *bounds) for bounds in ((nan,), (None, nan), (nan, 3), (2, nan))]
    calls += [(aten.clamp_min.default, x, nan), (aten.clamp_max.default, x, nan)]
    if dtype.is_floating_point:
        calls.append((aten.softshrink.default, x, 1 / 3))
    session = session_for(load_config({"device": "cpu", "generated_kernels": "all"}))
    for operator, *given in calls:
        assert_same(run_overload(session, operator, given, {}), operator(*given), f"{operator} of {given[1:]}")


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversions(source):
    x = numbers(source, 300)
    cases: list[Case] = [
        (f"to {target}", lambda x, target=target: aten._to_copy(x, dtype=target), (x,)) for target in DTYPES
    ]
    cases += [
        (f"copy to {target}", lambda x, y: aten.copy(y, x), (x, torch.zeros(len(x), dtype=target))) for target in DTYPES
    ]
    check(cases, exactly=True)


# -- new tensors


def test_new_tensors():
    kinds = (*INTEGERS, *FLOATS)
    cases: list[Case] = []
    for dtype in (torch.bool, *kinds):
        cases += [
            (f"full {dtype}", lambda t=dtype: aten.full((3, 5), 3, dtype=t), ()),
            (f"scalar_tensor {dtype}", lambda t=dtype: aten.scalar_tensor(3, dtype=t), ()),
            (f"zeros {dtype}", lambda t=dtype: aten.zeros((4,), dtype=t), ()),
            (f"ones {dtype}", lambda t=dtype: aten.ones((2, 1, 3), dtype=t), ()),
            (f"eye {dtype}", lambda t=dtype: aten.eye.m(3, 5, dtype=t), ()),
        ]
    for dtype in kinds:
        cases.append((f"arange {dtype}", lambda t=dtype: aten.arange.start_step(3, 90, 2, dtype=t), ()))
    cases += [
        ("arange", lambda: aten.arange(7), ()),
        ("arange of floats", lambda: aten.arange.start_step(0.3, -9.0, -0.37), ()),
        ("arange backwards", lambda: aten.arange.start_step(9, -9, -2), ()),
        ("arange float64", lambda: aten.arange.start_step(0.1, 3, 0.1, dtype=torch.float64), ()),
        ("full nan", lambda: aten.full((3,), float("nan")), ()),
        ("full true", lambda: aten.full((3,), True), ()),
        ("full large", lambda: aten.full((3,), 2**62 + 1), ()),
        ("eye", lambda: aten.eye(4), ()),
        ("nothing", lambda: aten.full((0, 3), 1.0), ()),
    ]
    check(cases)


# -- errors, and writing in place


@pytest.mark.parametrize("name", ["floor_divide", "remainder.Tensor", "fmod.Tensor"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_an_integer_divided_by_zero_is_an_error(name, dtype):
    x, zero = torch.arange(1, 40).to(dtype), torch.ones(39, dtype=dtype)
    graph = traced(lambda x, y: [overload(name)(x, y)], x, zero, **CPU, generated_kernels="all")
    (before,) = graph((x, zero))
    zero[17] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        overload(name)(x, zero)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        graph((x, zero))
    zero[17] = 1
    torch.testing.assert_close(graph((x, zero))[0], before)
    assert [t.kernel.origin for plan in graph.plans() for t in plan.tasks] == ["generated"]
    close(graph)


def test_the_least_integer_by_minus_one_does_not_trap():
    names = ("floor_divide", "remainder.Tensor", "fmod.Tensor")
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        least = torch.iinfo(dtype).min
        x, y = torch.full((5,), least, dtype=dtype), torch.full((5,), -1, dtype=dtype)
        graph = traced(lambda x, y: [overload(name)(x, y) for name in names], x, y, **CPU, generated_kernels="all")
        assert [result.tolist() for result in graph((x, y))] == [[least] * 5, [0] * 5, [0] * 5]
        close(graph)


@pytest.mark.parametrize("kind", ["copy", "same", "fill", "strided"])
def test_in_place(kind, monkeypatch):
    """Where no kernel is registered, a generated one writes in place."""
    monkeypatch.setattr(ExpressionGenerator, "prefers", lambda self, call: True)

    def function(x, y):
        if kind == "fill":
            return [aten.fill_.Scalar(x, 3)]
        if kind == "same":
            return [aten.copy_(x, x)]
        return [aten.copy_((x[:, 1:4] if kind == "strided" else x), y)]

    x = torch.randn(5, 7)
    y = torch.arange(3) if kind == "strided" else torch.randn(7, dtype=torch.float64)
    want, got = x.clone(), x.clone()
    function(want, y)
    graph = traced(function, got.clone(), y, **CPU, generated_kernels="all", fusion=False)
    graph((got, y))
    assert [t.kernel.origin for plan in graph.plans() for t in plan.tasks] == ["generated"]
    torch.testing.assert_close(got, want)
    close(graph)


def test_no_kernel_reads_what_it_has_written(monkeypatch):
    monkeypatch.setattr(ExpressionGenerator, "prefers", lambda self, call: True)
    x = torch.arange(20.0)
    graph = traced(lambda x: [aten.copy_(x[10:], x[:10])], x, **CPU, generated_kernels="all")
    graph((x,))
    assert all(t.kernel.origin != "generated" for plan in graph.plans() for t in plan.tasks)
    assert x.tolist() == [*range(10)] * 2
    close(graph)
