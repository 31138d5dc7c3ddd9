"""Numbers that no kernel is generated for, since only the installed PyTorch knows what becomes of them."""

from __future__ import annotations

import math

import pytest
import torch

from kagent_core.codegen.numbers import alike_when_rounded, bounds, fits
from kagent_core.specs import DType, OpCall, TensorSpec


def call(dtype: str, **numbers: float | None) -> OpCall:
    made = TensorSpec(DType(dtype, getattr(torch, dtype).itemsize), (3,), (1,), 0, 0)
    return OpCall(0, "operator", "aten::operator", numbers, (), (made,), (made,))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("value", [0, 1, -3, 0.5, 1 / 3, 0.1, 257, 65504.0, 65505.0, 1e-8, 1e39, math.inf])
def test_numbers_that_rounding_changes(dtype: str, value: float) -> None:
    half = dtype in ("float16", "bfloat16")
    changed = half and torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype)).item() != value
    refused = alike_when_rounded("lambd")(call(dtype, lambd=value))
    assert (refused is not None) == changed
    if changed:
        assert refused == f"versions of PyTorch differ in whether {value} is rounded to {dtype}"


def test_numbers_that_are_tensors_are_rounded_already() -> None:
    assert alike_when_rounded("lambd")(call("float16")) is None


@pytest.mark.parametrize("name", ["min", "max"])
def test_a_bound_that_is_nan(name: str) -> None:
    told = bounds("min", "max")(call("float32", **{name: math.nan}))
    assert told == "versions of PyTorch differ in what a bound of NaN does"


@pytest.mark.parametrize("dtype", ["float16", "uint8", "int32", "bool"])
@pytest.mark.parametrize("value", [None, 0, 1, -1, 300, 1e9, math.inf])
def test_bounds_fit_as_other_numbers_do(dtype: str, value: float | None) -> None:
    assert bounds("min")(call(dtype, min=value)) == fits("min")(call(dtype, min=value))
