"""Networks that the benchmark writes itself: MobileNetV3, a U-Net, an LSTM, and a block of layers."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


def layers(width: int, depth: int) -> nn.Module:
    """Return `depth` times a linear layer, gelu and layer norm: [N, width] to [N, width]."""
    parts = [(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)]
    return nn.Sequential(*(part for layer in parts for part in layer))


def _convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1, activation: type[nn.Module] = nn.Identity
) -> nn.Sequential:
    """Return a convolution, its batch norm and an activation."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), activation())


class SqueezeExcite(nn.Module):
    """Scales each channel by what a small network makes of the means of all: [N, C, H, W] to the same."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled channels."""
        mean = functional.adaptive_avg_pool2d(x, 1)
        return x * functional.hardsigmoid(self.expand(functional.relu(self.reduce(mean))))


class InvertedResidual(nn.Module):
    """A pointwise, a depthwise and a pointwise convolution: [N, inputs, H, W] to [N, outputs, H / stride, ...]."""

    def __init__(self, inputs: int, size: int, wide: int, outputs: int, squeeze: bool, hard: bool, stride: int) -> None:
        super().__init__()
        activation: type[nn.Module] = nn.Hardswish if hard else nn.ReLU
        parts: list[nn.Module] = []
        if wide != inputs:
            parts.append(_convolution(inputs, wide, 1, activation=activation))
        parts.append(_convolution(wide, wide, size, stride, groups=wide, activation=activation))
        if squeeze:
            parts.append(SqueezeExcite(wide, _multiple_of_8(wide / 4)))
        parts.append(_convolution(wide, outputs, 1))
        self.parts = nn.Sequential(*parts)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return what the convolutions make of the input, and the input added where it has the same shape."""
        made: Tensor = self.parts(x)
        return x + made if self.residual else made


def _multiple_of_8(value: float) -> int:
    """Round to a multiple of 8, by no more than a tenth downwards."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded


# depthwise size, channels inside, channels out, squeeze-and-excite, hardswish, stride
_V3_SMALL = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


class MobileNetV3Small(nn.Module):
    """The small network of Howard et al. (2019), table 2: [N, 3, H, W] to [N, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        blocks, channels = [], 16
        for size, wide, outputs, squeeze, hard, stride in _V3_SMALL:
            blocks.append(InvertedResidual(channels, size, wide, outputs, squeeze, hard, stride))
            channels = outputs
        self.features = nn.Sequential(
            _convolution(3, 16, 3, 2, activation=nn.Hardswish),
            *blocks,
            _convolution(channels, 576, 1, activation=nn.Hardswish),
        )
        self.head = nn.Sequential(nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))
        return logits


class UNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015) with batch norm: [N, 3, H, W] to [N, classes, H, W], H and W multiples of 8.

    Parameters
    ----------
    widths
        Channels at each resolution; each is half as high and half as wide as the one before.
    classes
        Channels of the result.
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 2) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = self._double(3, widths[0])
        self.down = nn.ModuleList(self._double(fine, coarse) for fine, coarse in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, 2) for fine, coarse in reversed(pairs))
        self.join = nn.ModuleList(self._double(2 * fine, fine) for fine, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            _convolution(inputs, outputs, 3, activation=nn.ReLU), _convolution(outputs, outputs, 3, activation=nn.ReLU)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((kept.pop(), up(x)), 1))
        logits: Tensor = self.head(x)
        return logits


class LastState(nn.Module):
    """An LSTM of two layers and a linear head on its last step: [N, T, width] to [N, classes].

    It calls what `nn.LSTM` calls, and no `nn.LSTM`, which Dynamo leaves to eager PyTorch by default
    (``torch._dynamo.config.allow_rnn``): so compilers get the whole network, whatever that setting is.
    """

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        weights = nn.LSTM(width, width, num_layers=2, batch_first=True).parameters()
        self.width = width
        self.weights = nn.ParameterList(weights)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        start = x.new_zeros(2, x.shape[0], self.width)
        states, _, _ = torch.lstm(x, (start, start), list(self.weights), True, 2, 0.0, self.training, False, True)
        logits: Tensor = self.head(states[:, -1])
        return logits
