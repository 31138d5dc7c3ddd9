"""Element types: promotion as PyTorch does it, and the types that generated kernels compute in."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from kagent_core.specs import TensorSpec

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
HALVES = frozenset({"float16", "bfloat16"})
SIGNED = frozenset({"int8", "int16", "int32", "int64"})
UNSIGNED = frozenset({"uint8", "uint16", "uint32", "uint64"})
INTEGERS = SIGNED | UNSIGNED
SUPPORTED = FLOATS | INTEGERS | {"bool"}
"""Element types that generated kernels read and write."""

NBITS = {
    "bool": 1,
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
}


def compute_dtype(dtype: str) -> str:
    """Return the type that ATen computes in: float32 for the half types (its ``opmath_type``), else the type itself."""
    return "float32" if dtype in HALVES else dtype


def accumulate_dtype(dtype: str) -> str:
    """Return the type that ATen sums up in: int64 for integers and booleans, float32 for halves, else the type."""
    return "int64" if dtype == "bool" or dtype in INTEGERS else compute_dtype(dtype)


@functools.lru_cache(maxsize=4096)
def promote(one: str, other: str) -> str:
    """Return what ``torch.promote_types`` does, by name."""
    if one == other:
        return one
    return str(torch.promote_types(getattr(torch, one), getattr(torch, other))).removeprefix("torch.")


def common_dtype(values: Iterable[Any]) -> str:
    """Return the type that PyTorch promotes some operands to, as ``torch.result_type`` does.

    Tensors with dimensions outweigh those without, which outweigh numbers, as long as the category is the same.

    Parameters
    ----------
    values
        `TensorSpec` and numbers.
    """
    ranked: list[list[str]] = [[], [], []]
    for value in values:
        if isinstance(value, TensorSpec):
            ranked[0 if value.shape else 1].append(value.dtype.name)
        elif isinstance(value, bool):
            ranked[2].append("bool")
        elif isinstance(value, int):
            ranked[2].append("int64")
        elif isinstance(value, float):
            ranked[2].append("default float")
    result: str | None = None
    for names in ranked:
        if not names:
            continue
        own = functools.reduce(promote, (_default_float() if n == "default float" else n for n in names))
        if result is None:
            result = own
        elif _category(own) > _category(result):
            result = promote(result, own)
    if result is None:
        raise ValueError("there is no operand to take a type from")
    return result


def _default_float() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _category(dtype: str) -> int:
    return 0 if dtype == "bool" else 1 if dtype in INTEGERS else 2 if dtype in FLOATS else 3


def name_of(dtype: torch.dtype) -> str:
    """Return PyTorch's name of a dtype without its prefix: ``float32``."""
    return str(dtype).removeprefix("torch.")
