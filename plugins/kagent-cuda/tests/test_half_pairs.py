"""Halves that are computed with in pairs: what is written, and that it rounds as eager PyTorch, by way of float32."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_language import made, ptx

HALVES = (torch.float16, torch.bfloat16)
BITS = {torch.float16: (11, -14, 16), torch.bfloat16: (8, -126, 128)}
"""Of a number, its least normal exponent, and the exponent that is too large."""

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
EXACT: dict[str, Callable[..., np.ndarray]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def halves(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (64, 128), dtype=dtype)


def every_half(dtype: torch.dtype) -> torch.Tensor:
    """Return all numbers of a type, and what are none."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def rounded_once(exact: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return float64 rounded to a half type, as float64."""
    bits, least, beyond = BITS[dtype]
    _, exponents = np.frexp(exact)
    last = np.ldexp(1.0, np.maximum(exponents - 1, least) - (bits - 1))  # what the last bit is worth
    with np.errstate(invalid="ignore"):
        found = np.where(np.isfinite(exact), np.rint(exact / last) * last, exact)
    return np.where(np.abs(found) >= 2.0**beyond, np.copysign(np.inf, found), found)


# -- what is written


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y + x) * 0.5 - y


@pytest.mark.parametrize("dtype", HALVES)
def test_chains_of_sums_and_products_stay_in_16_bits(dtype: torch.dtype) -> None:
    text = made(chain, halves(dtype), halves(dtype)).text
    assert not re.search(r"f32|load_b?f16|store_b?f16|round_", text)
    assert len(re.findall(r"(add|sub|mul)_b?f16x4\(", text)) == 4


def test_what_needs_float32_has_it() -> None:
    half = halves(torch.float16)
    text = made(lambda x, y: torch.sigmoid(x) * y / x, half, half).text
    assert "store_f16x4(1.0f" in text  # the sigmoid is rounded once, and not widened again
    assert re.search(r"mul_f16x4\(\w+, sigmoid\)", text)
    assert re.search(r"f32x4 div = mul_wide / v_wide", text)


@pytest.mark.parametrize(
    "function",
    [lambda x, y: x * 0.1, lambda x, y: x / y, lambda x, y: torch.addcmul(x, x, y), lambda x, y: torch.relu(x)],
    ids=["a factor that is no half", "a quotient", "a multiply-add", "no arithmetic"],
)
def test_no_pairs_where_they_would_round_otherwise_or_not_pay(function: Callable[..., torch.Tensor]) -> None:
    text = made(function, halves(torch.float16), halves(torch.float16)).text
    assert not re.search(r"(add|sub|mul)_f16x4\(|f16x4 \w+ =", text)


def test_a_sum_that_is_needed_in_float32_too_is_one_in_float32() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.float() + y.float(), x + y

    text = made(function, halves(torch.bfloat16), halves(torch.bfloat16)).text
    assert "add_bf16x4(" not in text


@pytest.mark.parametrize(
    ("dtype", "architecture", "instruction"),
    [
        *((torch.float16, f"compute_{number}", "mul.rn.f16x2") for number in (75, 80, 90, 100)),
        (torch.bfloat16, "compute_75", "mul.rn.f32|mul.f32"),
        (torch.bfloat16, "compute_80", "fma.rn.bf16x2"),
        (torch.bfloat16, "compute_90", "mul.rn.bf16x2"),
        (torch.bfloat16, "compute_100", "mul.rn.bf16x2"),
    ],
)
def test_instructions_of_each_architecture(dtype: torch.dtype, architecture: str, instruction: str) -> None:
    assembly = ptx(lambda x, y: x * y, halves(dtype), halves(dtype), architecture=architecture)
    assert re.search(instruction, assembly)
    assert not re.search(r"\b(ld|st)\.local", assembly)
    if "x2" in instruction:
        assert not re.search(r"cvt\S*\.b?f16|\.f32", assembly)


# -- how it rounds


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_float32_in_between_does_no_harm(operator: str, dtype: torch.dtype) -> None:
    """All halves with some thousands of others: exact, rounded once, is what eager PyTorch computes."""
    every = every_half(dtype)
    wide = every.double().numpy()
    near = [float(x) for n in range(-12, 13) for x in (2.0**n, 1.5 * 2.0**n, -(2.0**n), (2 - 2.0**-7) * 2.0**n)]
    others = torch.cat([torch.tensor(near).to(dtype), every[torch.randint(2**16, (400,))]])
    for other in others:
        with np.errstate(invalid="ignore"):
            want = rounded_once(EXACT[operator](wide, other.double().item()), dtype)
        got = OPERATORS[operator](every, other).double().numpy()
        np.testing.assert_array_equal(got, want)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), st.sampled_from(HALVES), st.sampled_from(sorted(OPERATORS))
)
def test_float32_in_between_does_no_harm_to_any_pair(one: int, other: int, dtype: torch.dtype, operator: str) -> None:
    x, y = torch.tensor([one, other], dtype=torch.int32).to(torch.int16).view(dtype)
    with np.errstate(invalid="ignore"):
        want = rounded_once(EXACT[operator](np.float64(x.item()), np.float64(y.item())), dtype)
    np.testing.assert_array_equal(OPERATORS[operator](x, y).double().numpy(), want)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of halves, all that are no number alike."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int16)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_on_the_device(dtype: torch.dtype, device: str) -> None:
    """The emulated device rounds exact results once, as the instructions do: with every half, as eager PyTorch."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + y, x - y, x * y, chain(x, y), torch.sigmoid(x) * y + 1.5

    x = every_half(dtype)
    y = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(3))]
    compiled = torch.compile(function, backend="kagent", options={"device": device}, fullgraph=True)
    for mine, eager in zip(compiled(x, y)[:4], function(x, y)[:4], strict=True):
        assert torch.equal(bits_of(mine), bits_of(eager))
    torch.testing.assert_close(compiled(x, y)[4], function(x, y)[4], equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [7, 8, 33])
def test_lines_that_are_no_whole_number_of_vectors(dtype: torch.dtype, length: int, device: str) -> None:
    x, y = (torch.linspace(-3, 5, length * 4).sin().to(dtype).view(4, length) * n for n in (1, 3))
    row = y[0]
    function = lambda x, y, row: (chain(x, y) + row, (x * y).float(), (x * row).sum(0))
    compiled = torch.compile(function, backend="kagent", options={"device": device}, fullgraph=True)
    made, eager = compiled(x, y, row), function(x, y, row)
    assert torch.equal(made[0], eager[0])
    assert torch.equal(made[1], eager[1])
    torch.testing.assert_close(made[2], eager[2])
