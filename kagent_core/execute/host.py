"""Torch tensors as buffers, and views on them by spec."""

from __future__ import annotations

import ctypes

import torch

from kagent_core.capture.schemas import torch_dtype
from kagent_core.specs import TensorSpec

_as_strided = torch.ops.aten.as_strided.default._op
_set = torch.ops.aten.set_.source_Storage_storage_offset._op


def view_of(tensor: torch.Tensor, base: TensorSpec, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor that `spec` describes, on the memory of `tensor`, which `base` describes."""
    same_bits = spec.conj == base.conj and spec.neg == base.neg
    if spec.dtype == base.dtype and same_bits:
        offset = tensor.storage_offset() + spec.storage_offset - base.storage_offset
        return _as_strided(tensor, spec.shape, spec.strides, offset)  # type: ignore[no-any-return]
    itemsize = spec.dtype.itemsize
    nbytes = tensor.storage_offset() * base.dtype.itemsize - base.storage_offset * base.dtype.itemsize
    view = torch.empty(0, dtype=torch_dtype(spec.dtype), device=tensor.device)
    _set(view, tensor.untyped_storage(), nbytes // itemsize + spec.storage_offset, spec.shape, spec.strides)
    if spec.conj:
        view = torch._conj(view)
    return torch._neg_view(view) if spec.neg else view


def empty_like_spec(spec: TensorSpec, nbytes: int, device: str | None = "cpu") -> torch.Tensor:
    """Return a new tensor with a spec's geometry, whose storage has at least `nbytes` bytes, on a torch device."""
    dtype = torch_dtype(spec.dtype)
    count = -(-max(nbytes, spec.range.end) // spec.dtype.itemsize)
    flat = torch.empty(count, dtype=dtype, device=device)
    return _as_strided(flat, spec.shape, spec.strides, spec.storage_offset)  # type: ignore[no-any-return]


def host_bytes(tensor: torch.Tensor, base: TensorSpec, nbytes: int) -> memoryview:
    """Return the bytes of a buffer in host memory, from its start. The caller keeps `tensor` alive."""
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address_of(tensor, base))).cast("B")


def address_of(tensor: torch.Tensor, base: TensorSpec) -> int:
    """Return where the buffer that a tensor stands for begins, in the memory of the tensor's device."""
    shift = (int(tensor.storage_offset()) - base.storage_offset) * base.dtype.itemsize
    # of the storage: a tensor without elements has no address of its own
    return int(tensor.untyped_storage().data_ptr()) + shift
