"""Values as Python source, for scripts that stand alone."""

from __future__ import annotations

import ast
import math
import textwrap
from typing import Any

import torch

LARGEST_LITERAL = 512
"""Elements that are written out; what has more is generated."""


_SHORT = (torch.float32, torch.float16, torch.bfloat16)


class UnspellableError(Exception):
    """A value that cannot be written as source, or is too large for it."""


def literal(value: Any) -> str:
    """Return an expression that makes a value, with ``torch`` as the only name it needs.

    Raises
    ------
    UnspellableError
        When there is none.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, complex):
        return f"complex({_float(value.real)}, {_float(value.imag)})"
    if isinstance(value, torch.Size):
        return f"torch.Size([{_joined(value)}])"
    if type(value) is tuple:
        return f"({_joined(value)}{',' * (len(value) == 1)})"
    if type(value) is list:
        return f"[{_joined(value)}]"
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    return _constant(value)


def _constant(value: Any) -> str:
    if value is Ellipsis:
        return "..."
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value)
    raise UnspellableError(f"a {type(value).__name__}")


def _joined(values: Any) -> str:
    return ", ".join(literal(item) for item in values)


def _float(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else f'float("{value}")'


def _tensor(tensor: torch.Tensor) -> str:
    """Spell a tensor with its strides and its offset; of what lies around it, nothing."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnspellableError("a tensor that is not plainly strided")
    plain, dtype = tensor.detach(), f"dtype={tensor.dtype}"
    strides, offset = tuple(plain.stride()), plain.storage_offset()
    span = 0 if plain.numel() == 0 else 1 + sum(s * (n - 1) for n, s in zip(plain.shape, strides, strict=True))
    if offset + span > LARGEST_LITERAL:
        raise UnspellableError(f"a tensor of {offset + span} elements")
    if plain.is_contiguous() and offset == 0 and plain.numel():
        made = f"torch.tensor({literal(_listed(plain))}, {dtype})"
    else:
        flat = _listed(plain.as_strided((span,), (1,))) if span else []
        storage = literal([*[0] * offset, *flat])  # before the offset: zeros
        made = f"torch.tensor({storage}, {dtype}).as_strided({tuple(plain.shape)}, {strides}, {offset})"
    return f"{made}.requires_grad_()" if tensor.requires_grad else made


def _listed(tensor: torch.Tensor) -> Any:
    """A tensor's values; float32 ones with the nine digits that tell them apart, not a float64's seventeen."""

    def shortened(value: Any) -> Any:
        return [shortened(item) for item in value] if isinstance(value, list) else float(f"{value:.9g}")

    return shortened(tensor.tolist()) if tensor.dtype in _SHORT else tensor.tolist()


def wrapped(source: str, width: int = 118) -> str:
    """Break a long line between its values, where that changes nothing."""
    filled = textwrap.fill(source, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    try:
        return filled if ast.dump(ast.parse(filled)) == ast.dump(ast.parse(source)) else source
    except SyntaxError:  # a text with a space in it was broken
        return source
