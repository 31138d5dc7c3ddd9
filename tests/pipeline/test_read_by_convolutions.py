"""Zeros around what a convolution reads, and planes that it reads as they lie, compared with eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_cpu.language import CLanguage

from .exact import check, spoiled

Pads = tuple[int, ...]


class Padded(nn.Module):
    """A convolution of what was padded, and an activation."""

    def __init__(self, convolution: nn.Module, pads: Pads, value: float = 0.0) -> None:
        super().__init__()
        self.convolution = convolution
        self.pads = pads
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional.silu(self.convolution(functional.pad(x, self.pads, value=self.value)))
        return made


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def image(*shape: int) -> torch.Tensor:
    made: torch.Tensor = spoiled(torch.randn(shape).contiguous(memory_format=torch.channels_last))
    return made


PADS: list[Pads] = [
    (0, 1, 0, 1),
    (1, 2, 1, 2),
    (1, 0, 2, 0),
    (0, 3, 1, 0),
    (2, 1),
    (0, 0, 0, 1),
    (4, 4, 4, 4),
    (7, 0, 0, 9),
]


@pytest.mark.parametrize("pads", PADS, ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 5])
def test_zeros_around_a_depthwise_convolution_are_part_of_its_window(size: int, stride: int, pads: Pads) -> None:
    convolution = nn.Conv2d(40, 40, size, stride, groups=40, bias=stride > 1)
    names = check(Padded(convolution, pads), image(2, 40, 14, 9))
    assert not any("::" in name for name in names), names
    assert sum("pad" in name and "convolution" in name for name in names) == 1, names


@pytest.mark.parametrize("pads", [PADS[0], PADS[3], PADS[-1]], ids=str)
@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(16, 24, 1),
        nn.Conv2d(16, 24, 1, 2),
        nn.Conv2d(8, 20, 3, 2, 1),
        nn.Conv2d(32, 32, 3, 1, (0, 2), groups=32),
        nn.Conv2d(32, 32, 3, 1, 1, 2, groups=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("generated", ["auto", "all"])
def test_zeros_around_other_convolutions(convolution: nn.Conv2d, pads: Pads, generated: str) -> None:
    check(Padded(convolution, pads), image(1, convolution.in_channels, 9, 8), generated_kernels=generated)


@pytest.mark.parametrize("generated", ["auto", "all"])
@pytest.mark.parametrize("dims", [1, 3])
def test_zeros_around_lines_and_volumes(dims: int, generated: str) -> None:
    kind = nn.Conv1d if dims == 1 else nn.Conv3d
    x = spoiled(torch.randn(2, 6, *[7] * dims))
    pads = (0, 2) if dims == 1 else (1, 0, 0, 2, 0, 1)
    names = check(Padded(kind(6, 6, 3, 2, groups=6), pads), x, generated_kernels=generated)
    if generated == "all":
        assert sum("pad" in name and "convolution" in name for name in names) == 1, names


@pytest.mark.parametrize(
    ("pads", "value"), [((0, 1, 0, 1), 1.0), ((-1, 1, 0, 1), 0.0), ((0, 1, 0, 1, 1, 0), 0.0)], ids=str
)
def test_what_is_no_zero_around_places_is_padded(pads: Pads, value: float) -> None:
    channels = 17 if len(pads) == 6 else 16
    model = Padded(nn.Conv2d(channels, channels, 3, 2, groups=channels), pads, value)
    names = check(model, image(1, 16, 9, 9))
    assert not any("pad" in name and "convolution" in name for name in names), names


def test_padded_tensors_that_others_read_too_are_made() -> None:
    class Twice(Padded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = functional.pad(x, self.pads)
            made: torch.Tensor = self.convolution(padded) + padded.sum(dtype=torch.float32).nan_to_num()
            return made

    check(Twice(nn.Conv2d(32, 32, 3, groups=32), (0, 1, 0, 1)), torch.randn(1, 32, 9, 9))


@torch.no_grad()
def test_weights_that_change_in_place_are_noticed_behind_zeros() -> None:
    model = Padded(nn.Conv2d(16, 16, 3, 2, groups=16), (0, 1, 0, 1)).eval()
    run, x = torch.compile(model, backend="kagent", options={"device": "cpu"}), torch.randn(1, 16, 8, 8)
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x))
        model.get_parameter("convolution.weight").data.mul_(-2)
    torch.testing.assert_close(run(x), model(x))


def test_zeros_have_gradients_in_training() -> None:
    model = Padded(nn.Conv2d(8, 8, 3, 2, groups=8), (0, 1, 0, 1))
    x = torch.randn(2, 8, 7, 7, requires_grad=True)
    torch.compile(model, backend="kagent", options={"device": "cpu"})(x).square().sum().backward()
    got, x.grad = x.grad, None
    model(x).square().sum().backward()
    torch.testing.assert_close(got, x.grad)


# channels made, window, stride, padding, height, width
STEMS: list[tuple[Any, ...]] = [
    (16, 3, 2, 1, 23, 31),
    (32, 3, 2, 1, 32, 32),
    (70, 7, 2, 3, 21, 20),
    (40, 4, 4, 0, 16, 24),
    (5, 3, 1, 1, 6, 6),
    (24, (1, 5), 1, (0, 2), 4, 3),
    (24, 3, 3, 2, 5, 39),
]
# the last window of a line lies in the zeros; and an image of one place
ODD_STEMS: list[tuple[Any, ...]] = [(24, (3, 1), (2, 3), (1, 0), 9, 9), (24, 3, 3, 2, 5, 40), (17, 5, 1, 4, 1, 1)]


@pytest.mark.parametrize("stem", STEMS, ids=str)
@pytest.mark.parametrize("planes", [2, 3, 8])
def test_few_planes_are_read_as_they_lie(planes: int, stem: tuple[Any, ...]) -> None:
    made, size, stride, padding, height, width = stem
    model = nn.Sequential(nn.Conv2d(planes, made, size, stride, padding), nn.ReLU6(), nn.Conv2d(made, made, 1))
    x = spoiled(torch.randn(2, planes, height, width))
    names = check(model, x)
    assert names[0].startswith("clone_convolution"), names
    names = check(Padded(model, (0, 1, 0, 1)), spoiled(torch.randn(2, planes, height, width)))
    assert names[0].startswith("constant_pad_nd_clone_convolution"), names


@pytest.mark.parametrize("stem", ODD_STEMS, ids=str)
def test_planes_with_windows_in_nothing_but_zeros(stem: tuple[Any, ...]) -> None:
    made, size, stride, padding, height, width = stem
    model = nn.Sequential(nn.Conv2d(3, made, size, stride, padding), nn.ReLU6(), nn.Conv2d(made, made, 1))
    for each in (model, Padded(model, (0, 1, 0, 1))):
        check(each, spoiled(torch.randn(2, 3, height, width)))


@pytest.mark.parametrize("view", ["cut", "turned", "part"])
def test_planes_that_are_views(view: str) -> None:
    x = spoiled(torch.randn(2, 9, 20, 20))
    x = {"cut": x[:, 3:6, 2:17, 1:14], "turned": x[:, :3].transpose(2, 3), "part": x[:, ::3]}[view]
    check(nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.Hardswish(), nn.Conv2d(24, 8, 1)), x)


def test_windows_that_skip_places_read_converted_planes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 24, 3, 1, 1, 2), nn.Conv2d(24, 8, 1))
    names = check(model, torch.randn(1, 3, 9, 9))
    assert names[0].startswith("clone_"), names
    assert not names[0].startswith("clone_convolution"), names


class Excited(nn.Module):
    """Squeeze and excitation: channels times what an image's averages say, and a convolution of one place."""

    def __init__(self, channels: int, made: int, residual: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)
        self.squeeze = nn.Conv2d(channels, 4, 1)
        self.excite = nn.Conv2d(4, channels, 1)
        self.last = nn.Conv2d(channels, made, 1, bias=not residual)
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.first(x))
        scale = torch.sigmoid(self.excite(functional.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        made: torch.Tensor = self.last(scale * y if self.residual else y * scale)
        return made + x if self.residual else made


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(
    ("channels", "made", "height", "width"),
    [(32, 16, 9, 7), (40, 24, 30, 31), (24, 40, 14, 14), (17, 5, 5, 5), (64, 96, 1, 9), (128, 128, 8, 8)],
)
def test_channels_are_scaled_with_the_weights(
    channels: int, made: int, height: int, width: int, images: int, spoil: bool
) -> None:
    x = torch.randn(images, channels, height, width).contiguous(memory_format=torch.channels_last)
    names = check(Excited(channels, made), spoiled(x) if spoil else x)
    assert sum(name.startswith("mul_convolution") for name in names) == 1, names


@pytest.mark.parametrize("threads", [1, 2])
def test_what_follows_scaled_channels_is_computed_where_they_are_stored(threads: int) -> None:
    names = check(Excited(40, 40, residual=True), image(2, 40, 30, 30), threads=threads)
    assert sum(name.startswith("mul_convolution_") and "add" in name for name in names) == 1, names


def test_one_scale_for_all_images_and_numbers_that_are_infinite() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Conv2d(24, 8, 1)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.last(torch.relu(x) * scale)
            return made

    model, x = Scaled().eval(), image(2, 24, 6, 6)
    for scale in (
        torch.randn(1, 24, 1, 1),
        torch.randn(2, 24, 1, 1),
        torch.randn(1, 24, 6, 6),
        torch.randn(2, 1, 6, 1),
    ):
        torch._dynamo.reset()
        scale[0, 0] = float("inf")
        scale[-1, -1] = 0
        with torch.no_grad():
            run = torch.compile(model, backend="kagent", dynamic=False, options={"device": "cpu"})
            exact = copy.deepcopy(model).double()(x.double(), scale.double()).float()
            torch.testing.assert_close(run(x, scale), exact, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_scaled_channels_with_zeros_around_them() -> None:
    class Around(Excited):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = torch.relu(x) * torch.sigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True))))
            made: torch.Tensor = self.last(functional.pad(scaled, (0, 2, 0, 1)))
            return made

    check(Around(24, 24), image(2, 24, 6, 6))


