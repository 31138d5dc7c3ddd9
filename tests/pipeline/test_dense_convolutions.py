"""Convolutions of all channels with all channels, whose weights lie in blocks, compared with eager PyTorch."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from torch import nn

from kagent_core.codegen.generic import dense_convolution
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.optimize.convolution_blocks import in_blocks, out_of_blocks, taps_in_blocks
from kagent_cpu.language import CLanguage

from . import exact

Case = tuple[Any, ...]

# channels, channels made, window, stride, padding, dilation, lines, places
DENSE: list[Case] = [
    (16, 16, 3, 1, 1, 1, 12, 33),
    (24, 40, 3, 1, 1, 1, 7, 7),
    (17, 33, 3, 2, 1, 1, 15, 14),
    (33, 65, 5, 1, 2, 1, 9, 6),
    (9, 10, 3, 1, 1, 1, 5, 31),
    (12, 3, 3, 1, 1, 1, 6, 6),
    (10, 1, 3, 1, 1, 1, 6, 30),
    (16, 64, 3, 1, 3, 2, 9, 11),
    (16, 48, 5, 3, 4, 1, 11, 12),
    (16, 24, 3, 1, 2, 1, 1, 1),
    (16, 24, 3, 1, 4, 1, 2, 3),
    (16, 24, (3, 5), (2, 1), (0, 2), (1, 2), 7, 9),
    (16, 24, (1, 3), (1, 2), (2, 0), 1, 4, 9),
    (16, 128, 3, 1, 0, 1, 3, 3),
    (40, 24, 3, (1, 3), 1, (3, 1), 8, 16),
    (1, 20, 3, 1, 1, 1, 8, 9),
    (1, 1, 1, 1, 0, 1, 5, 5),
    (16, 96, 1, 2, 0, 1, 14, 14),
    (16, 96, 1, (1, 2), 1, 1, 5, 7),
    (700, 800, 1, 1, 0, 1, 3, 5),
    (256, 130, 3, 1, 1, 1, 5, 7),
]
# channels, channels made, window, lines, places
TRANSPOSED: list[Case] = [
    (32, 16, 2, 8, 9),
    (17, 21, (3, 2), 5, 7),
    (5, 3, 2, 1, 1),
    (24, 40, 1, 4, 4),
    (1, 1, 2, 3, 30),
    (16, 70, 4, 3, 2),
]


class Beside(nn.Module):
    """A convolution of the channels of two tensors."""

    def __init__(self, convolution: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.convolution, self.again = convolution, again

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, beside], 1)
        made: torch.Tensor = torch.relu(self.convolution(both))
        return made + both.sum() if self.again else made


class Residual(nn.Module):
    """What a convolution gives, a sum with something of its shape, and an activation."""

    def __init__(self, convolution: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.convolution, self.activation = convolution, activation

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.activation(self.convolution(x) + beside)
        return made


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have weights of any size fetched before they are used."""
    monkeypatch.setattr(dense_convolution, "_FAR", 0)


