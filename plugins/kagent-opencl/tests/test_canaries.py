"""Arguments anywhere in larger buffers: results are right, and what lies before and behind stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kagent_core.testing.conformance.compared import assert_same_memory, same

aten = torch.ops.aten
Program = tuple[Callable[..., Any], tuple[Tensor, ...]]

OFFSETS = (1, 13, 37)
"""In elements: none is a multiple of 128 bytes, where OpenCL's sub-buffers may begin."""

BEHIND = 29
CANARY = 77


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same numbers every time."""
    torch.manual_seed(0)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small whole numbers, whose sums and products are exact."""
    return torch.randint(-4, 5, shape).to(dtype)


def framed(tensor: Tensor, offset: int, gap: int = 0) -> Tensor:
    """Return the values at an offset in a larger buffer; with a gap, behind each row are elements of nobody as well."""
    strides, step = [], 1
    for position, size in enumerate(reversed(tensor.shape)):
        strides.append(step)
        step *= size
        if position == 0 and tensor.dim() > 1:
            step += gap
    base = torch.full((offset + step + BEHIND,), CANARY, dtype=tensor.dtype)
    return base.as_strided(tensor.shape, strides[::-1], offset).copy_(tensor)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return tuple(aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False))


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return aten.relu(aten.convolution(x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))


def convolution_gradients(y: Tensor, x: Tensor, weight: Tensor) -> Any:
    return tuple(aten.convolution_backward(y, x, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3))


INDEX = torch.tensor([3, 0, 6, 3, 5])

PROGRAMS: dict[str, Program] = {
    "elements": (lambda x, y: (x * 2 + y, torch.where(x > 0, x, y)), (numbers(71), numbers(71))),
    "elements of rows": (lambda x, y: x * y, (numbers(5, 33), numbers(33))),
    "transposed elements": (lambda x, y: x.t() + y, (numbers(5, 33), numbers(33, 5))),
    "in place": (lambda x, y: x.mul_(2).add_(y), (numbers(5, 33), numbers(5, 33))),
    "copied into a part": (lambda x, y: x[1:, 2:35].copy_(y), (numbers(6, 40), numbers(5, 33))),
    "rows": (lambda x: (x.sum(-1), x.amax(-1), x.softmax(-1)), (numbers(5, 33),)),
    "columns": (lambda x: (x.sum(0), x.amax(0), x.softmax(0)), (numbers(33, 35),)),
    "product": (lambda b, x, y: aten.addmm(b, x, y).relu(), (numbers(19), numbers(13, 7), numbers(7, 19))),
    "products": (lambda x, y: x @ y, (numbers(2, 5, 7), numbers(2, 7, 19))),
    "convolution": (convolve, (numbers(1, 3, 6, 19), numbers(4, 3, 3, 3), numbers(4))),
    "gradients": (convolution_gradients, (numbers(1, 4, 6, 9), numbers(1, 3, 6, 9), numbers(4, 3, 3, 3))),
    "attention": (attend, tuple(numbers(1, 2, 9, 5) / 4 for _ in range(3))),
    "scatter": (lambda x, i, y: x.scatter_add_(0, i, y), (numbers(7), INDEX, numbers(5))),
    "index_put": (lambda x, i, y: x.index_put_((i,), y, accumulate=True), (numbers(7, 19), INDEX, numbers(5, 19))),
    "gather": (lambda x, i: x[i], (numbers(7, 19), INDEX)),
    "sort": (lambda x: tuple(x.sort(stable=True)), (numbers(3, 19),)),
    "cumsum": (lambda x: x.cumsum(-1), (numbers(3, 19),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_lies_around_arguments_stays(device: str, name: str) -> None:
    function, args = PROGRAMS[name]
    for offset, gap in ((OFFSETS[0], 0), (OFFSETS[1], 3), (OFFSETS[2], 0)):
        given = [framed(arg, offset + position, gap) for position, arg in enumerate(args)]
        assert all(given[position].equal(arg) for position, arg in enumerate(args))
        assert same(device, function, *given, calls=1).fallbacks == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_of_every_size_of_element(device: str, dtype: torch.dtype) -> None:
    for offset in OFFSETS:
        x, y = (framed(numbers(5, 33).to(dtype), offset + n) for n in range(2))
        ran = same(device, lambda x, y: (torch.maximum(x, y), x.copy_(y)[:, 1:], x.amax(-1)), x, y, calls=1)
        assert ran.fallbacks == ()


@pytest.mark.parametrize("place", [12, 46])
def test_a_canary_would_tell(place: int) -> None:
    """What is compared are the buffers, not just the arguments."""
    x, y = framed(numbers(33), 13), framed(numbers(33), 13)
    assert_same_memory(x, y, "without a fault")
    x.as_strided((1,), (1,), place).add_(1)
    with pytest.raises(AssertionError, match="memory beside an argument was written"):
        assert_same_memory(x, y, "with a fault")
