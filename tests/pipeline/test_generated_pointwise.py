"""Generated kernels of operators that are one expression per element, against eager PyTorch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kagent_core.codegen.generator import ExpressionGenerator

from .traced import CPU, close, traced

aten = torch.ops.aten

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS)


def values(dtype: torch.dtype) -> list[Any]:
    """Telling values of a type."""
    if dtype == torch.bool:
        return [False, True]
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        inside = (info.min, info.min + 1, -7, -2, -1, 0, 1, 2, 3, 7, 8, 31, 63, info.max - 1, info.max)
        return sorted({value for value in inside if info.min <= value <= info.max})
    finfo, inf = torch.finfo(dtype), float("inf")
    sizes = (0.0, finfo.smallest_normal / 4, finfo.eps, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 7.0, 19.0, finfo.max, inf)
    return [float("nan"), *(value * sign for value in sizes for sign in (1, -1))]


def numbers(dtype: torch.dtype, count: int = 53) -> torch.Tensor:
    """Telling values and others, more than fill the vectors of a loop."""
    generator = torch.Generator().manual_seed(count)
    some = torch.randn(count, generator=generator, dtype=torch.float64) * 3
    if not dtype.is_floating_point:
        some = some.round().abs() if dtype == torch.uint8 else some.round()
    return torch.cat([torch.tensor(values(dtype), dtype=dtype), some.to(dtype)])


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every telling value with every other one."""
    both = list(itertools.product(values(dtype), repeat=2))
    first, second = (torch.tensor(column, dtype=dtype) for column in zip(*both, strict=True))
    return torch.cat([first, numbers(dtype)]), torch.cat([second, numbers(dtype).flip(0)])


Case = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]

