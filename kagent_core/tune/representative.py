"""Products and convolutions of usual sizes: what is tuned where no model is given."""

from __future__ import annotations

import torch
from torch.nn import functional

LINEAR = ((1, 512, 512), (1, 2048, 512), (64, 512, 512), (256, 512, 512), (256, 512, 2048), (256, 2048, 512))
"""Rows, elements of a row, and elements of a result's row, of linear layers."""

PRODUCTS = ((512, 512, 512), (1024, 1024, 1024))
BATCHED = ((64, 128, 128, 128), (64, 64, 64, 64))

CONVOLUTIONS = ((64, 64, 64, 3), (128, 128, 32, 3), (256, 256, 16, 3), (512, 512, 8, 3), (64, 256, 64, 1))
"""Channels that come and go, height and width, and size of the window."""

ATTENTION = ((8, 8, 128, 64),)

Given = list[tuple[torch.Tensor, ...]]


def program(
    linear: Given, products: Given, batched: Given, convolutions: Given, attention: Given
) -> list[torch.Tensor]:
    """Return the result of every problem; none depends on another."""
    results = [functional.linear(x, weight, bias) for x, weight, bias in linear]
    results += [a @ b for a, b in products]
    results += [torch.bmm(a, b) for a, b in batched]
    results += [functional.conv2d(x, weight, padding=weight.shape[-1] // 2) for x, weight in convolutions]
    results += [functional.scaled_dot_product_attention(q, k, v) for q, k, v in attention]
    return results


def arguments() -> tuple[Given, Given, Given, Given, Given]:
    """Return what `program` takes. All sizes are powers of two: a problem of about a size has the nearest one above."""
    return (
        [(torch.randn(m, k), torch.randn(n, k), torch.randn(n)) for m, k, n in LINEAR],
        [(torch.randn(m, k), torch.randn(k, n)) for m, k, n in PRODUCTS],
        [(torch.randn(b, m, k), torch.randn(b, k, n)) for b, m, k, n in BATCHED],
        [
            (torch.randn(1, channels_in, extent, extent), torch.randn(channels_out, channels_in, window, window))
            for channels_in, channels_out, extent, window in CONVOLUTIONS
        ],
        [tuple(torch.randn(shape) for _ in range(3)) for shape in ATTENTION],
    )