@torch.no_grad()
def check(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> list[str]:
    """Compare a model with eager PyTorch, strides included, and return the names of the kernels that ran."""
    names, got = exact.ran(model, *inputs, **options)
    kept = [dim for dim, size in enumerate(got.shape) if size > 1]
    assert [got.stride(dim) for dim in kept] == [model(*inputs).stride(dim) for dim in kept]
    return names


def spoiled(x: torch.Tensor) -> torch.Tensor:
    """Put NaN and infinities into a tensor: at a corner, at the other one, and in the middle."""
    exact.spoiled(x)
    x[tuple(size // 2 for size in x.shape)] = float("-inf")
    return x


def laid_out(number: int, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies in one of several orders."""
    if number % 4 == 0:
        return x.contiguous(memory_format=torch.channels_last)
    if number % 4 == 1:
        return torch.cat([x, x], 1).contiguous(memory_format=torch.channels_last)[:, x.shape[1] :]
    if number % 4 == 2:
        return torch.cat([x, x], 3).contiguous(memory_format=torch.channels_last)[..., x.shape[3] :]
    return x.contiguous()


def convolution(case: Case, bias: bool = True) -> tuple[nn.Module, tuple[int, ...]]:
    channels, made, size, stride, padding, dilation, *image = case
    return nn.Conv2d(channels, made, size, stride, padding, dilation, bias=bias), (channels, *image)


@pytest.mark.parametrize(("number", "case"), list(enumerate(DENSE)), ids=str)
def test_convolutions_give_what_eager_pytorch_gives(number: int, case: Case) -> None:
    model, shape = convolution(case, number % 2 == 0)
    activation = [nn.ReLU(), nn.SiLU(), nn.ReLU6(), nn.Identity()][number % 4]
    names = check(nn.Sequential(model, activation), spoiled(laid_out(number, torch.randn(1 + number % 3, *shape))))
    assert any(name.startswith("block_convolution") for name in names), names
    assert not any("::" in name for name in names), names


@pytest.mark.parametrize("case", DENSE[:4], ids=str)
def test_residual_sums_are_added_where_a_convolution_stores(case: Case) -> None:
    model, shape = convolution(case)
    x = laid_out(0, torch.randn(2, *shape))
    beside = laid_out(0, torch.randn(model(x).shape))
    names = check(Residual(model, nn.ReLU()), spoiled(x), spoiled(beside))
    assert len(names) == 1


@pytest.mark.parametrize("case", [DENSE[n] for n in (0, 1, 3, 9, 17, 20)], ids=str)
def test_weights_that_are_fetched_are_the_same(case: Case, fetching: None) -> None:
    model, shape = convolution(case)
    check(nn.Sequential(model, nn.ReLU()), torch.randn(2, *shape))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("case", [DENSE[n] for n in (0, 2, 3, 7, 8, 11, 19)], ids=str)
def test_two_tensors_are_read_where_they_are(case: Case, number: int) -> None:
    model, (channels, *image) = convolution(case)
    first = [1, channels // 2, channels - 1, 8][number]
    parts = [laid_out(number + n, torch.randn(2, size, *image)) for n, size in enumerate((first, channels - first))]
    names = check(Beside(model), *map(spoiled, parts))
    assert not any(name.startswith("cat") for name in names), names


def test_two_tensors_that_are_needed_as_one_are_put_together() -> None:
    model, (channels, *image) = convolution(DENSE[0])
    parts = [laid_out(0, torch.randn(2, channels // 2, *image)) for _ in range(2)]
    check(Beside(model, again=True), *parts)


@pytest.mark.parametrize("tiles", [RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)], ids=str)
@pytest.mark.parametrize("case", [DENSE[n] for n in (0, 2, 3, 7, 11)], ids=str)
def test_processors_with_other_registers(tiles: RegisterTiles, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLanguage, "register_tiles", tiles)
    model, shape = convolution(case)
    assert check(model, spoiled(torch.randn(2, *shape)))[0].startswith(("block_convolution", "clone"))


@pytest.mark.parametrize(("number", "case"), list(enumerate(TRANSPOSED)), ids=str)
def test_transposed_convolutions_whose_taps_never_meet(number: int, case: Case) -> None:
    channels, made, size, *image = case
    model = nn.Sequential(nn.ConvTranspose2d(channels, made, size, size, bias=number % 2 == 0), nn.ReLU())
    names = check(model, spoiled(laid_out(number, torch.randn(1 + number % 2, channels, *image))))
    assert any(name.startswith("block_transposed_convolution") for name in names), names


@pytest.mark.parametrize(
    "model",
    [
        nn.ConvTranspose2d(16, 8, 3, 2),
        nn.ConvTranspose2d(16, 8, 2, 2, padding=1),
        nn.ConvTranspose2d(16, 8, 2, 2, groups=2),
        nn.ConvTranspose2d(16, 8, 2, 2, dilation=2),
        nn.ConvTranspose2d(16, 8, 2, 2, output_padding=1),
        nn.Conv2d(16, 16, 3, groups=2),
    ],
    ids=str,
)
def test_others_are_left_to_the_library(model: nn.Module) -> None:
    assert any("convolution" in name for name in check(model, torch.randn(1, 16, 5, 6)) if "::" in name)


def test_a_batch_of_none() -> None:
    model, (channels, *image) = convolution(DENSE[0])
    with torch.no_grad():
        run = torch.compile(model.eval(), backend="kagent", options={"device": "cpu"})
        assert run(torch.randn(0, channels, *image)).shape == model(torch.randn(0, channels, *image)).shape


@pytest.mark.parametrize("threads", [1, 2])
def test_several_images_in_several_threads(threads: int) -> None:
    model, shape = convolution((16, 40, 3, 1, 1, 1, 40, 40))
    check(nn.Sequential(model, nn.ReLU()), torch.randn(3, *shape), threads=threads)


@torch.no_grad()
def test_changed_weights_are_laid_out_again() -> None:
    model = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(24, 20, 2, 2)).eval()
    run, x = torch.compile(model, backend="kagent", options={"device": "cpu"}), torch.randn(1, 16, 6, 6)
    for layer in (0, 2):
        torch.testing.assert_close(run(x), model(x))
        model.get_parameter(f"{layer}.weight").data.mul_(-2)
        model.get_parameter(f"{layer}.bias").data.add_(1)
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_images_of_any_size() -> None:
    model = nn.Sequential(nn.Conv2d(16, 20, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(20, 18, 2, 2)).eval()
    run = torch.compile(model, backend="kagent", options={"device": "cpu"}, dynamic=True)
    for images, size in ((2, 20), (3, 31), (1, 8), (2, 5)):
        x = torch.randn(images, 16, size, size + 1)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_nothing_is_read_beyond_the_end_of_a_tensor() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    libc = ctypes.CDLL(None, use_errno=True)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(page), 0) == 0
    numbers = torch.frombuffer(memory, dtype=torch.float32, count=page // 4)
    for channels, size, padding in ((33, 3, 1), (23, 3, 0), (19, 2, 1)):
        torch._dynamo.reset()
        x = numbers[page // 4 - channels * 20 :].view(1, 4, 5, channels).permute(0, 3, 1, 2)
        x.copy_(torch.randn(1, channels, 4, 5))
        check(nn.Conv2d(channels, 17, size, padding=padding), x)


@pytest.mark.parametrize("made", [1, 3, 16, 17, 33, 64])
def test_blocks_hold_every_channel(made: int) -> None:
    weight = torch.randn(made, 5, 3, 2)
    width = min(16, 1 << made.bit_length() - 1)
    blocks = in_blocks(weight, width)
    assert blocks.shape == (-(-made // width), 3, 2, 5, width)
    assert torch.equal(out_of_blocks(blocks, made), weight)


@pytest.mark.parametrize("made", [3, 17, 32])
def test_the_operators_mean_what_they_say(made: int) -> None:
    x, bias = torch.randn(2, 5, 6, 7), torch.randn(made)
    weight, across = torch.randn(made, 5, 3, 2), torch.randn(5, made, 3, 2)
    width = min(16, 1 << made.bit_length() - 1)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.kagent.block_convolution, (in_blocks(weight, width), bias, made, [2, 1], [1, 2], [1, 2])),
        (torch.ops.kagent.block_transposed_convolution, (taps_in_blocks(across, width), bias, made)),
    ]
    half = in_blocks(torch.cat([weight, weight], 1), width)
    both = torch.ops.kagent.block_convolution(x, half, bias, made, [1, 1], [0, 0], [1, 1], -x)
    torch.testing.assert_close(both, bias.view(1, -1, 1, 1).expand_as(both), rtol=1e-4, atol=1e-5)
    expected = [
        torch.nn.functional.conv2d(x, weight, bias, (2, 1), (1, 2), (1, 2)),
        torch.nn.functional.conv_transpose2d(x, across, bias, (3, 2)),
    ]
    for (operator, (blocks, *rest)), value in zip(calls, expected, strict=True):
        torch.testing.assert_close(operator(x, blocks, *rest), value)
        fake = operator(x.to("meta"), blocks.to("meta"), bias.to("meta"), *rest[1:])
        assert (fake.shape, fake.stride()) == (value.shape, operator(x, blocks, *rest).stride())


CONTIGUOUS = {
    "dense": nn.Conv2d(9, 40, 3, padding=1),
    "depthwise": nn.Conv2d(24, 24, 5, padding=2, groups=24),
    "of planes": nn.Conv2d(3, 20, 3, padding=1),
    "of one place": nn.Conv2d(24, 40, 1),
}


@pytest.mark.parametrize("size", [(32, 32), (16, 64), (37, 29)], ids=str)
@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_a_contiguous_image_is_stored_as_eager_lays_it_out(kind: str, size: tuple[int, int]) -> None:
    """Of a power of two of places, column by column."""
    model = nn.Sequential(CONTIGUOUS[kind], nn.SiLU()).eval()
    given = spoiled(torch.randn(2, CONTIGUOUS[kind].in_channels, *size))
    with torch.no_grad():
        made = torch.compile(model, backend="kagent", dynamic=False, options={"device": "cpu"})(given)
        assert made.stride() == model(given).stride()
    check(model, given)
