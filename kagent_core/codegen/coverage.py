"""Which of PyTorch's core operators generated kernels compute, and why not the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from kagent_core.capture.schemas import resolve_overload, schema_of, signature_of
from kagent_core.codegen.generic import GENERIC
from kagent_core.codegen.rules import RULES
from kagent_core.errors import SignatureError

NOT_GENERATED = {
    "aten::_fft_c2r": "complex numbers",
    "aten::_fft_r2c": "complex numbers",
    "aten::_embedding_bag": "bags of different sizes, and four results that depend on them",
    "aten::_local_scalar_dense": "gives a number to the program, not a tensor",
    "aten::_native_batch_norm_legit": "writes the running statistics in place; capture gives its functional variant",
    "aten::empty.memory_format": "computes nothing",
    "aten::empty_strided": "computes nothing",
    "aten::randperm": "random numbers that are all different, each of which depends on all others",
    "aten::nonzero": "the size of its result depends on data",
    "aten::resize_": "changes its argument's size, which no captured graph does",
}
"""Core operators without a generated kernel, and why."""

_OPERATORS_ON_SIZES = "sym_"


@dataclass(frozen=True, slots=True)
class Coverage:
    """How one core operator comes to run.

    Attributes
    ----------
    signature
        The exact overload.
    how
        ``lowered``: an expression in loops; ``parametrised``: a parametrised kernel; ``decomposed``: capture puts other
        operators in its place; ``view``: nothing runs; ``none``: no kernel is generated.
    reason
        For ``none``, why not.
    """

    signature: str
    how: str
    reason: str = ""


def core_operators() -> Iterator[torch._ops.OpOverload]:
    """Yield the operators that torch tags as core ATen, by name; ``out=`` variants and operators on sizes aside."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::") or name.startswith(f"aten::{_OPERATORS_ON_SIZES}") or name.endswith(".out"):
            continue
        try:
            overload = resolve_overload(name)
        except SignatureError:
            continue  # torch registers it without an overload to call
        if torch.Tag.core in overload.tags:
            yield overload


def coverage(decomposed: Collection[torch._ops.OpOverload]) -> Iterator[Coverage]:
    """Yield how each core operator comes to run.

    Parameters
    ----------
    decomposed
        Operators that capture puts others in the place of.
    """
    for overload in core_operators():
        signature = signature_of(overload)
        if signature in RULES:
            yield Coverage(signature, "lowered")
        elif signature in GENERIC:
            yield Coverage(signature, "parametrised")
        elif overload in decomposed:
            yield Coverage(signature, "decomposed")
        elif overload.is_view and not schema_of(overload).writes:
            yield Coverage(signature, "view")
        else:
            yield Coverage(signature, "none", NOT_GENERATED.get(signature, ""))
