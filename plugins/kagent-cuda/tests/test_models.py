"""Whole models run and train on the emulated device alone, and give eager PyTorch's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kagent_core.testing.conformance.architectures import ARCHITECTURES, Architecture
from kagent_core.testing.conformance.case import Target
from kagent_core.testing.conformance.models import check_model, inference, real_weights, training

BATCH, TOKENS, WIDTH, HEADS, IMAGE, CLASSES = 2, 6, 32, 2, 8, 3


class SentenceEncoder(nn.Module):
    """MiniLM's kind: post-norm layers with a mask of padding, whose tokens are averaged and scaled to length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.output_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return scores of sentences."""
        x = self.norm(self.tokens(tokens) + self.places.weight)
        query, key, value = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in list(self.attention)[:3])
        hidden = torch.where(mask, 0.0, float("-inf"))[:, None, None, :]
        made = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
        x = self.attention_norm(x + self.attention[3](made.transpose(1, 2).flatten(-2)))
        x = self.output_norm(x + self.narrow(nn.functional.gelu(self.wide(x))))
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        scores: Tensor = self.head(nn.functional.normalize(mean))
        return scores


class Bottleneck(nn.Module):
    """ResNet's block: narrower, convolved, wider again, added to what came."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels * stride
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, channels // 2, 1, bias=False), nn.BatchNorm2d(channels // 2), nn.ReLU()),
            nn.Conv2d(channels // 2, channels // 2, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(channels // 2), nn.ReLU()),
            *(nn.Conv2d(channels // 2, wide, 1, bias=False), nn.BatchNorm2d(wide)),
        )
        self.beside = nn.Identity() if stride == 1 else nn.Conv2d(channels, wide, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the block's size."""
        return torch.relu(self.beside(x) + self.body(x))


def _resnet() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(
        *stem, Bottleneck(8, 1), Bottleneck(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)
    )


def _sentences() -> tuple[Tensor, ...]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[-1, TOKENS - 2 :] = False
    return torch.randint(0, 20, (BATCH, TOKENS)), mask


MODELS = {
    "minilm": Architecture(SentenceEncoder, _sentences),
    "resnet": Architecture(_resnet, lambda: (torch.randn(BATCH, 3, IMAGE, IMAGE),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_inference_and_training(device: str, name: str) -> None:
    for run in (inference, training):
        ran = check_model(run, MODELS[name], Target(device))
        assert ran.fallbacks == ()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_of_the_kit(device: str, name: str) -> None:
    for run in (inference, training):
        assert check_model(run, ARCHITECTURES[name], Target(device)).fallbacks == ()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_inference_with_real_weights(device: str) -> None:
    assert check_model(inference, real_weights(), Target(device)).fallbacks == ()
