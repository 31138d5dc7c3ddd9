"""Normalizations are one kernel with what comes before them: an embedding and its sums, or the residual sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kagent_core
from kagent_core import hookimpl
from kagent_core.testing.compare import assert_as_exact

WIDTH = 48


class Kernels:
    """Notes the operators of every kernel that is run."""

    def __init__(self) -> None:
        self.signatures: dict[int, list[str]] = {}

    @hookimpl
    def kagent_task_finished(self, event: Any) -> None:
        self.signatures[event.task.id] = [call.signature.partition("::")[2] for call in event.task.calls]


class Embedded(nn.Module):
    """Words, places and kinds, as BERT adds them up."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, WIDTH) for n in (100, 16, 2))
        self.norm = norm

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places.weight[: tokens.shape[1]]
        return self.norm(self.words(tokens) + self.kinds(torch.zeros(tokens.shape, dtype=torch.int64)) + places)


class Residual(nn.Module):
    """What nothing is fused with is added to its input before the norm; the sum goes on, too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(100, WIDTH)
        self.norm = norm

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(tokens)
        x = x + functional.dropout(x, 0.1, self.training).cumsum(1)
        return x, self.norm(x)


class RMS(nn.Module):
    """As Llama writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer norm": (lambda: nn.LayerNorm(WIDTH), "native_layer_norm"),
    "rms norm": (lambda: nn.RMSNorm(WIDTH), "rsqrt"),
    "rms norm written out": (RMS, "rsqrt"),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("model", [Embedded, Residual])
@torch.no_grad()
def test_a_norm_is_one_kernel_with_the_sum_before_it(model: Callable[[nn.Module], nn.Module], name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, signature = NORMS[name]
    network = model(make()).eval()
    tokens = torch.randint(0, 100, (2, 16))
    noted = Kernels()
    with kagent_core.use_plugin(noted):
        came = torch.compile(network, backend="kagent", options={"device": "cpu"})(tokens)
    expected, exact = network(tokens), network.double()(tokens)
    tensors = [(came, expected, exact)] if isinstance(came, Tensor) else zip(came, expected, exact, strict=True)
    for mine, theirs, reference in tensors:
        assert_as_exact(mine, theirs, reference, 2, name)
    (joined,) = (signatures for signatures in noted.signatures.values() if signature in signatures)
    assert "add.Tensor" in joined
    if model is Embedded:
        assert "embedding" in joined
        assert len(noted.signatures) == 1
    else:
        assert len(noted.signatures) <= 3  # the embedding, the cumulative sum, and both in one