def test_scaled_channels_that_others_read_too_are_made() -> None:
    class Twice(Excited):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = torch.relu(x) * torch.sigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True))))
            made: torch.Tensor = self.last(scaled) + scaled
            return made

    check(Twice(24, 24), image(2, 24, 6, 6))


@pytest.mark.parametrize("tiles", [RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)], ids=str)
def test_processors_with_other_registers(tiles: RegisterTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLanguage, "register_tiles", tiles)
    stem = nn.Sequential(nn.Conv2d(3, 20, 3, 2), nn.SiLU(), Excited(20, 13), nn.ReLU6())
    check(Padded(stem, (0, 1, 0, 1)), spoiled(torch.randn(2, 3, 30, 41)))


@pytest.mark.parametrize("stride", [1, 2])
def test_narrow_products_are_covered_by_one_tile(stride: int) -> None:
    for made in (17, 24, 31, 40, 47, 50, 63):
        torch._dynamo.reset()
        check(nn.Sequential(nn.Conv2d(24, made, 1, stride), nn.ReLU6()), image(2, 24, 9, 9))


@pytest.mark.parametrize("generated", ["auto", "all"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("number", [1.5, 2, True])
def test_products_with_numbers_in_front_of_convolutions(
    number: float, layout: torch.memory_format, generated: str
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(16, 24, 1), nn.Conv2d(24, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.second(number * torch.relu(self.first(torch.tanh(x) * number)))
            return made

    check(Scaled(), torch.randn(2, 16, 7, 6).contiguous(memory_format=layout), generated_kernels=generated)
