"""Squeeze-and-excite blocks, compared with eager PyTorch: means, products of single places, scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from .exact import check, ran, spoiled


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean from behind": lambda x: x.mean((-1, -2))[..., None, None],
    "adaptive": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "sum": lambda x: x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3]),
}


class SqueezeExcite(nn.Module):
    """A convolution, squeeze and excitation, and what projects the scaled image."""

    def __init__(
        self,
        convolution: nn.Conv2d,
        pool: str = "mean",
        inner: nn.Module | None = None,
        gate: nn.Module | None = None,
        linear: bool = False,
        squeezed: int = 10,
        made: int = 24,
    ) -> None:
        super().__init__()
        channels = convolution.out_channels
        self.convolution, self.pool, self.linear = convolution, POOLS[pool], linear
        self.norm, self.activation = nn.BatchNorm2d(channels), nn.SiLU()
        self.reduce = nn.Linear(channels, squeezed) if linear else nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Linear(squeezed, channels) if linear else nn.Conv2d(squeezed, channels, 1)
        self.inner, self.gate = inner or nn.ReLU(), gate or nn.Sigmoid()
        self.project = nn.Conv2d(channels, made, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm(self.convolution(x)))
        squeezed = self.pool(x)
        if self.linear:
            squeezed = squeezed.flatten(1)
        scale = self.gate(self.expand(self.inner(self.reduce(squeezed))))
        if self.linear:
            scale = scale[..., None, None].expand_as(x)
        made: Tensor = self.project(x * scale)
        return made


def depthwise(channels: int, window: int = 3, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, window, stride, window // 2, dilation, groups=channels)


def image(batch: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, channels, height, width).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("block", "sizes", "threads"),
    [
        (lambda: SqueezeExcite(depthwise(72), "mean"), (1, 13, 17), 2),
        (lambda: SqueezeExcite(depthwise(96, 5, 2), "adaptive", nn.SiLU(), nn.Hardsigmoid()), (3, 28, 9), 1),
        (lambda: SqueezeExcite(depthwise(5), "sum", nn.GELU(), nn.Hardswish(), squeezed=3), (2, 6, 6), 1),
        (lambda: SqueezeExcite(depthwise(33, 5), "mean from behind", linear=True), (2, 7, 7), 2),
        (lambda: SqueezeExcite(nn.Conv2d(20, 70, 3, 2, 1), "mean", squeezed=100), (2, 11, 30), 2),
        (lambda: SqueezeExcite(nn.Conv2d(64, 512, 1, 2), "adaptive", nn.Tanh(), nn.Tanh()), (1, 5, 9), 1),
    ],
    ids=["mean", "adaptive", "sum", "linear", "all channels", "many channels"],
)
def test_an_image_is_read_once_more_for_its_scale_only(
    block: Callable[[], SqueezeExcite], sizes: tuple[int, int, int], threads: int
) -> None:
    model = block()
    batch, *places = sizes
    names = check(model, spoiled(image(batch, model.convolution.in_channels, *places)), threads=threads)
    assert not any("::" in name or name.startswith(("mean", "sum")) for name in names), names
    assert sum(name.startswith("panel_product") for name in names) == 2, names
    if model.project.out_channels < places[0] * places[1]:
        assert any(name.startswith("mul_convolution") for name in names), names


class Both(nn.Module):
    """What makes an image, and a mean of it; one of them, or what is computed from both, is asked for."""

    def __init__(
        self, convolution: nn.Conv2d, wanted: Callable[[Tensor, Tensor], Tensor], dims: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.convolution, self.wanted, self.dims = convolution, wanted, dims

    def forward(self, x: Tensor) -> Tensor:
        made = functional.relu(self.convolution(x))
        return self.wanted(made, made.mean(self.dims, keepdim=True))


@pytest.mark.parametrize(
    "wanted", [lambda image, mean: mean, lambda image, mean: torch.cat([image.sin(), mean.expand_as(image)])]
)
def test_what_is_wanted_may_be_the_mean_alone_or_both(wanted: Callable[[Tensor, Tensor], Tensor]) -> None:
    names = check(Both(depthwise(40), wanted, (2, 3)), image(2, 40, 10, 10))
    assert any(name.startswith("convolution_relu_mean") for name in names), names


@pytest.mark.parametrize(
    ("convolution", "dims"),
    [
        (depthwise(40, 3, 1, 2), (2, 3)),
        (nn.Conv2d(40, 64, 1), (2, 3)),
        (depthwise(40), (3,)),
        (depthwise(40), (1, 2, 3)),
    ],
    ids=["dilated", "of one place", "of lines", "of channels, too"],
)
def test_other_means_are_kernels_of_their_own(convolution: nn.Conv2d, dims: tuple[int, ...]) -> None:
    names = check(Both(convolution, lambda image, mean: mean, dims), image(2, 40, 9, 9))
    assert names[-1].startswith("mean"), names


def test_threads_do_not_change_a_sum() -> None:
    x = image(1, 144, 56, 56)
    model = Both(depthwise(144), lambda image, mean: mean, (2, 3))
    one, two = (ran(model, x, threads=threads)[1] for threads in (1, 2))
    assert torch.equal(one, two)


def test_sums_are_as_exact_as_those_of_eager_pytorch() -> None:
    model = Both(nn.Conv2d(16, 16, 1, groups=16, bias=False), lambda image, mean: mean, (2, 3)).eval()
    model.convolution.weight.data.fill_(1)
    x = image(1, 16, 112, 112) + 100
    with torch.no_grad():
        got = torch.compile(model, backend="kagent", options={"device": "cpu"})(x)
        exact = x.double().mean((2, 3), keepdim=True)
        allowed = 2 * (model(x).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= max(float(allowed), 1e-5)


@pytest.mark.parametrize("sizes", [(3, 64, 1500, 2), (1, 16, 2, 1100)], ids=["lines", "places"])
def test_more_than_is_kept_is_added_up_by_a_kernel_of_its_own(sizes: tuple[int, int, int, int]) -> None:
    names = check(Both(depthwise(sizes[1], 1), lambda image, mean: mean, (2, 3)), image(*sizes))
    assert names[-1].startswith("mean"), names


@pytest.mark.parametrize(("channels", "made", "size", "threads"), [(672, 112, 14, 2), (640, 160, 7, 1)])
def test_a_scale_is_multiplied_with_the_smaller_one_of_image_and_weight(
    channels: int, made: int, size: int, threads: int
) -> None:
    names = check(SqueezeExcite(depthwise(channels), made=made), image(1, channels, size, size), threads=threads)
    assert (names[-2 if "clone" in names[-1] else -1].startswith("mul_convolution")) is (size == 14), names


class OnePlace(nn.Module):
    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.convolution(x))


@pytest.mark.parametrize(
    ("convolution", "is_product", "dynamic"),
    [
        (nn.Conv2d(40, 30, 1), True, True),
        (nn.Conv2d(40, 30, 1, stride=3, bias=False), True, False),
        (nn.Conv2d(40, 30, 1, padding=1), False, False),
        (nn.Conv2d(40, 30, 3, padding=1), False, False),
        (nn.Conv2d(40, 40, 1, groups=40), False, False),
    ],
    ids=["plain", "stride", "padding", "window", "groups"],
)
def test_convolutions_of_single_places_are_products(convolution: nn.Conv2d, is_product: bool, dynamic: bool) -> None:
    x = torch.randn(5, 80, 1, 1)[:, ::2]
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    names = check(OnePlace(convolution), x)
    assert any(name.startswith("panel_product") for name in names) is is_product, names
