"""What level 1 is tried with: scalars, tensors of every layout, and programs that read and write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

SCALARS: dict[str, tuple[Any, ...]] = {
    "int64": (0, -1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, -(2**63)),
    "int32": (2**31 - 1, -(2**31)),
    "int16": (2**15 - 1, -(2**15)),
    "int8": (127, -128),
    "uint8": (255, 0),
    "bool": (True, False),
    "float32": (0.5, 0.1, 2.0**-149, 3.4028234663852886e38, math.inf, -math.inf, math.nan, -0.0, 16777217),
    "float64": (0.1, 1e300, 5e-324, math.nan, -math.inf, 2**53 + 1),
    "float16": (0.1, 65504.0, math.inf, math.nan),
    "bfloat16": (0.1, 3.3895313892515355e38, -math.inf, math.nan),
}
"""Values at the ends of each type, and some that it cannot hold exactly."""


def base(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return numbers that are exact in every dtype and differ from their neighbours."""
    count = math.prod(shape)
    numbers = (torch.arange(count) * 7) % 61 - (0 if dtype == "bool" else 30)
    return numbers.reshape(shape).to(getattr(torch, dtype))


LAYOUTS: dict[str, Callable[[str], torch.Tensor]] = {
    "contiguous": lambda dtype: base((4, 6), dtype),
    "an offset": lambda dtype: base((7, 6), dtype)[3:],
    "columns of a wider one": lambda dtype: base((4, 11), dtype)[:, 3:9],
    "transposed": lambda dtype: base((6, 4), dtype).t(),
    "transposed, with an offset": lambda dtype: base((9, 4), dtype)[3:].t(),
    "sliced with steps": lambda dtype: base((9, 19), dtype)[1::2, 2::3],
    "expanded": lambda dtype: base((4, 1), dtype).expand(4, 6),
    "expanded rows": lambda dtype: base((6,), dtype)[2:5].expand(4, 3),
    "overlapping windows": lambda dtype: base((9,), dtype).as_strided((4, 6), (1, 1)),
    "diagonal": lambda dtype: base((6, 5), dtype).diagonal(),
    "one dimension, with a step": lambda dtype: base((41,), dtype)[1::5],
    "no dimensions": lambda dtype: base((5,), dtype)[3],
    "one element": lambda dtype: base((3, 3), dtype)[1:2, 2:3],
    "no elements": lambda dtype: base((0,), dtype),
    "no elements, with dimensions": lambda dtype: base((5, 0, 3), dtype)[2:].transpose(0, 2),
    "dimensions of size 1": lambda dtype: base((40,), dtype).as_strided((1, 4, 1, 3), (99, 3, 7, 1), 5),
    "permuted, 3 dimensions": lambda dtype: base((3, 4, 5), dtype).permute(2, 0, 1),
    "channels last": lambda dtype: base((2, 3, 4, 5), dtype).contiguous(memory_format=torch.channels_last),
    "5 dimensions, permuted": lambda dtype: base((2, 3, 2, 4, 3), dtype).permute(4, 2, 0, 3, 1),
    "8 dimensions": lambda dtype: base((2,) * 8, dtype).permute(7, 1, 5, 3, 4, 2, 6, 0)[..., 1:],
}
"""A tensor of each kind of strides and offset."""


def sliced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute with parts that begin within the tensor."""
    if x.dim() == 0:
        return (x * 3,)
    return x[..., 1:] * 3, x[1:] + 1, x.transpose(0, -1)[1:] * 2


PROGRAMS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x: (x * 2 + 1).abs(),
    "with a contiguous one": lambda x: x + torch.arange(x.numel()).reshape(x.shape).to(x.dtype),
    "copied": lambda x: (x.clone(), x.contiguous()),
    "converted": lambda x: (x.to(torch.float64), x.to(torch.int32), x.bool()),
    "reduced": lambda x: (x.sum(), x.sum(-1) if x.dim() else x.sum()),
    "viewed in the program": lambda x: x.unsqueeze(0).transpose(0, -1) * 3 if x.dim() else x.reshape(1, 1) * 3,
    "sliced in the program": sliced,
    "concatenated": lambda x: torch.cat([x.reshape(-1), x.reshape(-1)]),
}
"""What is computed with it."""

WRITES: dict[str, Callable[..., Any]] = {
    "add_ of a tensor": lambda x: x.add_(torch.arange(x.numel()).reshape(x.shape).to(x.dtype)),
    "fill_ of a part": lambda x: x[..., :1].fill_(7) if x.dim() else x.fill_(7),
    "mul_": lambda x: x.mul_(2),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones_like(x) * 5),
    "mul_ of the transposed": lambda x: x.transpose(0, -1).mul_(3) if x.dim() else x.mul_(3),
    "written and read": lambda x: (x.add_(1), x * 2)[1],
}
"""Programs that write their argument."""

OVERLAPPING = ("expanded", "expanded rows", "overlapping windows")
