"""Convolutions of one place and depthwise ones that are computed some lines at a time, compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kagent_core
from kagent_core import hookimpl
from kagent_core.codegen.generic import strip_sizes, strips
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.config import FUSION_RULES
from kagent_core.specs import FusionPlan
from kagent_cpu.language import CLanguage

from .exact import check, spoiled


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take strips for small images, and caches of which a few lines fill all."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(strips, "LARGE", 1)
    monkeypatch.setattr(strip_sizes, "NEAR", 24 * 1024)
    monkeypatch.setattr(strip_sizes, "NEAREST", 4 * 1024)
    monkeypatch.setattr(strip_sizes, "MOST_TWICE", 99)


class Block(nn.Module):
    """An inverted residual block, or a part of one."""

    def __init__(
        self,
        read: int,
        deep: int,
        made: int,
        window: Any = (3, 1, 1),
        activation: nn.Module | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        activation = activation or nn.ReLU6()
        self.read, self.made, self.activation = read, made, activation
        self.wide = nn.Conv2d(read, deep, 1, bias=bias) if read else nn.Identity()
        self.deep = nn.Conv2d(deep, deep, *window, groups=deep, bias=bias)
        self.narrow = nn.Conv2d(deep, made, 1, bias=bias) if made else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        wide = self.activation(self.wide(x)) if self.read else x
        made: Tensor = self.narrow(self.activation(self.deep(wide)))
        return x + made if made.shape == x.shape else made


CASES: dict[str, tuple[Any, ...]] = {
    # channels read, between and made; window, stride, padding and dilation; activation; height and width
    "block": (16, 96, 24, (3, 2, 1), nn.ReLU6(), (23, 17)),
    "residual": (24, 72, 24, (3, 1, 1), nn.ReLU6(), (21, 16)),
    "large window": (16, 40, 40, (5, 2, 2), nn.Hardswish(), (30, 40)),
    "without a first": (0, 32, 16, (3, 1, 1), nn.SiLU(), (14, 20)),
    "without a last": (16, 72, 0, (3, 1, 1), nn.Hardswish(), (16, 9)),
    "dilated lines": (8, 48, 8, (3, 1, (2, 1), (2, 1)), nn.Identity(), (13, 12)),
    "lines that nobody reads": (8, 33, 17, ((1, 3), (3, 1), 1), nn.ReLU(), (11, 8)),
    "no padding": (8, 64, 70, ((3, 2), (1, 2), 0), nn.GELU(), (9, 9)),
    "padding only": (8, 20, 20, (3, 1, (5, 2)), nn.Tanh(), (3, 4)),
    "one line": (8, 32, 8, (3, 1, 1), nn.ReLU6(), (1, 30)),
}


def kernels(names: list[str]) -> int:
    """Return how many kernels compute convolutions."""
    return sum("convolution" in name for name in names)


@pytest.mark.parametrize("case", CASES)
def test_blocks_give_what_eager_pytorch_gives(case: str) -> None:
    read, deep, made, window, activation, size = CASES[case]
    threads = list(CASES).index(case) % 2 + 1
    x = torch.randn(threads % 2 + 1, read or deep, *size).contiguous(memory_format=torch.channels_last)
    block = Block(read, deep, made, window, activation, bias=len(case) % 2 == 0)
    names = check(block, spoiled(x), threads=threads)
    assert kernels(names) == 1, names


@pytest.mark.parametrize("read", [3, 8])
def test_few_channels_that_lie_as_planes(read: int) -> None:
    assert kernels(check(Block(read, 32, 16), spoiled(torch.randn(2, read, 12, 14)))) == 1


def test_blocks_follow_each_other() -> None:
    stem = (nn.Conv2d(3, 8, 3, 2, 1), nn.Hardswish(), Block(0, 8, 16))
    x = spoiled(torch.randn(3, 3, 30, 26))
    names = check(nn.Sequential(*stem, Block(16, 32, 16), Block(16, 48, 24, (3, 2, 1))), x)
    assert kernels(names) == 3, names


def test_zeros_in_front_and_sums_behind_are_part_of_it() -> None:
    class Excited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Block(8, 40, 0, (5, 2, 0), nn.SiLU()), nn.Conv2d(40, 16, 1)
            self.excite = nn.Conv2d(40, 40, 1)

        def forward(self, x: Tensor) -> Tensor:
            block = self.block
            wide = functional.pad(block.activation(block.wide(x)), (1, 2, 1, 2))
            deep = block.activation(block.deep(wide))
            made: Tensor = self.last(deep * torch.sigmoid(self.excite(deep.mean((2, 3), keepdim=True))))
            return made

    names = check(Excited(), torch.randn(2, 8, 24, 18).contiguous(memory_format=torch.channels_last))
    assert kernels(names) == 2, names
    assert not any(name.startswith(("mean", "constant_pad_nd")) for name in names), names


@pytest.mark.parametrize("read", [0, 8])
def test_sums_of_an_image_that_nothing_follows(read: int) -> None:
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            deep: Tensor = self.deep(self.wide(x))
            return deep - deep.mean((2, 3), keepdim=True)

    x = torch.randn(2, read or 24, 14, 16).contiguous(memory_format=torch.channels_last)
    assert kernels(check(Scaled(read, 24, 0), x)) == 1


@pytest.mark.parametrize("part", ["wide", "deep"])
def test_images_that_others_read_are_made(part: str) -> None:
    class Read(Block):
        def forward(self, x: Tensor) -> Any:
            wide = self.activation(self.wide(x))
            deep = self.activation(self.deep(wide))
            return self.narrow(deep) + {"wide": wide, "deep": deep}[part][:, :16]

    names = check(Read(8, 32, 16), torch.randn(2, 8, 12, 12).contiguous(memory_format=torch.channels_last))
    assert kernels(names) == 2, names


class Reasons:
    """Why neighbours are in one kernel, or are not."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @hookimpl(wrapper=True)
    def kagent_analyze_fusion(self) -> Generator[None, FusionPlan, FusionPlan]:
        plan = yield
        self.told += [decision.reason for decision in plan.decisions]
        return plan


@pytest.mark.parametrize(
    ("why", "expected"),
    {
        "rule": "rule 'strips' is switched off by config (fusion_rules)",
        "image": "strips: an image of 41,472 bytes between {0} and {1} stays in a cache",
        "threads": "too many lines of",
    }.items(),
)
def test_blocks_that_are_made_one_after_the_other(why: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"threads": 2}
    if why == "rule":
        options["fusion_rules"] = tuple(rule for rule in FUSION_RULES if rule != "strips")
    elif why == "image":
        monkeypatch.setattr(strips, "LARGE", 4 * 72 * 12 * 12 + 1)
    else:
        monkeypatch.setattr(strip_sizes, "MOST_TWICE", 0.1)
    x = torch.randn(1, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    reasons = Reasons()
    with kagent_core.use_plugin(reasons):
        names = check(Block(8, 72, 8), x, **options)
    assert kernels(names) == (2 if why == "threads" else 3), names
    parts = expected.replace("{0}", "|").replace("{1}", "|").split("|")
    assert any(all(part in told for part in parts) for told in reasons.told), reasons.told


@pytest.mark.parametrize("tiles", [RegisterTiles(8, 16), RegisterTiles(4, 32)], ids=str)
def test_processors_with_other_registers(tiles: RegisterTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLanguage, "register_tiles", tiles)
    x = torch.randn(2, 16, 18, 14).contiguous(memory_format=torch.channels_last)
    assert kernels(check(Block(16, 40, 24, (3, 2, 1)), spoiled(x))) == 1
