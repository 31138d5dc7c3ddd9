"""Cumulative operators: a row per block, or per work-item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    rows = Rows(self, dim)
    if made == "float32" == k.language.wide and sign == "+":
        _write(k, self, rows, _compensated(k, x, rows), cost=4)
        return
    wide = _wide(made)
    kind = k.language.value_type(wide)
    least, most = ("1e-300", "1e300") if wide == "float64" else ("1e-37f", "1e37f")
    fabs = k.language.function("fabs", wide)

    def load(j: str) -> str:
        # the input is converted to the result's type first, then accumulated in a wider one
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
    _write(k, self, rows, running)


def _compensated(k: KernelBuilder, x: Tensor, rows: Rows) -> Running:
    """Return sums of float32 where there is no wider type: what each addition loses is kept beside the sum."""
    return Running(
        kind="f32",
        load=lambda j: k.language.cast(x.at(*rows.place(j)), x.dtype, "float32"),
        states=[("f32", "total"), ("f32", "rest")],
        identity=["0", "0"],
        element=lambda value, j: [value, "0"],
        merge=lambda a, b, c: [f"{c[1]} = {a[1]} + {b[1]};", f"{c[0]} = two_sum_f32({a[0]}, {b[0]}, &{c[1]});"],
        store=lambda j, found: k.store(rows.place(j), f"two_summed_f32({found[0]}, {found[1]})"),
    )


def _write(
    k: KernelBuilder, self: TensorSpec, rows: Rows, running: Running, cost: int = 1, named: bool = False
) -> None:
    """Write the kernel for blocks where that is better, else for work-items.

    Parameters
    ----------
    k
        Where to.
    self, rows
        The tensor and its rows.
    running
        What is found along them.
    cost
        Of an element, in additions.
    named
        Whether merging names an element more than once, so that it is put into a variable first.
    """
    if rows_by_blocks(k, rows, self):
        write_cumulative(k, rows, running)
        return
    names = [name for _, name in running.states]
    with k.items(*rows.axes, steps=rows.length * cost):
        for (kind, name), first in zip(running.states, running.identity, strict=True):
            k.add(f"{kind} {name} = {first};")
        with k.loop("j", k.size(rows.length)):
            value = running.load("j")
            if named:
                k.add(f"const {running.kind} value = {value};")
            k.add(*running.merge(names, running.element("value" if named else value, "j"), names))
            running.store("j", names)


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

    def better(value: str, best: str) -> str:
        text = f"{value} {sign} {best}"
        # nothing follows a NaN but another
        return f"{value} != {value} || ({best} == {best} && {text})" if x.dtype in FLOATS else text

    if rows.length == 0:
        return
    if rows_by_blocks(k, rows, self):
        write_cumulative(k, rows, _extreme_of_parts(k, x, rows, kind, better))
        return
    # merging, which asks of either part whether it has elements, would take longer
    with k.items(*rows.axes, steps=rows.length):
        k.add(f"{kind} best = {x.at(*rows.place('0'))};", "i64 at = 0;")
        with k.loop("j", k.size(rows.length)):
            k.add(f"const {kind} value = {x.at(*rows.place('j'))};")
            k.add(f"if ({better('value', 'best')}) {{ best = value; at = j; }}")
            k.store(rows.place("j"), "best")
            k.store(rows.place("j"), "at", 1)


def _extreme_of_parts(k: KernelBuilder, x: Tensor, rows: Rows, kind: str, better: Callable[[str, str], str]) -> Running:
    def merge(a: Sequence[str], b: Sequence[str], c: Sequence[str]) -> list[str]:
        # a position of -1 says that there is no element
        chosen = f"{b[1]} >= 0 && ({a[1]} < 0 || {better(b[0], a[0])})"
        return [
            f"const i32 later = {chosen};",
            *(f"{to} = later ? {new} : {old};" for to, new, old in zip(c, b, a, strict=True)),
        ]

    def store(j: str, found: Sequence[str]) -> None:
        k.store(rows.place(j), found[0])
        k.store(rows.place(j), found[1], 1)

    return Running(
        kind=kind,
        load=lambda j: x.at(*rows.place(j)),
        states=[(kind, "best"), ("i32" if rows.length < 2**31 else "i64", "at")],
        identity=["0", "-1"],
        element=lambda value, j: [value, j],
        merge=merge,
        store=store,
    )


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

    running = Running(
        kind=kind,
        load=lambda j: k.language.cast(x.at(*rows.place(j)), x.dtype, dtype),
        states=[(kind, "total")],
        identity=[k.number(float("-inf"), dtype)],
        element=lambda value, j: [value],
        merge=merge,
        store=lambda j, found: k.store(rows.place(j), found[0]),
    )
    _write(k, self, rows, running, cost=16, named=True)
