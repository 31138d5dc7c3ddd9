"""Torch's operator database: its entries, their samples, and what is known of them whatever the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from kagent_core.testing.compare import copy_arguments
from kagent_core.testing.conformance.case import CannotRunError
from kagent_core.testing.operator_samples import first_samples

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
"""What operators are tried with; the first one that an entry supports stands for it where one is enough."""

UNINITIALIZED = "its result is uninitialized memory: only dtype, shape and strides have a meaning"
NEEDS_GPU = "torch's jiterator compiles it on a GPU; eager PyTorch refuses it on the CPU as well"
EXCEPTIONS = {
    "empty": UNINITIALIZED,
    "empty_like": UNINITIALIZED,
    "empty_permuted": UNINITIALIZED,
    "empty_strided": UNINITIALIZED,
    "new_empty": UNINITIALIZED,
    "new_empty_strided": UNINITIALIZED,
    "jiterator_2inputs_2outputs": NEEDS_GPU,
    "jiterator_4inputs_with_extra_args": NEEDS_GPU,
    "jiterator_binary": NEEDS_GPU,
    "jiterator_binary_return_by_ref": NEEDS_GPU,
    "jiterator_unary": NEEDS_GPU,
}
"""Operators that are not held to eager's values, and why."""

DATA_DEPENDENT = "Dynamo does not capture an operator that returns a number which depends on data"
NO_META = "torch has no meta kernel that tells the size of the result, so Dynamo does not capture it"
RESIZED = "Dynamo does not capture a tensor that is resized in place"
SPARSE = "torch.compile does not take sparse tensors"
NOT_CAPTURED = {
    "allclose": DATA_DEPENDENT,
    "corrcoef": DATA_DEPENDENT,
    "cov": DATA_DEPENDENT,
    "equal": DATA_DEPENDENT,
    "linalg.lstsq": NO_META,
    "linalg.lstsq.grad_oriented": NO_META,
    "nn.functional.ctc_loss": NO_META,
    "nn.functional.gaussian_nll_loss": "Dynamo does not capture its check of a condition that depends on data",
    "resize_": RESIZED,
    "resize_as_": RESIZED,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
}
"""Operators that torch.compile leaves to eager PyTorch with any backend, and why.

Each ATen operator that they dispatch is taken through the pipeline by itself, as `kagent_core.run_op` does.
"""

GRADIENTS_LAID_OUT_OTHERWISE = {
    "ormqr": "AOTAutograd traces its gradient with other strides than eager's, whatever the backend",
}
"""Operators whose gradients have eager's values, but not its strides, and why."""


def _database() -> Any:
    """Import torch's module of operator samples.

    Raises
    ------
    CannotRunError
        When a package that it needs is missing.
    """
    try:
        from torch.testing._internal import common_methods_invocations
    except ImportError as error:
        raise CannotRunError(
            f"torch's operator database cannot be imported: {error}\n"
            "  hint: pip install 'kagent-torch[conformance]' installs what it needs"
        ) from None
    return common_methods_invocations


def full_name(entry: Any) -> str:
    """Return an entry's name with its variant: ``div.floor_rounding``."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def database_entries(dtype: torch.dtype | None = None) -> list[Any]:
    """Return the entries that the CPU supports in a dtype; without one, in any of `DTYPES`.

    Raises
    ------
    CannotRunError
        When a package that the database needs is missing.
    """
    return [entry for entry in _database().op_db if (dtype in dtypes_of(entry) if dtype else dtypes_of(entry))]


def dtypes_of(entry: Any) -> list[torch.dtype]:
    """Return those of `DTYPES` that the CPU supports, in their order."""
    return [dtype for dtype in DTYPES if entry.supports_dtype(dtype, "cpu")]


def samples(entry: Any, dtype: torch.dtype, count: int = 1, requires_grad: bool = False) -> list[Any]:
    """Return an entry's first samples, the same ones every time."""
    return first_samples(entry, dtype, count, requires_grad)


@contextmanager
def everything_captured() -> Iterator[None]:
    """Let Dynamo capture what it would leave to eager PyTorch by default: sizes and numbers that depend on data.

    The database wraps its random operators into a function that seeds the generator, which Dynamo does not enter;
    who calls them here seeds it.
    """
    plain = mock.patch.object(
        _database(), "wrapper_set_seed", lambda operator, *args, **kwargs: operator(*args, **kwargs)
    )
    captured = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with plain, captured:
        yield


def dense(value: Any) -> Any:
    """Replace sparse tensors by the tensors that they consist of."""

    def parts(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is torch.strided:
            return leaf
        if leaf.layout is torch.sparse_coo:
            return str(leaf.layout), tuple(leaf.shape), leaf._indices(), leaf._values()
        return str(leaf.layout), tuple(leaf.shape), leaf.crow_indices(), leaf.col_indices(), leaf.values()

    return pytree.tree_map(parts, value)


def copied(sample: Any) -> Any:
    """Copy a sample's tensors as `copy_arguments` does; sparse ones, which have no strides, plainly."""
    leaves = pytree.tree_leaves(sample)
    if all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return copy_arguments(sample)
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
