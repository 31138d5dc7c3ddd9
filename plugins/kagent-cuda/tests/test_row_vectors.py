"""Blocks that share rows read and write them 16 bytes at a time, where rows lie so, and compute what PyTorch does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kagent_core.testing.compare import assert_same
from kagent_cuda.compiler import NvrtcCompiler

from .test_language import LANGUAGE, made, ptx

functional = torch.nn.functional
Function = Callable[..., Any]


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 1, -1)


def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(-1), x.amax(-1), x.amin(-1), (x > 0).any(-1), (x > -9).all(-1), signs(x).prod(-1)


def of_length(function: Function, length: int, count: int = 64) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """Return a function, with arguments."""
    arity = function.__code__.co_argcount
    x = torch.linspace(-3, 4, count * length).sin().view(count, length)
    return function, (x, *(torch.linspace(1, n + 1.5, length).cos() for n in range(arity - 1)))


@pytest.mark.parametrize(
    ("function", "loads"), [(softmax, 1), (layer_norm, 3), (rms_norm, 2)], ids=["softmax", "layer norm", "RMS norm"]
)
def test_rows_are_read_and_written_16_bytes_at_a_time(function: Function, loads: int) -> None:
    assembly = ptx(*_flat(of_length(function, 1024)))
    assert len(re.findall(r"ld\.global\S*\.v4\.(?:f32|b32|u32)", assembly)) == loads
    assert len(re.findall(r"st\.global\S*\.v4\.(?:f32|b32|u32)", assembly)) == 1
    assert not re.search(r"\b(ld|st)\.local", assembly)


def _flat(case: tuple[Function, tuple[torch.Tensor, ...]]) -> tuple[Any, ...]:
    return case[0], *case[1]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_they_compile(dtype: torch.dtype, architecture: str, cache_dir: Any) -> None:
    compiler = NvrtcCompiler(architecture, cache_dir)
    for function in (softmax, layer_norm, rms_norm, lambda x: x.sum(), lambda x: x.amax((0, 1))):
        args = (arg.to(dtype) for arg in of_length(function, 2048)[1])
        kernel = made(function, *args)
        assert "load_lanes(" in kernel.text
        assert kernel.name in compiler.compile(LANGUAGE.preamble() + kernel.text, kernel.name).usage


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :1022],
        lambda x: x[:, 1:1021],
        lambda x: x[:, ::2],
        lambda x: x[:, :1020].clone()[:, 3:],
        lambda x: x[:8, :40].repeat(1, 1),
    ],
    ids=["rows of any length", "an offset", "every other", "rows that begin anywhere", "fewer elements than threads"],
)
def test_no_vectors_where_rows_do_not_lie_so(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert "load_lanes(" not in made(lambda x: view(x).softmax(-1), torch.empty(64, 1024)).text


LENGTHS = (256, 260, 384, 768, 1000, 1024, 1030, 5000)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_any_length(length: int, dtype: torch.dtype, device: str) -> None:
    for function, args in (of_length(each, length, 5) for each in (softmax, layer_norm, rms_norm)):
        args = tuple(arg.to(dtype) for arg in args)
        compiled = torch.compile(function, backend="kagent", options={"device": device}, fullgraph=True)
        assert_same(compiled(*args), function(*args), f"{function.__name__} of {length}", every_stride=False)


@pytest.mark.parametrize("kind", ["numbers", "NaN", "infinities"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8])
def test_reductions_of_rows(dtype: torch.dtype, kind: str, device: str) -> None:
    if not dtype.is_floating_point and kind != "numbers":
        dtype = torch.float16
    x = (torch.linspace(-3, 4, 6 * 1536).sin() * 9).to(dtype).view(6, 1536)
    if kind != "numbers":
        x[1, 1021], x[2, 5], x[3, 1535] = (float("nan"),) * 3 if kind == "NaN" else (float("inf"), -float("inf"), 1)
    compiled = torch.compile(rows, backend="kagent", options={"device": device}, fullgraph=True)
    assert_same(compiled(x), rows(x), f"{kind} of {dtype}", every_stride=False)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_a_tensor_that_begins_anywhere(first: int, device: str) -> None:
    """Where its first element lies is known only when the kernel runs: unaligned vectors are read one by one."""
    x = torch.linspace(-3, 4, 4 * 1024 + 4).sin()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x[first : first + 4096].view(4, 1024).softmax(-1)

    compiled = torch.compile(function, backend="kagent", options={"device": device}, fullgraph=True)
    assert_same(compiled(x), function(x), f"from {first}", every_stride=False)


def test_sums_of_long_rows_and_of_several_dimensions(device: str) -> None:
    x = torch.linspace(-3, 4, 70 * 32 * 256).sin().view(70, 32, 256)
    for function in (lambda x: x.sum(), lambda x: x.mean((0, 2)), lambda x: x.amax((0, 2)), lambda x: x.var()):
        compiled = torch.compile(function, backend="kagent", options={"device": device}, fullgraph=True)
        assert_same(compiled(x), function(x), "several dimensions", every_stride=False)


def test_chains_of_halves_inside_of_rows(device: str) -> None:
    x, y = (torch.linspace(-3, n, 5 * 1024).sin().view(5, 1024).half() for n in (4, 5))

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = (x + y) * y
        return mixed.softmax(-1), (mixed - x).amax(-1), mixed

    assert "kept[turn], " in made(lambda x, y: ((x + y) * y).softmax(-1), x, y).text
    compiled = torch.compile(function, backend="kagent", options={"device": device}, fullgraph=True)
    for mine, eager in zip(compiled(x, y), function(x, y), strict=True):
        torch.testing.assert_close(mine, eager)
    assert torch.equal(compiled(x, y)[2], function(x, y)[2])
