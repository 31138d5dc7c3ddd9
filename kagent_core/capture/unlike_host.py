"""Operators that return something else on a torch device than in host memory, in terms of others that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def batch_norm_inference(
    input: torch.Tensor,  # noqa: A002  the schema's name
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """Normalize by known statistics, and return them, as devices do; in host memory the operator returns none."""
    if input.device.type == "cpu":
        return NotImplemented
    wide = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    across = (1, -1, *[1] * (input.dim() - 2))
    scale = torch.rsqrt(running_var.to(wide) + eps)
    out = (input.to(wide) - running_mean.to(wide).view(across)) * scale.view(across)
    out = out if weight is None else out * weight.to(wide).view(across)
    out = out if bias is None else out + bias.to(wide).view(across)
    return out.to(input.dtype), running_mean, scale


UNLIKE_HOST: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._native_batch_norm_legit_no_training.default: batch_norm_inference,
}
"""Decompositions, which decline what is in host memory."""
