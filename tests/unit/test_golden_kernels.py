"""Kernels under review: a change of what generated kernels look like shows in the files in ``golden``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ..codegen_programs import NarrowC, errors, generator, text_of

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "python -m pytest tests/unit/test_golden_kernels.py --update-golden"

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel is given."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    def filled(self) -> torch.Tensor:
        if self.dtype.is_floating_point:
            return torch.randn(self.shape).to(self.dtype)
        return torch.randint(2, self.shape).to(self.dtype)


def operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Operand]:
    return [Operand(shape, dtype) for shape in shapes]


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> Any:
    return aten._softmax(torch.where(mask, scores * 0.125, float("-inf")), -1, False)


def gelu_residual_layer_norm(x: torch.Tensor, bias: Any, residual: Any, weight: Any, shift: Any) -> Any:
    return aten.native_layer_norm(aten.gelu(x + bias) + residual, list(weight.shape), weight, shift, 1e-5)[0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return aten.convolution(x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


KERNELS: dict[str, tuple[Callable[..., Any], Sequence[Operand]]] = {
    "softmax": (lambda x: aten._softmax(x, -1, False), operands((60, 200))),
    "masked_softmax": (masked_softmax, [*operands((6, 40, 50)), Operand((40, 50), torch.bool)]),
    "gelu_residual_layer_norm": (gelu_residual_layer_norm, operands((40, 64), (64,), (40, 64), (64,), (64,))),
    "rms_norm": (rms_norm, operands((40, 64), (64,))),
    "silu_multiply_bfloat16": (lambda x, y: aten.silu(x) * y, operands((40, 64), (40, 64), dtype=torch.bfloat16)),
    "rotary_embedding": (rotary_embedding, operands((2, 6, 20, 64), (20, 64), (20, 64))),
    "transposed_add": (lambda x, y: x.t() + y, operands((70, 100), (100, 70))),
    "column_sum": (lambda x: x.sum(0), operands((250, 70))),
    "argmax": (lambda x: x.argmax(-1), operands((40, 64))),
    "argmax_of_long_rows": (lambda x: x.argmax(-1), operands((40, 5000))),
    "embedding": (aten.embedding, [*operands((500, 48)), Operand((6, 20), torch.int64)]),
    "pad": (lambda x: aten.constant_pad_nd(x, [1, 2, 3, 4], 0.5), operands((6, 20, 30))),
    "mm_bias_relu": (lambda x, y, bias: torch.relu(torch.mm(x, y) + bias), operands((70, 40), (40, 50), (50,))),
    "convolution_3x3": (convolution, operands((2, 16, 30, 34), (12, 16, 3, 3), (12,))),
    "cumsum": (lambda x: x.cumsum(-1), operands((40, 64))),
    "pad_narrow": (lambda x: aten.constant_pad_nd(x, [1, 2, 3, 4], 0.5), operands((6, 20, 30))),
    "embedding_narrow": (aten.embedding, [*operands((500, 48)), Operand((6, 20), torch.int64)]),
}
NARROW = frozenset({"pad_narrow", "embedding_narrow"})
"""Kernels with indices of 32 bits."""


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_as_it_was_reviewed(name: str, request: pytest.FixtureRequest) -> None:
    function, given = KERNELS[name]
    making = generator(NarrowC()) if name in NARROW else None
    text = text_of(function, *(operand.empty() for operand in given), making=making)
    path = GOLDEN / f"{name}.c"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    reviewed = path.read_bytes().decode() if path.exists() else ""
    if text != reviewed:
        lines = difflib.unified_diff(reviewed.splitlines(True), text.splitlines(True), f"golden/{name}.c", "generated")
        pytest.fail(f"{''.join(lines)}\nIf that is what it should be, review it and update the files:\n    {UPDATE}")


def test_every_file_is_that_of_a_kernel() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.c" for name in KERNELS}


def test_the_kernels_compute_what_eager_pytorch_does() -> None:
    torch.manual_seed(0)
    cases = [(function, [operand.filled() for operand in given]) for function, given in KERNELS.values()]
    for name, (ours, eagers) in zip(KERNELS, errors(cases), strict=True):
        assert ours <= (3 if "bfloat16" in name else 2) * eagers, name
