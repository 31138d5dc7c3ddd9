"""A kernel as its author writes it, for the fake device: ``aten::addmm`` in tiles, and the prototype that goes with it.

In CUDA C++ it would be a ``__global__`` function in which every block of threads computes one tile of the result. Here
it is a Python function that does the blocks of the grid one after the other, and the threads of a block at once. It
sees memory as a kernel does: a pointer to the first element, and numbers. Where a row begins is its own affair.
"""

from __future__ import annotations

import torch

from kagent_core.layout import ANY_STRIDES, CONTIGUOUS
from kagent_core.prototype import parse_prototype
from kagent_core.specs import KernelDescriptor, LaunchConfig

PROTOTYPE = """
__global__ void tiled_addmm(const float* self, const float* mat1, const float* mat2, float* out,
                            int m, int n, int k, int self_row_stride, int self_column_stride,
                            float beta, float alpha);
"""
"""What the kernel takes. `mat1`, `mat2` and `out` are row-major; `self` has strides, of which some may be 0."""

DERIVED = {
    "m": "out.shape[0]",
    "n": "out.shape[1]",
    "k": "mat1.shape[1]",
    # as in broadcasting: every row reads the same element where `self` has one row, or no rows at all
    "self_row_stride": "0 if self.ndim < 2 or self.shape[0] == 1 else self.strides[0]",
    "self_column_stride": "0 if self.ndim < 1 or self.shape[-1] == 1 else self.strides[-1]",
}
"""Parameters that are no arguments of the operator, by what they are computed from."""


def tiled_addmm(
    bias: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    out: torch.Tensor,
    m: int,
    n: int,
    k: int,
    bias_row_stride: int,
    bias_column_stride: int,
    beta: float,
    alpha: float,
    *,
    config: LaunchConfig,
) -> None:
    """Fill `out` with ``beta * bias + alpha * (mat1 @ mat2)``, a tile of the result per block.

    What would be multiplied by 0 is not read, so that NaN and infinity in it do not count: `torch.addmm` promises this
    of ``beta``, and BLAS does it for ``alpha`` too.
    """
    bias_at, a, b, c = (_pointer(tensor) for tensor in (bias, mat1, mat2, out))
    width, height, _ = config.block
    thread_x, thread_y = torch.arange(width), torch.arange(height).unsqueeze(1)
    for block_y in range(config.grid[1]):
        for block_x in range(config.grid[0]):
            row, column = block_y * height + thread_y, block_x * width + thread_x
            inside = (row < m) & (column < n)  # a tile may stick out of the result
            total = torch.zeros(height, width)
            for first in range(0, k if alpha != 0 else 0, width):  # a step is what shared memory would hold
                along, down = first + thread_x, first + torch.arange(width).unsqueeze(1)
                left = _load(a, row * k + along, (row < m) & (along < k))
                total += left @ _load(b, down * n + column, (down < k) & (column < n))
            total *= alpha
            if beta != 0:
                total += beta * _load(bias_at, row * bias_row_stride + column * bias_column_stride, inside)
            c[(row * n + column)[inside]] = total[inside]


def tiled_addmm_kernel(priority: int = 1) -> KernelDescriptor:
    """Return the kernel as `FakeDevice` takes it, with its prototype and what it asks of its tensors.

    Parameters
    ----------
    priority
        By default it outranks the fake device's own kernel, which is left with what this one does not take.

    Examples
    --------
    >>> import kagent_core, torch
    >>> from kagent_core.testing.fake import FakeDevice
    >>> from kagent_core.testing.tiled import tiled_addmm_kernel
    >>> bias, x, w = torch.ones(2), torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> with kagent_core.use_plugin(FakeDevice(kernels=[tiled_addmm_kernel()])):
    ...     kagent_core.run_op("aten::addmm", bias, x, w, beta=10, device="fake:0")
    tensor([[11., 12.],
            [13., 14.]])
    """
    return KernelDescriptor(
        "aten::addmm",
        "tiled_addmm",
        tiled_addmm,
        parameters=parse_prototype(PROTOTYPE, derived=DERIVED),
        dtypes=frozenset({"float32"}),
        layout=CONTIGUOUS,
        layouts={"self": ANY_STRIDES},
        priority=priority,
    )


def _pointer(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element on, as one row: what a C kernel is given."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.as_strided((count,), (1,))


def _load(memory: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What the threads for which `mask` holds read, one place each; 0 for the others, which read nothing."""
    values = torch.zeros(mask.shape)
    values[mask] = memory[places.expand(mask.shape)[mask]]
    return values
