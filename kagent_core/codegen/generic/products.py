"""Matrix products."""

from __future__ import annotations

from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.specs import TensorSpec


@GENERIC.kernel("aten::mm", epilogue=True)
def mm(k: KernelBuilder, self: TensorSpec, mat2: TensorSpec) -> None:
    """Write one element of the product per work-item."""
    a, b = k.read(self), k.read(mat2)
    kind = k.compute_type(a.dtype)
    with k.items(("i", self.shape[0]), ("j", mat2.shape[1]), steps=self.shape[1]):
        k.add(f"{kind} sum = 0;")
        with k.loop("p", a.size(1)):
            k.add(f"sum += {a.at('i', 'p')} * {b.at('p', 'j')};")
        k.store(["i", "j"], "sum")
