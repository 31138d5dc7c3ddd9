"""Distances between the rows of matrices: one per work-item."""

from __future__ import annotations

import math

from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import broadcast, names
from kagent_core.specs import TensorSpec


@GENERIC.kernel("aten::_cdist_forward", epilogue=True)
def cdist(k: KernelBuilder, x1: TensorSpec, x2: TensorSpec, p: float, compute_mode: int | None) -> None:
    """Write the distances between the rows of two batches of matrices."""
    made, left, right = k.call.outputs[0], k.read(x1), k.read(x2)
    lead = names("b", len(made.shape) - 2)

    def batch(spec: TensorSpec) -> list[str]:
        return broadcast(lead, spec.shape[:-2])

    with k.items(*zip([*lead, "row", "column"], made.shape, strict=True), steps=x1.shape[-1] * 4):
        _norm(k, left.at(*batch(x1), "row", "j"), right.at(*batch(x2), "column", "j"), left, p)
        k.store([*lead, "row", "column"], "distance")


@GENERIC.kernel("aten::_pdist_forward", epilogue=True)
def pdist(k: KernelBuilder, self: TensorSpec, p: float) -> None:
    """Write the distances between each two rows of a matrix, without those that are there already."""
    x = k.read(self)
    rows = k.size(self.shape[0])
    with k.items(("pair", k.call.outputs[0].shape[0]), steps=self.shape[1] * 4):
        # the pairs of row r are those from r * (2 * rows - r - 1) / 2 on
        k.fits(2 * self.shape[0] ** 2)
        k.add(f"{k.index_type} row = 0;")
        with k.block(f"for ({k.index_type} end = {rows} - 1; row + 1 < end;)"):
            k.add(f"const {k.index_type} middle = row + (end - row) / 2;")
            k.add(f"if (middle * (2 * {rows} - middle - 1) / 2 <= pair) row = middle; else end = middle;")
        k.add(f"const {k.index_type} column = pair - row * (2 * {rows} - row - 1) / 2 + row + 1;")
        _norm(k, x.at("row", "j"), x.at("column", "j"), x, p)
        k.store(["pair"], "distance")


def _norm(k: KernelBuilder, a: str, b: str, x: Tensor, p: float) -> None:
    """Write ``distance``, the p-norm of a difference."""
    kind, dtype = k.compute_type(x.dtype), "float64" if x.dtype == "float64" else "float32"
    power = k.language.function("pow", dtype)
    k.add(f"{kind} sum = 0;")
    with k.loop("j", x.size(-1)):
        k.add(f"const {kind} apart = {k.language.function('fabs', dtype)}({a} - {b});")
        if p == 0:
            k.add("sum += apart != 0;")
        elif math.isinf(p):
            k.add("sum = apart > sum || apart != apart ? apart : sum;")
        else:
            terms = {1.0: "apart", 2.0: "apart * apart"}
            k.add(f"sum += {terms.get(p, f'{power}(apart, {k.number(p, dtype)})')};")
    roots = {2.0: f"{k.language.function('sqrt', dtype)}(sum)"}
    root = "sum" if p in (0, 1) or math.isinf(p) else roots.get(p, f"{power}(sum, {k.number(1 / p, dtype)})")
    k.add(f"const {kind} distance = {root};")
