"""Averages of pooling windows: an output element per work-item; of their gradients, an input element."""

from __future__ import annotations

import math
from typing import Any

from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import names, nest
from kagent_core.codegen.generic.windows import Window, bounds, elements, parts
from kagent_core.specs import OpCall, TensorSpec


def _zero_divisor(call: OpCall) -> str | None:
    return "the divisor is 0" if call.arguments.get("divisor_override") == 0 else None


@GENERIC.kernel("aten::avg_pool2d", accepts=_zero_divisor, epilogue=True)
def avg_pool2d(k: KernelBuilder, self: TensorSpec, **window: Any) -> None:
    """Write the average of each window."""
    _avg_pool(k, self, 2, **window)


@GENERIC.kernel("aten::avg_pool3d", accepts=_zero_divisor, epilogue=True)
def avg_pool3d(k: KernelBuilder, self: TensorSpec, **window: Any) -> None:
    """Write the average of each window."""
    _avg_pool(k, self, 3, **window)


def _avg_pool(
    k: KernelBuilder,
    self: TensorSpec,
    count: int,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> None:
    x, window = k.read(self), Window.of(count, kernel_size, stride, padding)
    axes, lead, spatial = elements(k.call.outputs[0], count, "o")
    kind, inner = k.compute_type(x.dtype), names("w", count)
    with k.items(*axes, steps=math.prod(window.size)):
        bounds(k, window, spatial, self.shape[-count:])
        k.add(f"{kind} sum = 0;")
        with nest(k, *((w, f"end{d}", f"begin{d}") for d, w in enumerate(inner))):
            k.add(f"sum += {x.at(*lead, *inner)};")
        # a window that lies in the padding has no elements, and 0 for its average
        empty = " || ".join(f"end{d} <= begin{d}" for d in range(count))
        k.add(f"const {kind} divisor = {_divisor(count, count_include_pad, divisor_override)};")
        k.store([*lead, *spatial], f"({empty} ? ({kind})0 : sum / divisor)")


def _divisor(count: int, include_pad: bool, override: int | None) -> str:
    if override is not None:
        return str(override)
    first, last = ("start", "reach") if include_pad else ("begin", "end")
    return " * ".join(f"({last}{d} - {first}{d})" for d in range(count))


@GENERIC.kernel("aten::_adaptive_avg_pool2d", epilogue=True)
def adaptive_avg_pool2d(k: KernelBuilder, self: TensorSpec, output_size: Any) -> None:
    """Write the average of each of the parts that the input is cut into."""
    _adaptive_avg_pool(k, self, 2)


@GENERIC.kernel("aten::_adaptive_avg_pool3d", epilogue=True)
def adaptive_avg_pool3d(k: KernelBuilder, self: TensorSpec, output_size: Any) -> None:
    """Write the average of each of the parts that the input is cut into."""
    _adaptive_avg_pool(k, self, 3)


def _adaptive_avg_pool(k: KernelBuilder, self: TensorSpec, count: int) -> None:
    x, made = k.read(self), k.call.outputs[0]
    axes, lead, spatial = elements(made, count, "o")
    inner = names("w", count)
    with k.items(*axes, steps=max(self.numel // max(made.numel, 1), 1)):
        parts(k, spatial, self.shape[-count:], made.shape[-count:])
        k.add(f"{k.compute_type(x.dtype)} sum = 0;")
        with nest(k, *((w, f"end{d}", f"begin{d}") for d, w in enumerate(inner))):
            k.add(f"sum += {x.at(*lead, *inner)};")
        k.store([*lead, *spatial], "sum" + "".join(f" / (end{d} - begin{d})" for d in range(count)))


@GENERIC.kernel("aten::avg_pool2d_backward", accepts=_zero_divisor, epilogue=True)
def avg_pool2d_backward(k: KernelBuilder, grad_output: TensorSpec, self: TensorSpec, **window: Any) -> None:
    """Write the gradient of 2-d averages."""
    _avg_backward(k, grad_output, self, 2, **window)


@GENERIC.kernel("aten::avg_pool3d_backward", accepts=_zero_divisor, epilogue=True)
def avg_pool3d_backward(k: KernelBuilder, grad_output: TensorSpec, self: TensorSpec, **window: Any) -> None:
    """Write the gradient of 3-d averages."""
    _avg_backward(k, grad_output, self, 3, **window)


def _avg_backward(
    k: KernelBuilder,
    grad_output: TensorSpec,
    self: TensorSpec,
    count: int,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> None:
    """Write an input element per work-item: the sum over the windows that it is in."""
    grad, window = k.read(grad_output), Window.of(count, kernel_size, stride, padding)
    axes, lead, places = elements(self, count, "p")
    out = names("o", count)
    kind = k.compute_type(grad.dtype)
    with k.items(*axes, steps=math.prod(window.size)):
        for d, p in enumerate(places):
            stride_d, made = k.size(window.stride[d]), grad.size(len(lead) + d)
            k.fits(self.shape[len(lead) + d] + 2 * window.padding[d] + window.size[d])
            k.add(f"const {k.index_type} shift{d} = {p} + {k.size(window.padding[d])} - {k.size(window.size[d])};")
            k.add(f"const {k.index_type} first{d} = shift{d} < 0 ? 0 : shift{d} / {stride_d} + 1;")
            k.add(f"const {k.index_type} past{d} = ({p} + {k.size(window.padding[d])}) / {stride_d} + 1;")
            k.add(f"const {k.index_type} last{d} = past{d} < {made} ? past{d} : {made};")
        k.add(f"{kind} sum = 0;")
        with nest(k, *((o, f"last{d}", f"first{d}") for d, o in enumerate(out))):
            bounds(k, window, out, self.shape[-count:])
            k.add(f"const {kind} divisor = {_divisor(count, count_include_pad, divisor_override)};")
            k.add(f"sum += {grad.at(*lead, *out)} / divisor;")
        k.store([*lead, *places], "sum")


@GENERIC.kernel("aten::_adaptive_avg_pool2d_backward", epilogue=True)
def adaptive_avg_pool2d_backward(k: KernelBuilder, grad_output: TensorSpec, self: TensorSpec) -> None:
    """Write the gradient of adaptive 2-d averages."""
    _adaptive_avg_backward(k, grad_output, self, 2)


@GENERIC.kernel("aten::_adaptive_avg_pool3d_backward", epilogue=True)
def adaptive_avg_pool3d_backward(k: KernelBuilder, grad_output: TensorSpec, self: TensorSpec) -> None:
    """Write the gradient of adaptive 3-d averages."""
    _adaptive_avg_backward(k, grad_output, self, 3)


def _adaptive_avg_backward(k: KernelBuilder, grad_output: TensorSpec, self: TensorSpec, count: int) -> None:
    """Write an input element per work-item: the sum over the parts that it is in."""
    grad, sizes, made = k.read(grad_output), self.shape[-count:], grad_output.shape[-count:]
    axes, lead, places = elements(self, count, "p")
    out = names("o", count)
    with k.items(*axes, steps=max(grad_output.numel // max(self.numel, 1), 1)):
        for d, p in enumerate(places):
            size, total = k.size(sizes[d]), k.size(made[d])
            k.fits((sizes[d] + 1) * made[d] + sizes[d])
            k.add(f"const {k.index_type} first{d} = {p} * {total} / {size};")
            k.add(f"const {k.index_type} last{d} = (({p} + 1) * {total} + {size} - 1) / {size};")
        k.add(f"{k.compute_type(grad.dtype)} sum = 0;")
        with nest(k, *((o, f"last{d}", f"first{d}") for d, o in enumerate(out))):
            parts(k, out, sizes, made)
            k.add(f"sum += {grad.at(*lead, *out)}" + "".join(f" / (end{d} - begin{d})" for d in range(count)) + ";")
        k.store([*lead, *places], "sum")
