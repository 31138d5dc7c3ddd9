"""The models that the plugin is held to, as the conformance kit takes models: tensors in, scores out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kagent_core.testing.conformance.architectures import Architecture
from tests.pipeline.models import CASES, CLASSES, IMAGE, Case, images

NAMES = ("resnet", "mobilenet_v2", "vit", "bert", "gpt2", "llama", "t5")

BLOCKS = 7
"""Of a MobileNetV2 that is trained."""

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Scores(nn.Module):
    """A model whose arguments come by position, and which returns its first result alone."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *given: Tensor) -> Tensor:
        """Return scores, or the last hidden state of a model without a head."""
        found: Tensor = self.model(**dict(zip(self.names, given, strict=True))).to_tuple()[0]
        return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def architecture(name: str, optimizer: Optimizer = sgd, trained: bool = False) -> Architecture:
    """Return one of the models; one that is trained may be built otherwise."""
    case = TRAINED.get(name, CASES[name]) if trained else CASES[name]
    names = tuple(case.inputs())
    return Architecture(
        lambda: Scores(without_dropout(case.model()), names),
        lambda: tuple(case.inputs().values()),
        optimizer,
        has_weights=True,
    )


def _mobilenet() -> nn.Module:
    """Return a MobileNetV2 whose last images are more than a pixel: of two values, batch norm makes their signs.

    It has the first blocks of each kind only: expanded, with a shortcut and without, with strides and dilated. The
    others are the same with other sizes, each of which is another kernel to compile.
    """
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.25, image_size=IMAGE, output_stride=8, **CLASSES)
    model = MobileNetV2ForImageClassification(config)
    body = model.mobilenet_v2
    body.layer = body.layer[:BLOCKS]
    last, given = body.conv_1x1.convolution, body.layer[-1].reduce_1x1.convolution.out_channels
    body.conv_1x1 = type(body.conv_1x1)(config, in_channels=given, out_channels=last.out_channels, kernel_size=1)
    return model


TRAINED = {"mobilenet_v2": Case(_mobilenet, images)}


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a model that draws no random numbers in training, so that its steps can be compared."""
    for module in model.modules():
        kept: Mapping[str, Any] = vars(module)
        for key in [key for key, value in kept.items() if "drop" in key and isinstance(value, float)]:
            setattr(module, key, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
