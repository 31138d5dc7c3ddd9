"""Indices of 32 bits: which kernels have them, and that they compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kagent_core.codegen.c_family import CFamily
from kagent_core.specs import OpCall
from kagent_cpu.language import CLanguage

from ..codegen_programs import NarrowC, check, generator, text_of
from .builders import call, relu, tensor
from .test_golden_kernels import KERNELS

aten = torch.ops.aten
LIMIT = 2**31 - 1


def text(*calls: OpCall, language: CLanguage | None = None) -> str:
    """Return the kernel of some calls whose tensors are described and nowhere in memory."""
    return generator(language or NarrowC()).source(calls, {spec.buffer for spec in calls[-1].outputs}).text


def is_narrow(made: str) -> bool:
    loops = set(re.findall(r"for \((i\d+) (?!part|lane)\w+ = ", made))  # those have at most a few hundred steps
    assert loops in ({"i32"}, {"i64"})
    return loops == {"i32"}


def test_no_language_wants_them_unless_it_says_so() -> None:
    assert not CFamily().narrow_indices
    assert not CLanguage().narrow_indices
    assert not is_narrow(text(relu(0, tensor(0, 8), tensor(1, 8)), language=CLanguage()))


@pytest.mark.parametrize(("size", "narrow"), [(8, True), (LIMIT, True), (LIMIT + 1, False), (2**40, False)])
def test_the_greatest_extent_that_fits(size: int, narrow: bool) -> None:
    assert is_narrow(text(relu(0, tensor(0, size), tensor(1, size)))) is narrow


@pytest.mark.parametrize(("stride", "narrow"), [(2**30 - 1, True), (2**30, False)])
def test_the_greatest_offset_that_fits(stride: int, narrow: bool) -> None:
    x = tensor(0, 3, 5, strides=(stride, 0))
    made = text(relu(0, x, tensor(1, 3, 5)))
    assert is_narrow(made) is narrow
    assert ("(i32)n" in made) is narrow


def test_sizes_stay_int64_among_the_parameters() -> None:
    made = generator(NarrowC()).source([relu(0, tensor(0, 8), tensor(1, 8))], {1})
    sizes = [arg for arg in made.args if isinstance(arg.value, int)]
    assert [(arg.name, arg.type, arg.value) for arg in sizes] == [("n0_wide", "i64", 8)]
    assert "const i32 n0 = (i32)n0_wide;" in made.text


def test_steps_past_the_end_must_fit_too() -> None:
    """A loop over blocks of columns goes on by a whole block."""

    def total(columns: int) -> str:
        x = tensor(0, 10, columns, strides=(2, 1))
        return text(call(0, "aten::sum.dim_IntList", {"self": x, "dim": (0,)}, [tensor(1, columns)]))

    assert is_narrow(total(LIMIT - 300))
    assert not is_narrow(total(LIMIT - 50))


def test_numbers_that_are_no_offsets_must_fit_too() -> None:
    """An expanded tensor is small in memory, and has more elements than an index can count."""
    x = tensor(0, 2**16, 2**16, strides=(0, 1))
    mean = call(0, "aten::mean", {"self": x}, [tensor(1)])
    assert not is_narrow(text(mean))
    # of a sum, only whether threads are worth their while asks for the product
    made = text(call(0, "aten::amax", {"self": x, "dim": (1,)}, [tensor(1, 2**16)]))
    assert is_narrow(made)
    assert "if ((i64)n0 * n0 > " in made


def product(rows: int, depth: int, columns: int) -> OpCall:
    operands = {"self": tensor(0, rows, depth), "mat2": tensor(1, depth, columns)}
    return call(0, "aten::mm", operands, [tensor(2, rows, columns)])


def pooled(size: int, made: int) -> OpCall:
    given = {"self": tensor(0, 1, 1, 1, size), "output_size": (1, made)}
    return call(0, "aten::_adaptive_avg_pool2d", given, [tensor(1, 1, 1, 1, made)])


@pytest.mark.parametrize(
    ("made", "narrow"),
    [
        (product(2**10, 2**10, 2**10), True),
        (product(2**16, 2**16, 16), False),
        (product(2**16, 16, 2**16), False),
        (product(LIMIT, 1, 1), False),  # tiles step past the end
        (call(0, "aten::cumsum", {"self": tensor(0, 2**15, 2**15), "dim": 1}, [tensor(1, 2**15, 2**15)]), True),
        (call(0, "aten::cumsum", {"self": tensor(0, 2**16, 2**15), "dim": 1}, [tensor(1, 2**16, 2**15)]), False),
    ],
)
def test_parametrised_kernels(made: OpCall, narrow: bool) -> None:
    assert is_narrow(text(made)) is narrow


def test_pairs_of_rows_are_counted() -> None:
    def distances(rows: int) -> str:
        made = tensor(1, rows * (rows - 1) // 2)
        return text(call(0, "aten::_pdist_forward", {"self": tensor(0, rows, 4), "p": 2.0}, [made]))

    assert is_narrow(distances(1000))
    assert not is_narrow(distances(40_000))  # 800 million pairs, whose numbers come from products twice as large


def test_a_kernel_for_small_tensors_is_not_taken_for_large_ones() -> None:
    making = generator(NarrowC())
    texts = []
    for size in (8, 2**33, 9, 2**34):
        x, y = tensor(0, size), tensor(1, size)
        texts.append(making.source([relu(0, x, y)], {1}).text)
    assert [is_narrow(made) for made in texts] == [True, False, True, False]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    assert re.findall(r"relu_\w+", texts[0]) != re.findall(r"relu_\w+", texts[1])


def test_indices_that_become_data_are_int64() -> None:
    x = torch.empty(6, 8)
    made = text_of(lambda x: x.argmax(-1), x, making=generator(NarrowC()))
    assert "i64 *restrict y0" in made
    arange = text_of(lambda: aten.arange.start_step(0, 100_000, 1), making=generator(NarrowC()))
    assert is_narrow(arange)
    assert "(i64)i0" in arange
    # squares of indices do not fit 32 bits, although the indices do
    check([(lambda: aten.arange.start_step(0, 100_000, 1) ** 2, ())], generator(NarrowC()))


def filled(name: str) -> list[torch.Tensor]:
    """Return the operands of a kernel under review: whole numbers for products, whose sums are then exact."""
    products = name in ("mm_bias_relu", "convolution_3x3", "column_sum", "cumsum")
    return [whole(*operand.shape) if products else operand.filled() for operand in KERNELS[name][1]]


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape).float()


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def convolution(x: torch.Tensor, weight: torch.Tensor, transposed: bool = False, groups: int = 1) -> Any:
    return aten.convolution(x, weight, None, [2, 1], [1, 2], [1, 1], transposed, [1, 0], groups)


def pool(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return aten.max_pool2d_with_indices(x, [3, 2], [2, 2], [1, 1], [1, 2])  # type: ignore[no-any-return]


def programs() -> list[tuple[Callable[..., Any], Sequence[torch.Tensor]]]:
    """Return programs of every family of generated kernels, and those under review."""
    torch.manual_seed(0)
    return [
        (aten.bmm, (whole(3, 20, 70), whole(3, 70, 50))),
        (aten.dot, (whole(20_000), whole(20_000))),
        (convolution, (whole(2, 6, 9, 11), whole(4, 6, 3, 3))),
        (lambda x, w: convolution(x, w, True), (whole(2, 6, 9, 11), whole(6, 4, 3, 3))),
        (lambda x, w: convolution(x, w, groups=6), (whole(2, 6, 9, 11), whole(6, 1, 3, 3))),
        (pool, (torch.randn(2, 3, 11, 12),)),
        (lambda x: aten.avg_pool2d(x, [3, 2], [2, 2], [1, 1], True), (torch.randn(2, 3, 11, 12),)),
        (lambda x: aten._adaptive_avg_pool2d(x, [4, 5]), (torch.randn(2, 3, 11, 12),)),
        (lambda x: aten.adaptive_max_pool2d(x, [4, 5]), (torch.randn(2, 3, 11, 12),)),
        (
            lambda x, i, s: aten.scatter_add(x, 1, i, s),
            (torch.randn(5, 9), integers(9, 5, 30), torch.randn(5, 30)),
        ),
        (
            lambda x, i, v: aten.index_put(x, [i], v, True),
            (torch.randn(9, 5), integers(9, 30), torch.randn(30, 5)),
        ),
        (lambda x, i: aten.gather(x, 1, i), (torch.randn(5, 9), integers(9, 5, 30))),
        (lambda x, i: aten.index(x, [None, i - 4]), (torch.randn(5, 9), integers(9, 30))),
        (lambda x: aten.sort(x, 0), (torch.randn(50, 6),)),
        (lambda x: aten.topk(x, 5, 1), (torch.randn(6, 50),)),
        (lambda x: aten.median.dim(x, 1), (torch.randn(6, 51),)),
        (lambda x: aten.cummax(x, 1), (torch.randn(6, 50),)),
        (aten.searchsorted, (torch.randn(6, 50).sort(1)[0], torch.randn(6, 9))),
        (lambda x: aten._pdist_forward(x, 2.0), (torch.randn(20, 5),)),
        (lambda x, i, v: aten.put(x, i, v), (torch.randn(5, 9), torch.randperm(45)[:30] - 45, torch.randn(30))),
        (aten.masked_scatter, (torch.randn(5, 9), torch.rand(5, 9) > 0.5, torch.randn(45))),
        (
            lambda g: aten.upsample_bilinear2d_backward(g, [13, 17], [2, 3, 6, 8], False),
            (torch.randn(2, 3, 13, 17),),
        ),
        (lambda x: x.sum(), (whole(300_000),)),
        (lambda x: aten.sum.dim_IntList(x, [0]), (whole(40_000, 8),)),
        (lambda x: x.reshape(7, 30).t().reshape(-1) * 2, (torch.randn(10, 21),)),
        (lambda x: aten.flip(x, [0, 1])[1:, ::2] + 1, (torch.randn(10, 21),)),
        (lambda x: torch.cat([x, x * 2], 1).roll(3, 1), (torch.randn(10, 21),)),
        *((KERNELS[name][0], filled(name)) for name in KERNELS if "bfloat16" not in name),
    ]


def test_they_compute_what_eager_pytorch_does() -> None:
    making = generator(NarrowC())
    cases = programs()
    assert all(is_narrow(text_of(function, *args, making=making)) for function, args in cases)
    check(cases, making)


def test_an_index_that_does_not_fit_is_found_out_of_range() -> None:
    """Data is checked before it becomes an index of 32 bits: 2**32 must not be taken for 0."""
    making = generator(NarrowC())
    with pytest.raises(AssertionError, match="the kernel reports an error"):
        check([(aten.embedding, (torch.randn(4, 3), torch.tensor([2**32])))], making)


def test_comparisons_of_indices_stay_narrow() -> None:
    x = torch.empty(6, 20, 30)
    made = text_of(lambda x: aten.constant_pad_nd(x, [1, 2, 3, 4], 0.5), x, making=generator(NarrowC()))
    assert is_narrow(made)
    assert "L" not in made.replace("INFINITY", "")
