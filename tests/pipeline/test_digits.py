"""A small network learns real handwritten digits, trained through kagent from the first step to the last."""

from __future__ import annotations

import torch
from torch import nn

from .models import compiled, recorded_plans

EPOCHS = 10
BATCH = 64


class Network(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 16, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def test_digits_are_learned() -> None:
    from sklearn.datasets import load_digits

    torch._dynamo.reset()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    train, held_out = order[:1344], order[1344:]
    network = Network()
    with recorded_plans() as plans:
        network_through_kagent = compiled(network)
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        for _ in range(EPOCHS):
            for rows in train[torch.randperm(len(train))].split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network_through_kagent(images[rows]), labels[rows]).backward()
                optimizer.step()
        network.eval()
        with torch.no_grad():
            guessed = network_through_kagent(images[held_out]).argmax(1)
    kinds = [plan.program.rpartition("_")[2] for plan in plans]
    assert kinds == ["forward", "backward", "inference"]
    assert len(held_out) == 453
    correct = (guessed == labels[held_out]).double().mean().item()
    assert correct > 0.95, f"{correct:.1%} of the held-out digits are right"
