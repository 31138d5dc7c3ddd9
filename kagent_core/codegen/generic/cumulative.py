"""Cumulative operators: a row per block, or per work-item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kagent_core.codegen.dtypes import FLOATS, HALVES
from kagent_core.codegen.generic.block_cumulative import Running, write_cumulative
from kagent_core.codegen.generic.block_scans import rows_by_blocks
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
        if rows_by_blocks(k, rows, self):
            _accumulate_compensated_by_blocks(k, x, rows)
        else:
            _accumulate_compensated(k, x, rows)
        return
    if rows_by_blocks(k, rows, self):
        _accumulate_by_blocks(k, x, rows, sign, start)
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


def _accumulate_by_blocks(k: KernelBuilder, x: Tensor, rows: Rows, sign: str, start: int) -> None:
    made, wide = k.result().dtype, _wide(k.result().dtype)
    kind = k.language.value_type(wide)
    least, most = ("1e-300", "1e300") if wide == "float64" else ("1e-37f", "1e37f")
    fabs = k.language.function("fabs", wide)

    def load(j: str) -> str:
        return k.language.cast(k.language.cast(x.at(*rows.place(j)), x.dtype, made), made, wide)

    def store(j: str, found: Sequence[str]) -> None:
        k.store(rows.place(j), k.language.cast(found[0], wide, "float32" if made in HALVES else made))

    running = Running(
        kind=kind,
        load=load,
        states=[(kind, "total")],
        identity=[k.number(start, wide)],
        element=lambda value, j: [value],
        merge=lambda a, b, c: [f"{c[0]} = {a[0]} {sign} {b[0]};"],
        store=store,
        regular=(lambda v: f"({fabs}({v}) > {least} && {fabs}({v}) < {most})")
        if sign == "*" and made in FLOATS
        else None,
    )
    write_cumulative(k, rows, running)


def _accumulate_compensated_by_blocks(k: KernelBuilder, x: Tensor, rows: Rows) -> None:
    running = Running(
        kind="f32",
        load=lambda j: k.language.cast(x.at(*rows.place(j)), x.dtype, "float32"),
        states=[("f32", "total"), ("f32", "rest")],
        identity=["0", "0"],
        element=lambda value, j: [value, "0"],
        merge=lambda a, b, c: [f"{c[1]} = {a[1]} + {b[1]};", f"{c[0]} = two_sum_f32({a[0]}, {b[0]}, &{c[1]});"],
        store=lambda j, found: k.store(rows.place(j), f"two_summed_f32({found[0]}, {found[1]})"),
    )
    write_cumulative(k, rows, running)


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
    if rows_by_blocks(k, rows, self):
        _extreme_by_blocks(k, x, rows, kind, sign)
        return
    with k.items(*rows.axes, steps=rows.length):
        k.add(f"{kind} best = {x.at(*rows.place('0'))};", "i64 at = 0;")
        with k.loop("j", k.size(rows.length)):
            k.add(f"const {kind} value = {x.at(*rows.place('j'))};")
            k.add(f"if ({better}) {{ best = value; at = j; }}")
            k.store(rows.place("j"), "best")
            k.store(rows.place("j"), "at", 1)


def _extreme_by_blocks(k: KernelBuilder, x: Tensor, rows: Rows, kind: str, sign: str) -> None:
    index = "i32" if rows.length < 2**31 else "i64"

    def merge(a: Sequence[str], b: Sequence[str], c: Sequence[str]) -> list[str]:
        better = f"{b[0]} {sign} {a[0]}"
        if x.dtype in FLOATS:
            better = f"{b[0]} != {b[0]} || ({a[0]} == {a[0]} && {better})"
        # a position of -1 says that there is no element
        chosen = f"{b[1]} >= 0 && ({a[1]} < 0 || {better})"
        return [
            f"const i32 later = {chosen};",
            *(f"{to} = later ? {new} : {old};" for to, new, old in zip(c, b, a, strict=True)),
        ]

    def store(j: str, found: Sequence[str]) -> None:
        k.store(rows.place(j), found[0])
        k.store(rows.place(j), found[1], 1)

    running = Running(
        kind=kind,
        load=lambda j: x.at(*rows.place(j)),
        states=[(kind, "best"), (index, "at")],
        identity=["0", "-1"],
        element=lambda value, j: [value, j],
        merge=merge,
        store=store,
    )
    write_cumulative(k, rows, running)


@GENERIC.kernel("aten::logcumsumexp")
def logcumsumexp(k: KernelBuilder, self: TensorSpec, dim: int) -> None:
    """Write the logarithms of the sums of the exponentials of all that came before."""
    x, rows = k.read(self), Rows(self, dim)
    dtype = _wide(x.dtype)
    kind = k.language.value_type(dtype)
    exp, log1p, fabs = (k.language.function(name, dtype) for name in ("exp", "log1p", "fabs"))

    def merge(a: Sequence[str], b: Sequence[str], c: Sequence[str]) -> list[str]:
        total, value = a[0], b[0]
        # NaN stays; two equal infinities would make one
        return [
            f"const {kind} high = {value} > {total} ? {value} : {total}, low = {value} > {total} ? {total} : {value};",
            f"const i32 same = low == high && {fabs}(low) == INFINITY;",
            f"{c[0]} = {value} != {value} || {total} != {total} ? {value} + {total}",
            f"    : same ? {value} : high + {log1p}({exp}(low - high));",
        ]

    if rows_by_blocks(k, rows, self):
        running = Running(
            kind=kind,
            load=lambda j: k.language.cast(x.at(*rows.place(j)), x.dtype, dtype),
            states=[(kind, "total")],
            identity=[k.number(float("-inf"), dtype)],
            element=lambda value, j: [value],
            merge=merge,
            store=lambda j, found: k.store(rows.place(j), found[0]),
        )
        write_cumulative(k, rows, running)
        return
    with k.items(*rows.axes, steps=rows.length * 16):
        k.add(f"{kind} total = {k.number(float('-inf'), dtype)};")
        with k.loop("j", k.size(rows.length)):
            k.add(f"const {kind} value = {x.at(*rows.place('j'))};")
            k.add(*merge(["total"], ["value"], ["total"]))
            k.store(rows.place("j"), "total")
