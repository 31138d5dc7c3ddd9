"""Maxima of pooling windows: an output element per work-item; of their gradients, a plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kagent_core.codegen.arguments import pooled_dims
from kagent_core.codegen.c_family import INDEX_OUT_OF_RANGE
from kagent_core.codegen.dtypes import FLOATS
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import flattened, names, nest
from kagent_core.codegen.generic.windows import Window, elements, parts
from kagent_core.specs import TensorSpec


@GENERIC.kernel("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def max_pool(
    k: KernelBuilder,
    self: TensorSpec,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
) -> None:
    """Write the greatest element of each window, and where it is."""
    count = pooled_dims(k.call)
    window = Window.of(count, kernel_size, stride, padding, dilation)
    axes, lead, spatial = elements(k.call.outputs[0], count, "o")
    with k.items(*axes, steps=math.prod(window.size)):
        for d, o in enumerate(spatial):
            step, size = k.size(window.dilation[d]), k.size(self.shape[len(lead) + d])
            reach = window.size[d] * window.dilation[d]
            k.fits(self.shape[len(lead) + d] + 2 * window.padding[d] + reach + window.stride[d])
            k.add(f"const {k.index_type} start{d} = {o} * {k.size(window.stride[d])} - {k.size(window.padding[d])};")
            k.add(f"const {k.index_type} before{d} = start{d} < 0 ? (-start{d} + {step} - 1) / {step} : 0;")
            k.add(f"const {k.index_type} begin{d} = start{d} + before{d} * {step};")
            k.add(f"const {k.index_type} reach{d} = start{d} + ({k.size(window.size[d])} - 1) * {step} + 1;")
            k.add(f"const {k.index_type} end{d} = reach{d} < {size} ? reach{d} : {size};")
        _greatest(k, self, lead, spatial, [k.size(step) for step in window.dilation])


@GENERIC.kernel("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def adaptive_max_pool(k: KernelBuilder, self: TensorSpec, output_size: Any) -> None:
    """Write the greatest element of each of the parts that the input is cut into, and where it is."""
    made, count = k.call.outputs[0], pooled_dims(k.call)
    axes, lead, spatial = elements(made, count, "o")
    with k.items(*axes, steps=max(self.numel // max(made.numel, 1), 1)):
        parts(k, spatial, self.shape[-count:], made.shape[-count:])
        _greatest(k, self, lead, spatial, ["1"] * count)


def _greatest(
    k: KernelBuilder, self: TensorSpec, lead: Sequence[str], spatial: Sequence[str], steps: Sequence[str]
) -> None:
    """Write the greatest element between `begin` and `end`: the first of equal ones, the last NaN."""
    x, count = k.read(self), len(spatial)
    plane = self.shape[-count:]
    k.fits(math.prod(plane))
    inner = names("w", count)
    kind = k.compute_type(x.dtype)
    k.add(f"{kind} best = {k.language.least(x.dtype)};")
    k.add(f"i64 at = {flattened(k, names('begin', count), plane)};")
    with nest(k, *((w, f"end{d}", f"begin{d}", steps[d]) for d, w in enumerate(inner))):
        k.add(f"const {kind} value = {x.at(*lead, *inner)};")
        nan = " || value != value" if x.dtype in FLOATS else ""
        k.add(f"if (value > best{nan}) {{ best = value; at = {flattened(k, inner, plane)}; }}")
    k.store([*lead, *spatial], "best")
    k.store([*lead, *spatial], "at", 1)


@GENERIC.kernel(
    "aten::max_pool2d_with_indices_backward",
    "aten::max_pool3d_with_indices_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d_backward",
)
def max_pool_backward(
    k: KernelBuilder, grad_output: TensorSpec, self: TensorSpec, indices: TensorSpec, **window: Any
) -> None:
    """Write the gradient of maxima: each goes to where its maximum came from.

    A work-item has a plane, and adds to it in the order of the outputs, in the result's type, as ATen does.
    """
    count = pooled_dims(k.call)
    grad, where, made = k.read(grad_output), k.read(indices), k.result()
    plane = made.spec.shape[-count:]
    lead, out, place = names("b", len(made.spec.shape) - count), names("o", count), names("p", count)
    steps = math.prod(plane) + math.prod(grad_output.shape[-count:])
    with k.items(*zip(lead, made.spec.shape, strict=False), steps=steps):
        with nest(k, *((p, k.size(size)) for p, size in zip(place, plane, strict=True))):
            k.store([*lead, *place], k.number(0, made.dtype))
        with nest(k, *((o, grad.size(len(lead) + d)) for d, o in enumerate(out))):
            k.add(f"const i64 at = {where.at(*lead, *out)};")
            outside = f"at < 0 || at >= {k.size(math.prod(plane))}"
            k.report(outside, INDEX_OUT_OF_RANGE)
            with k.block(f"if (!({outside}))"):
                for d, p in enumerate(place):
                    inner = k.size(math.prod(plane[d + 1 :]))
                    wrap = f" % {k.size(plane[d])}" if d else ""
                    k.add(f"const i64 {p} = at / {inner}{wrap};")
                k.store([*lead, *place], f"{made.at(*lead, *place)} + {grad.at(*lead, *out)}")
