"""Models with random weights: an encoder as MiniLM is, a residual network, and a decoder as GPT-2 is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kagent_core.bench.device_rows import ResidualBlock


class Attention(nn.Module):
    """Self-attention with several heads: [N, L, width] to the same."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what each token takes from the others; `mask` is False for those to leave out."""
        batch, length, width = x.shape
        parts = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        taken = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        made: Tensor = self.output(taken.transpose(1, 2).reshape(batch, length, width))
        return made


class Layer(nn.Module):
    """A transformer's layer, norms behind the sums as in BERT, or before the parts as in GPT-2."""

    def __init__(self, width: int, heads: int, causal: bool, first: bool) -> None:
        super().__init__()
        self.first = first
        self.attention = Attention(width, heads, causal)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        approximate = "tanh" if causal else "none"
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [N, L, width]."""
        before, after = self.norms
        if self.first:
            x = x + self.attention(before(x), mask)
            made: Tensor = x + self.wide(after(x))
        else:
            x = before(x + self.attention(x, mask))
            made = after(x + self.wide(x))
        return made


class Encoder(nn.Module):
    """Token ids and mask to one vector per text, of length one: as all-MiniLM-L6-v2 by its sizes."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 12, words: int = 30522, most: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(most, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, causal=False, first=False) for _ in range(layers))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return [N, width] for int64 tokens and a mask, both [N, L]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.places(places))
        seen = (mask != 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        weights = mask.unsqueeze(-1).to(x.dtype)
        return functional.normalize((x * weights).sum(1) / weights.sum(1), dim=1)


class Decoder(nn.Module):
    """Token ids to the logits of the next ones, the head tied to the embedding: as GPT-2 by its sizes."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257, most: int = 1024
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(most, width)
        self.layers = nn.ModuleList(Layer(width, heads, causal=True, first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [N, L, words] for int64 tokens [N, L]."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.words.weight)


class ResNet(nn.Module):
    """A residual network of basic blocks: [N, 3, H, W] to [N, classes]."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2, classes: int = 1000) -> None:
        super().__init__()
        first = nn.Conv2d(3, widths[0], 7, 2, 3, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(widths[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        stages, before = [], widths[0]
        for place, width in enumerate(widths):
            for block in range(blocks):
                stages.append(ResidualBlock(before, width, 2 if place and not block else 1))
                before = width
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return logits


Built = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Model:
    """A model, how to call it, and with what.

    Attributes
    ----------
    name
        For the table.
    make
        Returns the module.
    arguments
        Returns its arguments for some number of texts or images.
    small, large
        That number where results are compared, and where time is measured.
    """

    name: str
    make: Callable[[], nn.Module]
    arguments: Callable[[int], tuple[Tensor, ...]]
    small: int = 2
    large: int = 2

    def build(
        self, dtype: torch.dtype, place: torch.device, large: bool = False
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the module for inference and its arguments: the same weights and values at every call."""
        torch.manual_seed(0)
        module = self.make().eval().to(place, dtype)
        args = tuple(
            one.to(place, dtype if one.is_floating_point() else one.dtype)
            for one in self.arguments(self.large if large else self.small)
        )
        return module, args


def models(tiny: bool) -> tuple[Model, ...]:
    """Return all of them, in their own sizes or in tiny ones."""
    if tiny:
        return (
            Model("MiniLM-like", lambda: Encoder(1, 16, 2, 20, 8), lambda count: _texts(count, 5, 20)),
            Model("ResNet-like", lambda: ResNet((4, 8), 1, 5), lambda count: (torch.randn(count, 3, 16, 16),)),
            Model("GPT-2-like", lambda: Decoder(1, 16, 2, 20, 8), lambda count: _tokens(count, 5, 20)),
        )
    return (
        Model("MiniLM-like", Encoder, lambda count: _texts(count, 128, 30522), large=32),
        Model("ResNet-18", ResNet, lambda count: (torch.randn(count, 3, 224, 224),), large=32),
        Model("GPT-2-like", Decoder, lambda count: _tokens(count, 256, 50257), small=1, large=8),
    )


def _tokens(count: int, length: int, words: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, words, (count, length)),)


def _texts(count: int, length: int, words: int) -> tuple[Tensor, ...]:
    mask = torch.ones(count, length, dtype=torch.int64)
    mask[-1, length // 2 :] = 0
    return (*_tokens(count, length, words), mask)


def parameters(module: nn.Module) -> dict[str, Any]:
    """Return a copy of a module's parameters and buffers in host memory."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
