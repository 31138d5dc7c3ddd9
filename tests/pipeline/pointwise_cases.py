"""Operators that are one expression per element, with telling operands of every type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

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


Results = tuple[torch.Tensor, ...]
Case = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]

UNARY = (
    *("neg", "abs", "square", "reciprocal", "sign", "sgn", "angle", "floor", "ceil", "trunc", "round", "frac"),
    *("deg2rad", "rad2deg", "bitwise_not", "logical_not"),
    *("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit"),
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


def number_last(name: str, number: float) -> Callable[[torch.Tensor], Any]:
    """An operator with a number for its second operand."""
    return lambda x: overload(name)(x, number)


def number_first(name: str, number: float) -> Callable[[torch.Tensor], Any]:
    """An operator with a number for its first operand."""
    return lambda x: overload(name)(number, x)


def with_numbers(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    """Operators of one tensor and numbers."""
    two = 2 if not dtype.is_floating_point else 0.3334567  # no half type has it
    for name in ("add", "sub", "rsub", "mul", "div", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"):
        yield f"{name}.Scalar", number_last(f"{name}.Scalar", two)
    bits = ("bitwise_and", "bitwise_or", "bitwise_xor")
    for name in bits if dtype == torch.bool else (*bits, "__lshift__", "__rshift__"):
        yield f"{name}.Scalar", number_last(f"{name}.Scalar", 3)
    shifts = () if dtype == torch.bool else ("bitwise_left_shift", "bitwise_right_shift")
    for name in (*bits, *shifts):
        yield f"{name}.Scalar_Tensor", number_first(f"{name}.Scalar_Tensor", 3)
    for name in shifts:
        yield f"{name}.Tensor_Scalar", number_last(f"{name}.Tensor_Scalar", 3)
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
    yield "clamp nan", lambda x: aten.clamp.Tensor(x, torch.tensor(float("nan")), None)
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
    yield "softshrink", lambda x: aten.softshrink(x, 0.375)
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
