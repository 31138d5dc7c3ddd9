"""Cumulative operators: a row per work-item."""

from __future__ import annotations

from typing import Any

from kagent_core.codegen.dtypes import FLOATS, HALVES
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import Rows
from kagent_core.specs import OpCall, TensorSpec


def _bool_result(call: OpCall) -> str | None:
    return f"{call.signature} is not defined for bool" if call.outputs[0].dtype.name == "bool" else None


def _wide(dtype: str) -> str:
    """Return what ATen accumulates in on the CPU, its ``acc_type``."""
    return "float32" if dtype in HALVES else "float64" if dtype in FLOATS else "int64"


@GENERIC.kernel("aten::cumsum", accepts=_bool_result)
def cumsum(k: KernelBuilder, self: TensorSpec, dim: int, dtype: Any) -> None:
    """Write the sums of all that came before."""
    _accumulate(k, self, dim, "+", 0)


@GENERIC.kernel("aten::cumprod", accepts=_bool_result)
def cumprod(k: KernelBuilder, self: TensorSpec, dim: int, dtype: Any) -> None:
    """Write the products of all that came before."""
    _accumulate(k, self, dim, "*", 1)


def _accumulate(k: KernelBuilder, self: TensorSpec, dim: int, sign: str, start: int) -> None:
    x, made = k.read(self), k.result().dtype
    wide = _wide(made)
    rows = Rows(self, dim)
    if made == "float32" == k.language.wide and sign == "+":
        _accumulate_compensated(k, x, rows)
        return
    with k.items(*rows.axes, steps=rows.length):
        k.add(f"{k.language.value_type(wide)} total = {k.number(start, wide)};")
        with k.loop("j", k.size(rows.length)):
            # the input is converted to the result's type first, then accumulated in a wider one
            value = k.language.cast(x.at(*rows.place("j")), x.dtype, made)
            k.add(f"total = total {sign} {k.language.cast(value, made, wide)};")
            k.store(rows.place("j"), k.language.cast("total", wide, "float32" if made in HALVES else made))


def _accumulate_compensated(k: KernelBuilder, x: Tensor, rows: Rows) -> None:
    """Write sums of float32 where there is no wider type: what each addition loses is kept beside the sum."""
    with k.items(*rows.axes, steps=rows.length * 4):
        k.add("f32 total = 0, rest = 0;")
        with k.loop("j", k.size(rows.length)):
            value = k.language.cast(x.at(*rows.place("j")), x.dtype, "float32")
            k.add(f"total = two_sum_f32(total, {value}, &rest);")
            k.store(rows.place("j"), "two_summed_f32(total, rest)")


@GENERIC.kernel("aten::cummax")
def cummax(k: KernelBuilder, self: TensorSpec, dim: int) -> None:
    """Write the greatest of all that came before, and where it was last."""
    _extreme(k, self, dim, ">=")


@GENERIC.kernel("aten::cummin")
def cummin(k: KernelBuilder, self: TensorSpec, dim: int) -> None:
    """Write the smallest of all that came before, and where it was last."""
    _extreme(k, self, dim, "<=")


def _extreme(k: KernelBuilder, self: TensorSpec, dim: int, sign: str) -> None:
    x, rows = k.read(self), Rows(self, dim)
    kind = k.compute_type(x.dtype) if x.dtype != "bool" else k.language.value_type("bool")
    better = f"value {sign} best"
    if x.dtype in FLOATS:  # nothing follows a NaN but another
        better = f"value != value || (best == best && {better})"
    if rows.length == 0:
        return
    with k.items(*rows.axes, steps=rows.length):
        k.add(f"{kind} best = {x.at(*rows.place('0'))};", "i64 at = 0;")
        with k.loop("j", k.size(rows.length)):
            k.add(f"const {kind} value = {x.at(*rows.place('j'))};")
            k.add(f"if ({better}) {{ best = value; at = j; }}")
            k.store(rows.place("j"), "best")
            k.store(rows.place("j"), "at", 1)


@GENERIC.kernel("aten::logcumsumexp")
def logcumsumexp(k: KernelBuilder, self: TensorSpec, dim: int) -> None:
    """Write the logarithms of the sums of the exponentials of all that came before."""
    x, rows = k.read(self), Rows(self, dim)
    dtype = _wide(x.dtype)
    kind = k.language.value_type(dtype)
    exp, log1p, fabs = (k.language.function(name, dtype) for name in ("exp", "log1p", "fabs"))
    with k.items(*rows.axes, steps=rows.length * 16):
        k.add(f"{kind} total = {k.number(float('-inf'), dtype)};")
        with k.loop("j", k.size(rows.length)):
            k.add(f"const {kind} value = {x.at(*rows.place('j'))};")
            k.add(f"const {kind} high = value > total ? value : total, low = value > total ? total : value;")
            # NaN stays; two equal infinities would make one
            k.add(
                f"total = value != value || total != total ? value + total : low == high && {fabs}(low) == INFINITY "
                f"? value : high + {log1p}({exp}(low - high));"
            )
            k.store(rows.place("j"), "total")
