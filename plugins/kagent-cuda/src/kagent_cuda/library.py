"""torch's own CUDA kernels for products, convolutions and attention, as a kagent registry's.

They are called on tensors that lie where a plan has them, in torch's memory or in kagent's, while the stream that they
are to run on is torch's current one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kagent_core.capture.schemas import torch_dtype
from kagent_core.device import PointerArg, call_kernel
from kagent_core.specs import KernelDescriptor, OpCall, TensorSpec

_INTO = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""Operators that write a result where it is wanted. What the others return is copied there."""

_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)

SIGNATURES = frozenset({*_INTO, "aten::convolution", "aten::convolution_backward", *_ATTENTION})
"""What torch's own kernels are taken for."""


def library_kernel(call: OpCall) -> KernelDescriptor | None:
    """Return torch's kernel for a call, or None for an operator that kagent has kernels of its own for."""
    if call.signature not in SIGNATURES or not isinstance(call.overload, torch._ops.OpOverload):
        return None
    into = call.overload.overloadpacket.out if call.signature in _INTO else None
    return KernelDescriptor(
        signature=call.signature,
        name=f"torch's {call.signature}",
        function=LibraryFunction(call.overload, into),
        lazy_bits=True,
        accepts=_why_not if call.signature in _ATTENTION else None,
        origin=f"torch {torch.__version__}, CUDA {torch.version.cuda}",
    )


def _why_not(call: OpCall) -> str | None:
    if call.arguments.get("dropout_p"):
        return "dropout in attention draws numbers of torch's own generator on the device"
    return None


@dataclass(frozen=True)
class LibraryFunction:
    """An operator that writes its results into tensors behind its arguments.

    Attributes
    ----------
    overload
        The operator.
    into
        The variant that writes a result by itself, or None.
    """

    overload: Callable[..., Any]
    into: Callable[..., Any] | None = None

    def __call__(self, given: Sequence[Any], named: dict[str, Any], results: Sequence[torch.Tensor]) -> None:
        """Call the operator.

        Parameters
        ----------
        given, named
            Its arguments.
        results
            Where what it returns is to lie, in order.
        """
        if self.into is not None:
            self.into(*given, **named, out=results[0])
            return
        made = [leaf for leaf in pytree.tree_leaves(self.overload(*given, **named)) if isinstance(leaf, torch.Tensor)]
        for result, tensor in zip(results, made, strict=True):
            if result.shape != tensor.shape:
                raise RuntimeError(f"torch returned {list(tensor.shape)}, expected {list(result.shape)}")
            result.copy_(tensor)


def bound(function: LibraryFunction, args: Sequence[Any], tensor_of: Callable[[PointerArg], Any]) -> Callable[[], None]:
    """Return what calls an operator on some arguments again and again.

    Parameters
    ----------
    function
        The operator.
    args
        As `Runtime.launch` gets them: results are behind the operator's own arguments.
    tensor_of
        Makes a tensor of one that lies on the device.
    """
    collected: list[tuple[list[Any], dict[str, Any]]] = []

    def collect(*given: Any, **named: Any) -> None:
        collected.append((list(given), named))

    outs = [isinstance(arg, PointerArg) and arg.access.value == "out" for arg in args]

    def convert(arg: Any) -> Any:
        if isinstance(arg, (tuple, list)):
            return [convert(item) for item in arg]
        return tensor_of(arg) if isinstance(arg, PointerArg) else arg

    call_kernel(collect, [arg for arg, out in zip(args, outs, strict=True) if not out], convert)
    results = [convert(arg) for arg, out in zip(args, outs, strict=True) if out]
    [(given, named)] = collected
    return lambda: function(given, named, results)


def tensor_at(address: int, spec: TensorSpec, device: str) -> torch.Tensor:
    """Return a tensor on memory of a CUDA device. The caller keeps the memory alive.

    Parameters
    ----------
    address
        Of its first element.
    spec
        Its dtype, shape and strides.
    device
        As torch calls it.
    """
    dtype = torch_dtype(spec.dtype)
    if spec.span == 0:
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=device)
    flat = torch.as_tensor(_Bytes(address, spec.span * spec.dtype.itemsize), device=device).view(dtype)
    tensor = flat.as_strided(spec.shape, spec.strides)
    tensor = torch._conj(tensor) if spec.conj else tensor
    return torch._neg_view(tensor) if spec.neg else tensor


class _Bytes:
    """Bytes of a CUDA device, in the form that torch takes them in place."""

    def __init__(self, address: int, nbytes: int) -> None:
        # without a stream: what comes before is ordered already
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
