"""PyTorch's own CPU kernels as a kagent registry.

An operator's kernel is found by its exact signature in torch's dispatcher. Where ATen has an ``out=`` variant with a
kernel of its own for the CPU, results go straight into planned memory; the generated ``out=`` variants, which call
the functional operator and copy, are passed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.capture.schemas import schema_of
from kagent_core.registry import KernelRegistry
from kagent_core.specs import Access, KernelDescriptor, OpCall, Parameter

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


@dataclass(frozen=True)
class AtenKernel:
    """One of ATen's kernels, callable as the operator is.

    Attributes
    ----------
    call
        The functional operator, or the in-place one.
    into
        The variant that writes into given results, or None.
    out_names
        Names of those results' parameters.
    """

    call: Callable[..., Any]
    into: Callable[..., Any] | None = None
    out_names: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the variant that the arguments are for."""
        if self.into is not None and self.out_names[0] in kwargs:
            return self.into(*args, **kwargs)
        return self.call(*args, **kwargs)


def _copy_into(self: torch.Tensor, *, out: torch.Tensor, **options: Any) -> None:
    """Clone and conversion write exactly what ``copy_`` writes; their options say how the result is laid out."""
    _copy(out, self)


def _fill_into(size: Any, value: Any, *, out: torch.Tensor, **options: Any) -> None:
    _fill(out, value)


def _full_like_into(self: torch.Tensor, value: Any, *, out: torch.Tensor, **options: Any) -> None:
    _fill(out, value)


_CPU_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "SparseCPU",
    "SparseCsrCPU",
    "MkldnnCPU",
    "QuantizedCPU",
)
"""Dispatch keys under which torch has kernels that run on the CPU."""

_copy = torch.ops.aten.copy_.default._op
_fill = torch.ops.aten.fill_.Scalar._op

_HAND_WRITTEN: dict[str, Callable[..., Any]] = {
    "aten::clone": _copy_into,
    "aten::_to_copy": _copy_into,
    "aten::full": _fill_into,
    "aten::full_like": _full_like_into,
}
"""Operators whose result is better written in place than through what ATen offers."""


def aten_registry() -> KernelRegistry:
    """Return a registry that finds every operator with a CPU kernel, of any namespace."""
    return KernelRegistry("cpu", resolver=aten_kernel)


def aten_kernel(call: OpCall) -> KernelDescriptor | None:
    """Return ATen's kernel for a call, or None when torch has none for the CPU."""
    overload = call.overload
    if not isinstance(overload, torch._ops.OpOverload) or not _runs_on_cpu(overload):
        return None
    into: Callable[..., Any] | None = None
    names: tuple[str, ...] = ()
    variant = call.signature
    if call.signature in _HAND_WRITTEN:
        into, names, variant = _HAND_WRITTEN[call.signature], ("out",), f"{call.signature} in place"
    elif not schema_of(overload).writes:
        found = out_variant(overload)
        if found is not None:
            into, variant = found._op, f"aten::{found.__name__}"
            names = tuple(a.name for a in found._schema.arguments if a.is_out)
    kernel = AtenKernel(overload._op, into, names)
    makes_results = any(arg.alias_info is None for arg in overload._schema.returns)
    return KernelDescriptor(
        signature=call.signature,
        name=variant,
        function=kernel,
        parameters=tuple(Parameter(name, "Tensor", Access.OUT) for name in names),
        lazy_bits=True,
        allocates=into is None and makes_results,
        origin=f"torch {torch.__version__}",
    )


@functools.cache
def out_variant(overload: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the ``out=`` overload that computes what a functional overload does, if it has a CPU kernel of its own."""
    wanted = [(a.name, str(a.type)) for a in overload._schema.arguments]
    results = len(overload._schema.returns)
    packet = overload.overloadpacket
    name: str
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [a for a in arguments if a.is_out]
        given = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) != results or not outs or any(str(a.type) != "Tensor" for a in outs):
            continue
        if given == wanted and _has_kernel(candidate.name(), "CPU"):
            return candidate  # type: ignore[no-any-return]
    return None


def _runs_on_cpu(overload: torch._ops.OpOverload) -> bool:
    return any(_has_kernel(overload.name(), key) for key in _CPU_KEYS)
