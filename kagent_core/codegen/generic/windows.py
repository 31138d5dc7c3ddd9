"""Windows of pooling: which elements of the input each element of the result is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.codegen.arguments import spread
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.loops import names
from kagent_core.specs import TensorSpec


@dataclass(frozen=True)
class Window:
    """Size of a pooling window and how it moves, per spatial dimension."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, count: int, size: Any, stride: Any, padding: Any, dilation: Any = 1) -> Window:
        """Return the window that ATen's arguments say: one number stands for all dimensions, no stride for the size."""
        return cls(*(spread(v, count) for v in (size, stride or size, padding, dilation)))


def elements(spec: TensorSpec, count: int, place: str) -> tuple[list[tuple[str, int]], list[str], list[str]]:
    """Return a work-item per element: the loops, the names of the leading dimensions, of the spatial ones."""
    lead, spatial = names("b", len(spec.shape) - count), names(place, count)
    return list(zip([*lead, *spatial], spec.shape, strict=True)), lead, spatial


def parts(k: KernelBuilder, places: Sequence[str], sizes: Sequence[int], counts: Sequence[int]) -> None:
    """Write where the part of a dimension begins and ends that an output element of adaptive pooling is made of."""
    for d, o in enumerate(places):
        size, count = k.size(sizes[d]), k.size(counts[d])
        k.fits((counts[d] + 1) * sizes[d] + counts[d])
        k.add(f"const {k.index_type} begin{d} = {o} * {size} / {count};")
        k.add(f"const {k.index_type} end{d} = (({o} + 1) * {size} + {count} - 1) / {count};")


def bounds(k: KernelBuilder, window: Window, places: Sequence[str], sizes: Sequence[int]) -> None:
    """Write which elements a window has: between `begin` and `end`, and between `start` and `reach` with padding."""
    for d, o in enumerate(places):
        size, pad = k.size(sizes[d]), k.size(window.padding[d])
        k.fits(sizes[d] + 2 * window.padding[d] + window.size[d] + window.stride[d])
        k.add(f"const {k.index_type} start{d} = {o} * {k.size(window.stride[d])} - {pad};")
        k.add(f"const {k.index_type} far{d} = start{d} + {k.size(window.size[d])};")
        k.add(f"const {k.index_type} reach{d} = far{d} < {size} + {pad} ? far{d} : {size} + {pad};")
        k.add(f"const {k.index_type} begin{d} = start{d} > 0 ? start{d} : 0;")
        k.add(f"const {k.index_type} end{d} = reach{d} < {size} ? reach{d} : {size};")
