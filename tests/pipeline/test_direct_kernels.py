"""Convolutions whose sums stay in the CPU's registers, compared with eager PyTorch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_cpu.language import CLanguage

from .exact import check, spoiled

ACTIVATIONS = [nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.Hardswish(), nn.SiLU(), nn.Hardsigmoid(), nn.GELU()]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "part of channels last": lambda x: torch.cat([x, x, x], 1).contiguous(memory_format=torch.channels_last)[
        :, x.shape[1] : 2 * x.shape[1]
    ],
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}

Case = tuple[Any, ...]

# channels, channels made, window, stride, padding, dilation, groups, height, width
POINTWISE: list[Case] = [
    (24, 144, 1, 1, 0, 1, 1, 12, 12),
    (16, 16, 1, 1, 0, 1, 1, 9, 5),
    (17, 33, 1, 1, 0, 1, 1, 1, 1),
    (33, 17, 1, 1, 0, 1, 1, 1, 9),
    (33, 17, 1, 1, 0, 1, 1, 9, 1),
    (10, 3, 1, 1, 0, 1, 1, 8, 8),
    (16, 24, 1, 2, 0, 1, 1, 9, 9),
    (16, 24, 1, 2, 1, 1, 1, 5, 7),
]
STEMS: list[Case] = [
    (3, 16, 3, 2, 1, 1, 1, 23, 31),
    (3, 64, 7, 2, 3, 1, 1, 21, 20),
    (8, 20, 3, 1, 2, 2, 1, 9, 9),
    (4, 70, 5, 3, 4, 1, 1, 11, 12),
    (2, 9, 3, (2, 1), (0, 2), (1, 2), 1, 7, 8),
]
DEPTHWISE: list[Case] = [
    (72, 72, 3, 1, 1, 1, 72, 13, 17),
    (72, 72, 3, 2, 1, 1, 72, 14, 14),
    (96, 96, 5, 2, 2, 1, 96, 28, 9),
    (40, 40, 7, 1, 3, 1, 40, 8, 8),
    (5, 5, 3, 1, 1, 1, 5, 6, 6),
    (6, 6, 3, 1, 2, 2, 6, 9, 9),
    (12, 12, 3, 1, 4, 1, 12, 3, 3),
    (12, 12, 3, 1, 1, 1, 12, 1, 1),
    (64, 64, 3, 1, 0, 1, 64, 3, 3),
    (8, 8, (1, 5), 1, (0, 2), 1, 8, 4, 9),
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Block(nn.Module):
    """A convolution, an activation and a residual sum."""

    def __init__(self, case: Case, activation: nn.Module, bias: bool) -> None:
        super().__init__()
        channels, made, size, stride, padding, dilation, groups, *_ = case
        self.first = nn.Conv2d(channels, made, size, stride, padding, dilation, groups, bias)
        self.activation = activation
        self.second = nn.Conv2d(made, made, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.first(x))
        made: torch.Tensor = x + self.second(x)
        return made


@pytest.mark.parametrize(("number", "case"), list(enumerate(POINTWISE + STEMS + DEPTHWISE)), ids=str)
def test_convolutions_give_what_eager_pytorch_gives(number: int, case: Case) -> None:
    channels, *_, height, width = case
    layout = list(LAYOUTS.values())[number % len(LAYOUTS)]
    x = layout(torch.randn(1 + number % 3, channels, height, width))
    names = check(Block(case, ACTIVATIONS[number % len(ACTIVATIONS)], number % 2 == 0), spoiled(x))
    assert not any("::" in name for name in names), names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [POINTWISE[0], STEMS[0], DEPTHWISE[0]], ids=str)
def test_tensors_may_lie_in_any_order(case: Case, layout: str) -> None:
    channels, *_, height, width = case
    check(Block(case, nn.ReLU(), True), spoiled(LAYOUTS[layout](torch.randn(2, channels, height, width))))


@pytest.mark.parametrize("case", [(1, 5, 3, 1, 1, 1, 1, 8, 8), (7, 1, 1, 1, 0, 1, 1, 5, 5)], ids=str)
def test_single_channels_need_no_library(case: Case) -> None:
    channels, *_, height, width = case
    names = check(Block(case, nn.ReLU(), True), torch.randn(2, channels, height, width))
    assert not any("::" in name for name in names), names


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: type(activation).__name__)
@pytest.mark.parametrize("case", [POINTWISE[0], DEPTHWISE[0]], ids=str)
def test_what_follows_is_computed_where_a_convolution_stores(case: Case, activation: nn.Module) -> None:
    channels, *_, height, width = case
    x = spoiled(torch.randn(2, channels, height, width).contiguous(memory_format=torch.channels_last))
    names = check(Block(case, activation, True), x)
    # one kernel each, and the copy that gives the result eager's strides, if there is one
    assert sum(name.startswith("convolution") for name in names) == 2
    assert len(names) <= 3


@pytest.mark.parametrize("threads", [1, 2])
def test_a_network_converts_nothing_between_its_layers(threads: int) -> None:
    wide = 72
    model = nn.Sequential(
        *(nn.Conv2d(16, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
        *(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
        *(nn.Conv2d(wide, 24, 1, bias=False), nn.BatchNorm2d(24)),
    )
    x = torch.randn(2, 16, 14, 14).contiguous(memory_format=torch.channels_last)
    names = check(model, x, threads=threads)
    assert len(names) == 3
    assert all(name.startswith("convolution") for name in names)


def test_nothing_is_read_beyond_the_end_of_a_tensor() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    libc = ctypes.CDLL(None, use_errno=True)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(page), 0) == 0
    for channels, groups in ((5, 5), (23, 23), (33, 1)):
        torch._dynamo.reset()
        numbers = torch.frombuffer(memory, dtype=torch.float32, count=page // 4)
        x = numbers[page // 4 - channels * 9 :].view(1, 3, 3, channels).permute(0, 3, 1, 2)
        x.copy_(torch.randn(1, channels, 3, 3))
        size = 3 if groups > 1 else 1
        check(nn.Conv2d(channels, channels, size, padding=size // 2, groups=groups), x)


@pytest.mark.parametrize("tiles", [RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)], ids=str)
def test_processors_with_other_registers(tiles: RegisterTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLanguage, "register_tiles", tiles)
    for case in (POINTWISE[0], STEMS[0], DEPTHWISE[0], DEPTHWISE[2]):
        torch._dynamo.reset()
        channels, *_, height, width = case
        check(Block(case, nn.ReLU(), True), spoiled(torch.randn(2, channels, height, width)))


@torch.no_grad()
def test_changed_weights_are_laid_out_again() -> None:
    model = nn.Sequential(nn.Conv2d(8, 24, 1), nn.ReLU(), nn.Conv2d(24, 24, 3, groups=24)).eval()
    run, x = torch.compile(model, backend="kagent", options={"device": "cpu"}), torch.randn(1, 8, 6, 6)
    for layer in (0, 2):
        torch.testing.assert_close(run(x), model(x))
        model.get_parameter(f"{layer}.weight").data.mul_(-2)
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_images_of_any_size() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.Hardswish(), nn.Conv2d(16, 16, 3, 1, 1, groups=16)).eval()
    run = torch.compile(model, backend="kagent", options={"device": "cpu"}, dynamic=True)
    for images, size in ((2, 20), (3, 31), (1, 8), (2, 5)):
        x = torch.randn(images, 3, size, size + 1)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
