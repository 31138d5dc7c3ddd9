"""Gradients of upsampling and of replication padding: an input element per work-item.

It sums over the output elements that were made of it. Their source positions grow with their own, so that they are an
interval in each dimension, which a binary search finds whatever the rounding of the positions is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import names, nest
from kagent_core.specs import TensorSpec


@dataclass(frozen=True)
class Resampled:
    """One spatial dimension of an upsampling.

    Attributes
    ----------
    size, made
        Sizes of the input and of the output.
    given
        Output positions per input position, where the caller says so; else the sizes tell.
    mode
        ``nearest``, ``exact`` (nearest to the centre), ``linear`` or ``corners`` (linear, with the corners aligned).
    dtype
        What positions are computed in.
    """

    size: int
    made: int
    given: float | None
    mode: str
    dtype: str

    def position(self, k: KernelBuilder, o: str) -> str:
        """Return the position in the input that an output element is made of."""
        if self.made == self.size and self.mode != "exact":
            return o
        if self.mode == "nearest" and self.made == 2 * self.size:
            return f"{o} / 2"
        kind, scale, half = k.compute_type(self.dtype), self._scale(k), k.number(0.5, self.dtype)
        if self.mode in ("nearest", "corners"):
            return f"({kind}){o} * {scale}"
        if self.mode == "exact":
            return f"(({kind}){o} + {half}) * {scale}"
        centre = f"{scale} * (({kind}){o} + {half}) - {half}"
        return f"({centre} < 0 ? 0 : {centre})"

    def _scale(self, k: KernelBuilder) -> str:
        """Return how many input positions an output position is, rounded as ATen rounds it."""
        kind = k.compute_type(self.dtype)
        if self.mode == "corners":
            return f"(({kind}){k.size(self.size - 1)} / {k.size(self.made - 1)})" if self.made > 1 else "0"
        if self.given is not None and self.given > 0:
            return k.number(1.0 / self.given, self.dtype)
        return f"(({kind}){k.size(self.size)} / {k.size(self.made)})"

    def source(self, k: KernelBuilder, o: str) -> str:
        """Return the input element that an output element is made of, the first one of two."""
        last = k.size(self.size - 1)
        position = f"(i64)({self.position(k, o)})"
        return f"({position} < {last} ? {position} : {last})"

    @property
    def linear(self) -> bool:
        """Whether output elements are made of two neighbours."""
        return self.mode in ("linear", "corners")

    def bounds(self, k: KernelBuilder, number: int, p: str) -> None:
        """Write the interval of the output elements that are made of an input element, ``first`` to ``last``."""
        lowest = f"{p} - 1" if self.linear else p
        for name, target in ((f"first{number}", lowest), (f"last{number}", f"{p} + 1")):
            k.add(f"{k.index_type} {name} = 0;")
            with k.block(f"for ({k.index_type} end = {k.size(self.made)}; {name} < end;)"):
                k.add(f"const {k.index_type} middle = {name} + (end - {name}) / 2;")
                k.add(f"if ({self.source(k, 'middle')} < {target}) {name} = middle + 1; else end = middle;")

    def weight(self, k: KernelBuilder, number: int, p: str, o: str) -> None:
        """Write the weight that an input element has in an output element."""
        kind = k.compute_type(self.dtype)
        low, last = f"low{number}", k.size(self.size - 1)
        k.add(f"const {k.index_type} {low} = {self.source(k, o)};")
        k.add(f"const {k.index_type} high{number} = {low} < {last} ? {low} + 1 : {low};")
        k.add(f"const {kind} part{number} = {self.position(k, o)} - ({kind})low{number};")
        k.add(f"const {kind} clipped{number} = part{number} < 0 ? 0 : part{number} > 1 ? 1 : part{number};")
        k.add(
            f"const {kind} weight{number} = ({p} == low{number} ? 1 - clipped{number} : 0) "
            f"+ ({p} == high{number} ? clipped{number} : 0);"
        )


def _upsample_backward(k: KernelBuilder, grad_output: TensorSpec, mode: str, scales: Sequence[float | None]) -> None:
    grad, made = k.read(grad_output), k.call.outputs[0]
    lead, places, outs = names("b", 2), names("p", len(scales)), names("o", len(scales))
    # positions of nearest elements are float32 whatever the element type is
    dtype = "float64" if grad.dtype == "float64" and mode in ("linear", "corners") else "float32"
    dims = [
        Resampled(size, out, scale, mode, dtype)
        for size, out, scale in zip(made.shape[2:], grad_output.shape[2:], scales, strict=True)
    ]
    steps = max(grad_output.numel // max(made.numel, 1), 1) * 16
    with k.items(*zip([*lead, *places], made.shape, strict=True), steps=steps):
        for number, (dim, p) in enumerate(zip(dims, places, strict=True)):
            dim.bounds(k, number, p)
        k.add(f"{k.compute_type(grad.dtype)} sum = 0;")
        with nest(k, *((o, f"last{n}", f"first{n}") for n, o in enumerate(outs))):
            value = grad.at(*lead, *outs)
            for number, (dim, p, o) in enumerate(zip(dims, places, outs, strict=True)):
                if dim.linear:
                    dim.weight(k, number, p, o)
                    value += f" * weight{number}"
            k.add(f"sum += {value};")
        k.store([*lead, *places], "sum")


def _register(signature: str, mode: str, scale_names: Sequence[str]) -> None:
    @GENERIC.kernel(signature, epilogue=True)
    def backward(k: KernelBuilder, grad_output: TensorSpec, **arguments: object) -> None:
        chosen = "corners" if arguments.get("align_corners") else mode
        scales = [arguments[name] for name in scale_names]
        _upsample_backward(k, grad_output, chosen, [s if isinstance(s, float) else None for s in scales])


for _count, _names in ((1, ("scales",)), (2, ("scales_h", "scales_w")), (3, ("scales_d", "scales_h", "scales_w"))):
    _register(f"aten::upsample_nearest{_count}d_backward", "nearest", _names)
    _register(f"aten::_upsample_nearest_exact{_count}d_backward", "exact", _names)
    _linear = ("linear", "bilinear", "trilinear")[_count - 1]
    _register(f"aten::upsample_{_linear}{_count}d_backward", "linear", _names)


@GENERIC.kernel(
    "aten::replication_pad1d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
    epilogue=True,
)
def replication_pad_backward(
    k: KernelBuilder, grad_output: TensorSpec, self: TensorSpec, padding: Sequence[int]
) -> None:
    """Write the gradient of padding with the outermost elements, which therefore get the sum of theirs."""
    grad, count = k.read(grad_output), len(padding) // 2
    lead, places, outs = names("b", len(self.shape) - count), names("p", count), names("o", count)
    with k.items(*zip([*lead, *places], self.shape, strict=True)):
        for number, p in enumerate(places):
            dim = len(lead) + number
            before, size, made = padding[2 * (count - 1 - number)], k.size(self.shape[dim]), grad.size(dim)
            k.fits(self.shape[dim] + abs(before))
            shifted = f"{p} + {k.size(before)}".replace("+ -", "- ")
            k.add(f"const {k.index_type} own{number} = {shifted};")
            k.add(f"const {k.index_type} from{number} = {p} == 0 || own{number} < 0 ? 0 : own{number};")
            k.add(f"const {k.index_type} to{number} = {p} == {size} - 1 ? {made} : own{number} + 1;")
            k.add(f"const {k.index_type} last{number} = to{number} < {made} ? to{number} : {made};")
        k.add(f"{k.compute_type(grad.dtype)} sum = 0;")
        with nest(k, *((o, f"last{n}", f"from{n}") for n, o in enumerate(outs))):
            k.add(f"sum += {grad.at(*lead, *outs)};")
        k.store([*lead, *places], "sum")
