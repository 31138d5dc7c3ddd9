"""How the window of a convolution moves over its input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kagent_core.codegen.arguments import spread
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.specs import TensorSpec
from kagent_core.specs.tiles import GREATEST


@dataclass(frozen=True)
class Window:
    """How a kernel moves over an input: one number per spatial dimension.

    Attributes
    ----------
    stride, padding, dilation
        As PyTorch's.
    groups
        Into how many groups the channels fall.
    inverted
        Whether places are followed backwards, from the input to the outputs that it takes part in.
    size
        Of the window: its taps along each dimension.
    leaves
        Whether it goes beyond the input's end along a dimension, where nothing may be in front.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    inverted: bool
    leaves: tuple[bool, ...] = ()

    @staticmethod
    def of(
        size: tuple[int, ...],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        inverted: bool = False,
    ) -> Window:
        """Return it, given PyTorch's arguments, in which one number may stand for all dimensions."""
        steps, pads, apart = (spread(values, len(size)) for values in (stride, padding, dilation))
        return Window(size, steps, pads, apart, groups, inverted)

    def place(self, k: KernelBuilder, n: int, at: str, tap: str, size: int) -> tuple[str, str]:
        """Return where a tap of the kernel reads along dimension `n`, and when that is inside; ``""`` for always."""
        stride, shift = self.stride[n], k.size(self.padding[n])
        k.fits(size * stride + 2 * self.padding[n] + self.size[n] * self.dilation[n] + GREATEST["columns"] * stride)
        moved = f"{tap} * {k.size(self.dilation[n])}"
        if not self.inverted:
            where = f"({at} * {k.size(stride)} + {moved} - {shift})"
            return where, f"((u64){where} < (u64){k.size(size)})" if self._is_outside(n) else ""
        where = f"({at} + {shift} - {moved})"
        inside = f"((u64){where} < (u64){k.size(size * stride)})"
        if stride == 1:
            return where, inside
        return f"({where} / {stride})", f"{inside} & ({where} % {stride} == 0)"

    def _is_outside(self, n: int) -> bool:
        """Whether some places along a dimension are outside of the input."""
        return self.padding[n] > 0 or (bool(self.leaves) and self.leaves[n])

    # -- phases: followed backwards, places that are a stride apart meet the same taps, each stride-th one

    @property
    def phases(self) -> tuple[int, ...]:
        """Into how many phases the places of each dimension fall."""
        pairs = zip(self.stride, self.dilation, strict=True)
        return tuple(stride if self.inverted and dilation == 1 else 1 for stride, dilation in pairs)

    def of_phase(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many of some places, or of some taps, one phase has at most."""
        return tuple(-(-size // phases) for size, phases in zip(sizes, self.phases, strict=True))

    def place_of_phase(self, k: KernelBuilder, n: int, at: str, tap: str, size: int) -> tuple[str, str]:
        """Return what `place` does, for a place and a tap as they are counted in phase ``r<n>``."""
        if self.phases[n] == 1:
            return self.place(k, n, at, tap, size)
        where = f"({at} + (r{n} + {k.size(self.padding[n])}) / {self.phases[n]} - {tap})"
        return where, f"((u64){where} < (u64){k.size(size)}) & ({self.tap_of_phase(k, n, tap)} < {self.size[n]})"

    def tap_of_phase(self, k: KernelBuilder, n: int, tap: str) -> str:
        """Return the tap that one of phase ``r<n>`` is; it may be past the last one."""
        if self.phases[n] == 1:
            return tap
        return f"((r{n} + {k.size(self.padding[n])}) % {self.phases[n]} + {tap} * {self.phases[n]})"

    def whole_place(self, n: int, at: str) -> str:
        """Return the place that one of phase ``r<n>`` is; it may be past the last one."""
        return at if self.phases[n] == 1 else f"({at} * {self.phases[n]} + r{n})"


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether neighbours in memory are neighbouring channels."""
    steps = [stride for size, stride in zip(spec.shape[2:], spec.strides[2:], strict=True) if size != 1]
    return spec.shape[1] != 1 and bool(steps) and spec.strides[1] < min(steps)