UNARY = (
    *("neg", "abs", "square", "reciprocal", "sign", "sgn", "angle", "floor", "ceil", "trunc", "round", "frac"),
    *("deg2rad", "rad2deg", "bitwise_not", "logical_not", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "erf", "erfc", "erfinv", "lgamma"),
    *("digamma", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("sinc", "special_entr", "logit", "nan_to_num", "relu", "relu6", "sigmoid", "silu", "mish", "selu", "gelu"),
    *("hardsigmoid", "hardswish", "softplus", "elu", "celu", "leaky_relu", "hardshrink", "softshrink", "hardtanh"),
    *("log_sigmoid_forward", "clone", "lift_fresh_copy", "_to_copy", "zeros_like", "ones_like", "conj_physical"),
)
BINARY = (
    *("maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "copysign.Tensor", "heaviside", "nextafter"),
    *("pow.Tensor_Tensor", "float_power.Tensor_Tensor", "xlogy.Tensor", "special_xlog1py", "logaddexp", "logaddexp2"),
    *("eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor", "max.other", "min.other"),
    *("logical_and", "logical_or", "logical_xor", "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"),
    *("bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor", "__lshift__.Tensor", "__rshift__.Tensor"),
    *("copy", "sigmoid_backward", "tanh_backward", "silu_backward", "mish_backward", "gelu_backward"),
    *("hardsigmoid_backward", "hardswish_backward", "logit_backward", "_prelu_kernel", "_prelu_kernel_backward"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "clamp_min.Tensor", "clamp_max.Tensor"),
)
DIVISIONS = ("div.Tensor", "true_divide.Tensor", "floor_divide", "remainder.Tensor", "fmod.Tensor")


def overload(name: str) -> Any:
    """An operator of ATen by its name."""
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


def with_numbers(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    """Operators of one tensor and numbers."""
    two = 2 if not dtype.is_floating_point else 0.3334567  # no half type has it
    for name in ("add", "sub", "rsub", "mul", "div", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"):
        yield f"{name}.Scalar", lambda x, f=overload(f"{name}.Scalar"): f(x, two)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", *(() if dtype == torch.bool else ("__lshift__", "__rshift__"))):
        yield f"{name}.Scalar", lambda x, f=overload(f"{name}.Scalar"): f(x, 3)
    shifts = () if dtype == torch.bool else ("bitwise_left_shift", "bitwise_right_shift")
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", *shifts):
        yield f"{name}.Scalar_Tensor", lambda x, f=overload(f"{name}.Scalar_Tensor"): f(3, x)
    for name in shifts:
        yield f"{name}.Tensor_Scalar", lambda x, f=overload(f"{name}.Tensor_Scalar"): f(x, 3)
    yield "floor_divide.Scalar", lambda x: aten.floor_divide(x, two)
    yield "mul by a float", lambda x: x * 0.3334567
    yield "sub from a float", lambda x: 2.5 - x
    yield "true divide", lambda x: x / 7
    for mode in (None, "trunc", "floor"):
        yield f"div {mode}", lambda x, mode=mode: aten.div.Scalar_mode(x, two, rounding_mode=mode)
    for exponent in (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 2.7):
        yield f"pow {exponent}", lambda x, e=exponent: aten.pow.Tensor_Scalar(x, e)
    for base in (1, 2, 3, 0.3334567):
        yield f"pow of {base}", lambda x, b=base: aten.pow.Scalar(b, x)
    yield "copysign.Scalar", lambda x: aten.copysign.Scalar(x, -0.0)
    yield "xlogy.Scalar_Other", lambda x: aten.xlogy.Scalar_Other(x, two)
    yield "xlogy.Scalar_Self", lambda x: aten.xlogy.Scalar_Self(two, x)
    yield "clamp", lambda x: aten.clamp(x, 1, 3)
    yield "clamp min", lambda x: aten.clamp(x, two)
    yield "clamp crossed", lambda x: aten.clamp(x, 3, 1)
    yield "clamp nan", lambda x: aten.clamp(x, float("nan"), None)
    yield "clamp_min", lambda x: aten.clamp_min(x, two)
    yield "clamp_max", lambda x: aten.clamp_max(x, two)
    yield "clip", lambda x: aten.clip(x, two, 7)
    yield "nan_to_num", lambda x: aten.nan_to_num(x, 1.0, 2.0, 3.0)
    yield "masked_fill", lambda x: aten.masked_fill.Scalar(x, x > 1, two)
    yield "where number", lambda x: aten.where.ScalarOther(x > 1, x, two)
    yield "round.decimals 2", lambda x: aten.round.decimals(x, decimals=2)
    yield "round.decimals -1", lambda x: aten.round.decimals(x, decimals=-1)
    yield "hardtanh", lambda x: aten.hardtanh(x, -two, 1)
    yield "leaky_relu", lambda x: aten.leaky_relu(x, two)
    yield "elu", lambda x: aten.elu(x, two, 1.3, 0.7)
    yield "celu", lambda x: aten.celu(x, two)
    yield "gelu tanh", lambda x: aten.gelu(x, approximate="tanh")
    yield "softplus", lambda x: aten.softplus(x, 1.3, two)
    yield "threshold", lambda x: aten.threshold(x, two, 7)
    yield "hardshrink", lambda x: aten.hardshrink(x, two)
    yield "softshrink", lambda x: aten.softshrink(x, two)
    yield "logit eps", lambda x: aten.logit(x, 0.1)
    yield "fill", lambda x: aten.fill.Scalar(x, two)
    yield "full_like", lambda x: aten.full_like(x, two)
    yield "new_full", lambda x: aten.new_full(x, (2, 3), two)
    yield "new_zeros", lambda x: aten.new_zeros(x, (4,))
    yield "new_ones", lambda x: aten.new_ones(x, ())
    yield "frexp", lambda x: aten.frexp.Tensor(x)
    yield "native_dropout_backward", lambda x: aten.native_dropout_backward(x, x > 1, two)
    # ATen's and our formulas agree in what follows, but not on a NaN's or an infinity's way through it
    if dtype.is_floating_point:
        yield "elu_backward", lambda x: aten.elu_backward(x, two, 1.3, 0.7, False, x)
        yield "elu_backward of result", lambda x: aten.elu_backward(x, two, 1.3, 0.7, True, x)


def with_two(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], Any]]]:
    """Operators of two tensors and more."""
    two = 2 if not dtype.is_floating_point else 0.3334567
    yield "add alpha", lambda x, y: aten.add.Tensor(x, y, alpha=two)
    yield "sub alpha", lambda x, y: aten.sub.Tensor(x, y, alpha=two)
    yield "rsub alpha", lambda x, y: aten.rsub.Tensor(x, y, alpha=two)
    yield "addcmul", lambda x, y: aten.addcmul(x, y, y, value=two)
    yield "addcdiv", lambda x, y: aten.addcdiv(x, y, x, value=two)
    yield "lerp.Scalar", lambda x, y: aten.lerp.Scalar(x, y, two)
    yield "lerp.Scalar far", lambda x, y: aten.lerp.Scalar(x, y, 0.7)
    yield "lerp.Tensor", lambda x, y: aten.lerp.Tensor(x, y, x)
    yield "where", lambda x, y: aten.where.self(x > y, x, y)
    yield "clamp.Tensor", lambda x, y: aten.clamp.Tensor(x, y, x)
    yield "logit_backward", lambda x, y: aten.logit_backward(x, y, 0.1)
    yield "gelu_backward tanh", lambda x, y: aten.gelu_backward(x, y, approximate="tanh")
    yield "threshold_backward", lambda x, y: aten.threshold_backward(x, y, two)
    yield "leaky_relu_backward", lambda x, y: aten.leaky_relu_backward(x, y, two, False)
    yield "hardtanh_backward", lambda x, y: aten.hardtanh_backward(x, y, -two, 1)
    yield "hardshrink_backward", lambda x, y: aten.hardshrink_backward(x, y, two)
    yield "softshrink_backward", lambda x, y: aten.softshrink_backward(x, y, two)
    yield "softplus_backward", lambda x, y: aten.softplus_backward(x, y, 1.3, two)
    yield "log_sigmoid_backward", lambda x, y: aten.log_sigmoid_backward(x, y, torch.exp(-y.abs()))


def cases_of(dtype: torch.dtype) -> Iterator[Case]:
    """Every operator that takes one type all over."""
    x, (a, b) = numbers(dtype), pairs(dtype)
    # the largest numbers times something near 1 are an infinity or not, as the last bit has it
    grad = (a / 8).to(dtype) if dtype.is_floating_point else a
    # eager PyTorch itself ends the process at the least integer by -1
    whole = b if dtype.is_floating_point else torch.where((b == 0) | (b.long() == -1), torch.ones_like(b), b)
    for name in UNARY:
        yield name, overload(name), (x,)
    for name, function in with_numbers(dtype):
        yield name, function, (x,)
    for name in BINARY:
        if "shift" in name and dtype == torch.bool:
            continue  # tracing refuses what eager takes
        if name != "nextafter" or dtype not in (torch.float16, torch.bfloat16):
            yield name, overload(name), (grad if "backward" in name else a, b)
    for name, function in with_two(dtype):
        yield name, function, (grad if "backward" in name else a, b)
    for name in DIVISIONS:
        yield name, overload(name), (a, whole)
    for mode in ("trunc", "floor"):
        yield f"div {mode}", lambda x, y, m=mode: aten.div.Tensor_mode(x, y, rounding_mode=m), (a, whole)


def eager(case: Case) -> tuple[torch.Tensor, ...] | None:
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


def run(cases: list[Case]) -> tuple[list[tuple[torch.Tensor, ...]], set[str]]:
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


def differences(cases: list[Case], got: list[tuple[torch.Tensor, ...]], want: list[tuple[torch.Tensor, ...]]) -> list[str]:
    """What is not as eager has it, in a vector or alone: ATen's loops over vectors and its others do not always agree."""
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
            if not all(torch.equal(one.nan_to_num(7), two.nan_to_num(7)) for one, two in zip(mine, theirs, strict=True)):
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
    for name in ("add", "sub", "mul", "div", "remainder", "fmod", "lt", "eq", "maximum", "minimum", "pow", "floor_divide"):
        whole = getattr(aten, name)
        for what, function in {
            "x, y": lambda x, y, s, f=whole: f(x, y),
            "x, 0-dim": lambda x, y, s, f=whole: f(x, s),
            "0-dim, x": lambda x, y, s, f=whole: f(s, x),
            "x, number": lambda x, y, s, f=whole: f(x, number),
        }.items():
            if name in ("maximum", "minimum") and what == "x, number":
                continue  # there is no such overload
            if name == "floor_divide" and what in ("x, y", "0-dim, x"):
                continue  # eager rounds on the way, and so misses the floor now and then
            cases.append((f"{name} {what}", function, (x, y, single)))
    cases += [(f"{name} alpha", lambda x, y, f=getattr(aten, name): f(x, y, alpha=number), (x, y)) for name in ("add", "sub")]
    cases += [
        ("rsub", lambda x: aten.rsub.Scalar(x, number), (x,)),
        ("leaky_relu", lambda x: aten.leaky_relu(x, number), (x,)),
        ("threshold", lambda x: aten.threshold(x, number, 0.1), (x,)),
        ("hardshrink", lambda x: aten.hardshrink(x, number), (x,)),
        ("softshrink", lambda x: aten.softshrink(x, number), (x,)),
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
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        least = torch.iinfo(dtype).min
        x, y = torch.full((5,), least, dtype=dtype), torch.full((5,), -1, dtype=dtype)
        names = ("floor_divide", "remainder.Tensor", "fmod.Tensor")
        graph = traced(lambda x, y: [overload(name)(x, y) for name in names], x, y, **CPU, generated_kernels="all")
        assert [result.tolist() for result in graph((x, y))] == [[least] * 5, [0] * 5, [0] * 5]
        close(graph)


@pytest.mark.parametrize("kind", ["copy", "same", "fill", "strided", "overlapping"])
def test_in_place(kind, monkeypatch):
    """Where no kernel is registered, a generated one writes in place; not where it would read what it has written."""
    monkeypatch.setattr(ExpressionGenerator, "prefers", lambda self, call: True)

    def function(x, y):
        if kind == "fill":
            return [aten.fill_.Scalar(x, 3)]
        if kind == "same":
            return [aten.copy_(x, x)]
        if kind == "overlapping":
            return [aten.copy_(x[1:], x[:-1])]
        return [aten.copy_((x[:, 1:4] if kind == "strided" else x), y)]

    x = torch.randn(5, 7)
    y = torch.arange(3) if kind == "strided" else torch.randn(7, dtype=torch.float64)
    want, got = x.clone(), x.clone()
    function(want, y)
    graph = traced(function, got.clone(), y, **CPU, generated_kernels="all", fusion=False)
    graph((got, y))
    generated = [t.kernel.origin == "generated" for plan in graph.plans() for t in plan.tasks]
    assert generated == [kind != "overlapping"]
    torch.testing.assert_close(got, want)
    close(graph)
