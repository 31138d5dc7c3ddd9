"""Models of today's kinds at small sizes, with nothing but torch, and random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, TOKENS, VOCABULARY, WIDTH, HEADS, CLASSES, IMAGE = 2, 10, 50, 24, 4, 5, 12


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


@dataclass(frozen=True)
class Architecture:
    """A model, what it takes, and how it is trained.

    Attributes
    ----------
    build
        Makes the model, whose weights follow from torch's seed.
    inputs
        Makes the positional arguments of a call, which follow from torch's seed, too.
    optimizer
        Makes the optimizer of some parameters.
    has_weights
        Whether the model comes with weights of its own, which stay as they are.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    has_weights: bool = False

    def model(self) -> nn.Module:
        """Return a new model in evaluation mode, always with the same weights."""
        torch.manual_seed(0)
        model = self.build()
        return (model if self.has_weights else _randomized(model)).eval()

    def example(self, seed: int) -> tuple[Tensor, ...]:
        """Return inputs; the same seed gives the same ones."""
        torch.manual_seed(seed)
        return self.inputs()


def _randomized(model: nn.Module) -> nn.Module:
    """Give norms, biases and running statistics random values, so that mistakes do not cancel out."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() == 1 and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif tensor.dim() == 4:  # at their initial weights, the signal vanishes in deep networks
                tensor.normal_(std=(2 / tensor[0].numel()) ** 0.5)
    return model


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def _features() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 16),)


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 3, IMAGE, IMAGE),)


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (BATCH, TOKENS)),)


def _padded_tokens() -> tuple[Tensor, ...]:
    """Tokens, and a mask that leaves out the end of the last text."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[-1, TOKENS - 3 :] = False
    return (*_tokens(), mask)


def _sequence() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 6, 8),)


# -- networks of layers


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def _convolution(inner: int, outer: int, size: int, **options: Any) -> list[nn.Module]:
    return [nn.Conv2d(inner, outer, size, padding=size // 2, bias=False, **options), nn.BatchNorm2d(outer)]


class InvertedResidual(nn.Module):
    """MobileNetV2's block: wider, convolved in each channel by itself, narrower again, added to what came."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            *_convolution(channels, wide, 1),
            nn.ReLU6(),
            *_convolution(wide, wide, 3, groups=wide),
            nn.ReLU6(),
            *_convolution(wide, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return x + self.body(x)  # type: ignore[no-any-return]


def _mobilenet() -> nn.Module:
    stem = [*_convolution(3, 8, 3, stride=2), nn.Hardswish()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*stem, InvertedResidual(8), InvertedResidual(8), *head)


class UNet(nn.Module):
    """Down, across, up again, with what was there on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.across = nn.Sequential(nn.Conv2d(6, 10, 3, padding=1), nn.GroupNorm(2, 10), nn.SiLU())
        self.up = nn.ConvTranspose2d(10, 6, 2, stride=2)
        self.out = nn.Conv2d(12, CLASSES, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Return scores per pixel: float32 [batch, height, width, classes]."""
        fine = self.down(image)
        coarse = self.across(functional.max_pool2d(fine, 2))
        wide = functional.interpolate(coarse[:, :6], scale_factor=2, mode="bilinear", align_corners=False)
        found: Tensor = self.out(torch.cat([fine, self.up(coarse) + wide], 1))
        return found.permute(0, 2, 3, 1)


class LSTMLoop(nn.Module):
    """An LSTM cell, written as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return scores per step: float32 [batch, time, classes]."""
        hidden = sequence.new_zeros(sequence.shape[0], WIDTH)
        state, found = hidden, []
        for step in sequence.unbind(1):
            hidden, state = self.cell(step, (hidden, state))
            found.append(hidden)
        scores: Tensor = self.out(torch.stack(found, 1))
        return scores


# -- transformers


def _heads(x: Tensor, count: int) -> Tensor:
    batch, tokens, width = x.shape
    return x.view(batch, tokens, count, width // count).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Embedding(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return vectors: float32 [batch, tokens, width]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(places)  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """BERT's: attention spelled out with a mask, norms after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        queries, keys, values = (_heads(part, HEADS) for part in self.attention(x).chunk(3, -1))
        scores = queries @ keys.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
        x = self.norm1(x + self.projection(_joined(weights @ values)))
        return self.norm2(x + self.narrow(functional.gelu(self.wide(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A small BERT that classifies texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList([EncoderLayer(), EncoderLayer()])
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return scores per text: float32 [batch, classes]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        weights = mask.unsqueeze(-1).to(x.dtype)
        return self.out(torch.tanh((x * weights).sum(1) / weights.sum(1)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """GPT's: torch's own causal attention, norms before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        queries, keys, values = (_heads(part, HEADS) for part in self.attention(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.projection(_joined(attended))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A small GPT, whose head has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.Sequential(DecoderLayer(), DecoderLayer())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores per token: float32 [batch, tokens, vocabulary]."""
        return functional.linear(self.norm(self.layers(self.embedding(tokens))), self.embedding.tokens.weight)


class LlamaLayer(nn.Module):
    """Llama's: RMS norms, rotary positions, two queries for each key, gated layers."""

    GROUPS = 2

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys, self.values = (nn.Linear(WIDTH, self.GROUPS * size, bias=False) for _ in range(2))
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.wide = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.narrow = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        y = self.norm1(x)
        queries = _rotated(_heads(self.queries(y), HEADS), cosines, sines)
        keys = _rotated(_heads(self.keys(y), self.GROUPS), cosines, sines)
        keys, values = (
            part.repeat_interleave(HEADS // self.GROUPS, 1) for part in (keys, _heads(self.values(y), self.GROUPS))
        )
        scores = queries @ keys.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(future, float("-inf")).softmax(-1) @ values
        x = x + self.projection(_joined(attended))
        y = self.norm2(x)
        return x + self.narrow(functional.silu(self.gate(y)) * self.wide(y))  # type: ignore[no-any-return]


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cosines + torch.cat([-other, one], -1) * sines


class Llama(nn.Module):
    """A small Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([LlamaLayer(), LlamaLayer()])
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores per token: float32 [batch, tokens, vocabulary]."""
        x = self.embedding(tokens)
        half = torch.arange(WIDTH // HEADS // 2, device=tokens.device) / (WIDTH // HEADS // 2)
        angles = torch.arange(tokens.shape[1], device=tokens.device).outer(100.0**-half).repeat(1, 2)
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return self.out(self.norm(x))  # type: ignore[no-any-return]


ARCHITECTURES: dict[str, Architecture] = {
    "mlp": Architecture(_mlp, _features, _adamw),
    "convnet": Architecture(_convnet, _images, _sgd),
    "mobilenet": Architecture(_mobilenet, _images, _sgd),
    "unet": Architecture(UNet, _images, _adamw),
    "lstm": Architecture(LSTMLoop, _sequence, _sgd),
    "encoder": Architecture(Encoder, _padded_tokens, _sgd),
    "decoder": Architecture(Decoder, _tokens, _adamw),
    "llama": Architecture(Llama, _tokens, _adamw),
}
"""By name."""
