"""What ``kagent bench device`` calls: products, pointwise operators, normalisations and small models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import functional

Function = Callable[..., torch.Tensor]
Arguments = tuple[torch.Tensor, ...]

WIDTH, BATCH, DEPTH = 512, 64, 8
"""Of the block of layers: elements of a row, rows, and layers."""


@dataclass(frozen=True)
class Row:
    """One thing to call.

    Attributes
    ----------
    name
        As ``--rows`` gives it.
    what
        Operators and shapes.
    make
        Returns a function and its arguments, in host memory.
    flops
        Floating-point operations of a call, where that is what matters; None elsewhere.
    """

    name: str
    what: str
    make: Callable[[], tuple[Function, Arguments]]
    flops: int | None = None


def _product(*shapes: tuple[int, ...]) -> Callable[[], tuple[Function, Arguments]]:
    return lambda: (torch.matmul, tuple(torch.randn(shape) for shape in shapes))


def _of_rows(function: Function) -> Callable[[], tuple[Function, Arguments]]:
    return lambda: (function, (torch.randn(4096, 1024),))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the exact gelu."""
    return functional.gelu(x)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax of each row."""
    return functional.softmax(x, -1)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    """Return each row with mean 0 and variance 1."""
    return functional.layer_norm(x, (x.shape[-1],))


def layers() -> torch.nn.Module:
    """Return `DEPTH` times a linear layer, gelu and layer norm."""
    parts = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH)) for _ in range(DEPTH)]
    return torch.nn.Sequential(*(part for layer in parts for part in layer)).eval()


class ResidualBlock(torch.nn.Module):
    """Two 3 × 3 convolutions and what came in; a stride halves height and width."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(channels_in, channels, 3, stride)
        self.second = _convolution(channels, channels, 3, 1)
        same = stride == 1 and channels_in == channels
        self.shortcut = torch.nn.Identity() if same else _convolution(channels_in, channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, channels, H / stride, W / stride]."""
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


class ResNet18(torch.nn.Module):
    """The 18-layer residual network of He et al. (2015), with random weights: [N, 3, H, W] to [N, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(_convolution(3, 64, 7, 2), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1))
        widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        self.stages = torch.nn.Sequential(
            *(ResidualBlock(*width) for first in widths for width in (first, (first[1], first[1], 1)))
        )
        self.head = torch.nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return logits


def _convolution(channels_in: int, channels: int, size: int, stride: int) -> torch.nn.Module:
    convolution = torch.nn.Conv2d(channels_in, channels, size, stride, size // 2, bias=False)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(channels))


def _minilm() -> tuple[Function, Arguments]:
    from kagent_core.demo.encoder import load_encoder

    model, _ = load_encoder()
    tokens = torch.randint(1000, 20000, (8, 32))
    return model, (tokens, torch.ones_like(tokens))


ROWS = (
    Row("gemm", "512 x 512 by 512 x 512", _product((512, 512), (512, 512)), 2 * 512**3),
    Row("batched-gemm", "64 of 128 x 128 by 128 x 128", _product((64, 128, 128), (64, 128, 128)), 2 * 64 * 128**3),
    Row("gelu", "4096 x 1024", _of_rows(gelu)),
    Row("softmax", "4096 rows of 1024", _of_rows(softmax)),
    Row("layer-norm", "4096 rows of 1024", _of_rows(layer_norm)),
    Row(
        "layers",
        f"{DEPTH} x (linear, gelu, layer norm), width {WIDTH}, batch {BATCH}",
        lambda: (layers(), (torch.randn(BATCH, WIDTH),)),
        DEPTH * 2 * BATCH * WIDTH * WIDTH,
    ),
    Row("minilm", "all-MiniLM-L6-v2, 8 texts of 32 tokens", _minilm),
    Row("resnet18", "18 layers, one image of 224 x 224", lambda: (ResNet18().eval(), (torch.randn(1, 3, 224, 224),))),
)
"""All rows, in the order in which they are printed."""

BY_NAME: Mapping[str, Row] = MappingProxyType({row.name: row for row in ROWS})
