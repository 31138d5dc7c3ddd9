"""Writing to places in the order in which a whole tensor is read: one work-item does it all."""

from __future__ import annotations

from typing import Any

from kagent_core.codegen.c_family import INDEX_OUT_OF_RANGE
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import broadcast, names, nest, unflattened
from kagent_core.specs import TensorSpec


@GENERIC.kernel("aten::masked_scatter")
def masked_scatter(k: KernelBuilder, self: TensorSpec, mask: TensorSpec, source: TensorSpec) -> None:
    """Write a tensor with the elements of another, one after the other, wherever a mask is set."""
    made, x = k.call.outputs[0], k.read(source)
    places = names("d", len(made.shape))
    with k.items(("all", 1), steps=made.numel):
        k.add(f"{k.index_type} taken = 0;")
        with nest(k, *((place, k.size(size)) for place, size in zip(places, made.shape, strict=True))):
            kept = k.read(self).at(*broadcast(places, self.shape))
            k.add(f"{k.compute_type(x.dtype)} value = {kept};")
            with k.block(f"if ({k.read(mask).at(*broadcast(places, mask.shape))})"):
                missing = f"taken >= {k.size(source.numel)}"
                k.report(missing, INDEX_OUT_OF_RANGE)
                if source.numel:
                    k.add(f"if (!({missing})) value = {x.at(*unflattened(k, 'taken', source.shape))};")
                k.add("taken++;")
            k.store(places, "value")


@GENERIC.kernel("aten::masked_scatter_backward")
def masked_scatter_backward(k: KernelBuilder, grad_output: TensorSpec, mask: TensorSpec, sizes: Any) -> None:
    """Write the elements of a gradient where a mask is set, one after the other, and zeros behind them."""
    made, grad = k.call.outputs[0], k.read(grad_output)
    places = names("d", len(grad_output.shape))
    with k.items(("all", 1), steps=made.numel + grad_output.numel):
        k.add(f"{k.index_type} taken = 0;")
        with nest(k, *((place, k.size(size)) for place, size in zip(places, grad_output.shape, strict=True))):
            chosen = k.read(mask).at(*broadcast(places, mask.shape))
            with k.block(f"if ({chosen} && taken < {k.size(made.numel)})"):
                k.store(unflattened(k, "taken", made.shape), grad.at(*places))
                k.add("taken++;")
        with k.loop("rest", k.size(made.numel), "taken"):
            k.store(unflattened(k, "rest", made.shape), k.number(0, grad.dtype))


@GENERIC.kernel("aten::put")
def put(k: KernelBuilder, self: TensorSpec, index: TensorSpec, source: TensorSpec, accumulate: bool) -> None:
    """Write a tensor with values put, or added, at places that are counted in row-major order."""
    out, places = k.result(), names("d", len(self.shape))
    numel = k.size(self.numel)
    with k.items(("all", 1), steps=self.numel + index.numel):
        with nest(k, *((place, k.size(size)) for place, size in zip(places, self.shape, strict=True))):
            k.store(places, k.read(self).at(*places))
        with k.loop("s", k.size(index.numel)):
            k.add(f"i64 at = {k.read(index).at(*unflattened(k, 's', index.shape))};", f"if (at < 0) at += {numel};")
            outside = f"at < 0 || at >= {numel}"
            k.report(outside, INDEX_OUT_OF_RANGE)
            with k.block(f"if (!({outside}))"):
                place = unflattened(k, "at", self.shape)
                value = k.read(source).at(*unflattened(k, "s", source.shape))
                sign = "|" if out.dtype == "bool" else "+"
                k.store(place, f"{out.at(*place)} {sign} {value}" if accumulate else value)
