"""Writing to places that index tensors give: see `placing` for how the work is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kagent_core.codegen.generic.block_placing import write_placing
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import broadcast, names, unflattened
from kagent_core.codegen.generic.placing import Placing
from kagent_core.specs import OpCall, TensorSpec


def _masks(call: OpCall) -> str | None:
    given = [index for index in call.arguments["indices"] if index is not None]
    masks = [index for index in given if index.dtype.name not in ("int32", "int64")]
    if not masks or (len(given) == 1 and masks[0].dtype.name == "bool" and call.arguments["values"].numel == 1):
        return None
    return f"{call.name} has an index of {masks[0].dtype}, which stands for as many as it has ones"


@GENERIC.kernel("aten::index_put", "aten::_unsafe_index_put", accepts=_masks)
def index_put(
    k: KernelBuilder, self: TensorSpec, indices: Sequence[TensorSpec | None], values: TensorSpec, accumulate: bool
) -> None:
    """Write a tensor with values put, or added, at the places that index tensors give.

    Of equal places the last wins, and sums are rounded as ATen's are.
    """
    masks = [d for d, index in enumerate(indices) if index is not None and index.dtype.name == "bool"]
    if masks:
        _masked(k, self, masks[0], indices[masks[0]], values, accumulate)
        return
    given = k.read(values)
    indexed = {d: index for d, index in enumerate(indices) if index is not None}
    shape = torch.broadcast_shapes(*(index.shape for index in indexed.values()))
    sources = names("b", len(shape))

    def steps(s: str) -> dict[str, str]:
        return dict(zip(sources, unflattened(k, s, shape), strict=True))

    def locate(s: str) -> list[str]:
        at = list(steps(s).values())
        return [k.read(index).at(*broadcast(at, index.shape)) for index in indexed.values()]

    def value(s: str) -> str:
        at = steps(s)
        place = [at.get(name, name) for name in _value_place(self, indexed, sources)]
        return given.at(*broadcast(place, values.shape))

    placing = Placing(
        self=self,
        place=[f"at{d}" if d in indexed else f"d{d}" for d in range(len(self.shape))],
        outer=(),
        rows=[(f"at{d}", self.shape[d]) for d in indexed],
        columns=[(f"d{d}", size) for d, size in enumerate(self.shape) if d not in indexed],
        count=math.prod(shape),
        locate=locate,
        value=value,
        reduce="sum" if accumulate else "",
        wide=False,
    )
    write_placing(k, placing)


def _masked(
    k: KernelBuilder, self: TensorSpec, first: int, mask: TensorSpec | None, values: TensorSpec, accumulate: bool
) -> None:
    """Write an element per work-item: one value goes wherever a mask, whose dimensions begin at `first`, is set."""
    if mask is None:
        raise TypeError("there is no mask")
    place = names("d", len(self.shape))
    kept, put = k.read(self).at(*place), k.read(values).at(*["0"] * len(values.shape))
    sign = "|" if self.dtype.name == "bool" else "+"
    with k.items(*(zip(place, self.shape, strict=True) if place else [("d", 1)])):
        chosen = k.read(mask).at(*place[first : first + len(mask.shape)])
        k.store(place, f"({chosen} ? {f'{kept} {sign} {put}' if accumulate else put} : {kept})")


def _value_place(self: TensorSpec, indexed: dict[int, TensorSpec], loops: list[str]) -> list[str]:
    """Return the index into what is put: where all indices are neighbours the places stand there, else in front."""
    positions = list(indexed)
    together = positions == list(range(positions[0], positions[-1] + 1))
    before = [f"d{d}" for d in range(len(self.shape)) if d not in indexed and (together and d < positions[0])]
    after = [f"d{d}" for d in range(len(self.shape)) if d not in indexed and not (together and d < positions[0])]
    return [*before, *loops, *after]
