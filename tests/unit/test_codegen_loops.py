"""Loops of generated kernels: what their text looks like, and what fused ones compute."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kagent_core.codegen.indices import Axis
from kagent_core.codegen.loops.reductions import chunked

from ..codegen_programs import check, refusal, text_of

aten = torch.ops.aten


def rows(function: Callable[..., Any], *shape: int) -> str:
    return text_of(function, torch.empty(shape))


def last_sum(x: torch.Tensor) -> Any:
    return aten.sum.dim_IntList(x, [-1])


def first_sum(x: torch.Tensor) -> Any:
    return aten.sum.dim_IntList(x, [0])


def test_short_rows_are_summed_up_in_their_own_type() -> None:
    text = rows(last_sum, 100, 512)
    assert "f32 sum_so_far = 0;" in text
    assert "f64" not in text


def test_long_rows_are_summed_up_in_chunks_and_the_chunks_in_float64() -> None:
    text = rows(last_sum, 100, 4096)
    assert "f64 sum_so_far = 0;" in text
    assert "f32 sum_so_far_chunk = 0;" in text
    assert "0.0f" not in text
    # the length is a multiple of the chunk's: no chunk needs a shorter end
    assert "?" not in text
    assert "?" in rows(last_sum, 100, 4099)


def test_float64_needs_no_chunks() -> None:
    assert "chunk" not in text_of(last_sum, torch.empty(100, 4096, dtype=torch.float64))


@pytest.mark.parametrize(
    ("extents", "chunk", "cut"),
    [((32,), 32, None), ((33,), 32, (0, 32)), ((4, 9), 32, (0, 3)), ((4, 40), 32, (1, 32)), ((5, 4, 8), 32, (0, 1))],
)
def test_the_loop_that_is_cut_into_chunks(extents: tuple[int, ...], chunk: int, cut: tuple[int, int] | None) -> None:
    assert chunked([Axis(f"r{n}", extent) for n, extent in enumerate(extents)], chunk) == cut


def test_threads_share_few_long_rows() -> None:
    shared = rows(last_sum, 2, 1 << 20)
    assert "for (i64 part = 0; part < 64; part++)" in shared
    assert shared.index("for (i64 i0") < shared.index("#pragma omp parallel for")
    many = rows(last_sum, 500, 1 << 20)
    assert "part++" not in many
    assert many.index("#pragma omp parallel for") < many.index("for (i64 i0")


def test_reductions_across_memory_take_neighbouring_columns_at_once() -> None:
    text = rows(first_sum, 500, 1000)
    assert "[128]" in text
    assert re.search(r"#pragma omp simd\n *for \(i64 i0", text)
    # no more lanes than columns, in whole vectors
    assert "[16]" in rows(first_sum, 500, 9)
    assert "[32]" in rows(first_sum, 500, 17)


def test_what_depends_on_the_column_is_computed_once_per_column() -> None:
    text = rows(lambda x: aten.native_group_norm(x.permute(1, 0)[None], None, None, 1, 8, 300, 8, 1e-5)[0], 300, 8)
    assert text.count("sqrtf(") == 1
    assert text.index("sqrtf(") < text.rindex("for (i64 r")


def test_costly_values_are_kept_from_pass_to_pass() -> None:
    assert rows(lambda x: aten._softmax(x, -1, False), 100, 512).count("exp_f32(x") == 1
    assert rows(lambda x: aten._softmax(x, -1, False), 100, 100_000).count("exp_f32(x") == 2


def test_a_half_type_is_rounded_once_when_it_is_stored() -> None:
    text = text_of(lambda x: aten._softmax(x, -1, False), torch.empty(100, 512, dtype=torch.bfloat16))
    assert "store_bf16(" in text
    assert "round_bf16(" not in text


def test_text_is_the_same_for_more_rows() -> None:
    assert rows(last_sum, 100, 200) == rows(last_sum, 300, 200)


def test_a_reduction_at_every_step_of_another_is_refused() -> None:
    def crossed(x: torch.Tensor) -> Any:
        return last_sum(x).unsqueeze(1) + first_sum(x).unsqueeze(0)

    refused = refusal(crossed, torch.empty(6, 6))
    assert refused is not None
    assert "at every step" in refused


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * aten.rsqrt(aten.mean.dim(aten.mul(x, x), [-1], True) + 1e-6) * w


def residual(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = x + r
    return both, aten.native_layer_norm(both, [50], w, w, 1e-5)[0] + r


def centered(x: torch.Tensor) -> torch.Tensor:
    spread = aten.var.correction(x, [1], correction=0, keepdim=True)
    return (x - aten.mean.dim(x, [1], True)) * aten.rsqrt(spread + 1e-5)


def sums_and_more(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = aten.sum.dim_IntList(x, [1])
    return found, x * found.unsqueeze(1), found * 2


def group_norm_silu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = aten.native_group_norm(x, w, w, 2, 8, 16, 2, 1e-5)[0]
    return y * aten.sigmoid(y)


def batch_norm_relu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return aten.relu(aten._native_batch_norm_legit_functional(x, w, w, w, w, True, 0.1, 1e-5)[0] + x)


def test_fused_rows() -> None:
    torch.manual_seed(0)
    x, r, w = torch.randn(6, 50), torch.randn(6, 50), torch.randn(50)
    mask = torch.rand(6, 50) < 0.3
    image = torch.randn(4, 8, 6, 6)
    check(
        [
            (rms_norm, (x, w)),
            (rms_norm, (x.bfloat16(), w.bfloat16())),
            (residual, (x, r, w)),
            (centered, (x,)),
            (sums_and_more, (x,)),
            (group_norm_silu, (torch.randn(2, 8, 4, 4), torch.randn(8))),
            (batch_norm_relu, (image, torch.rand(8))),
            (batch_norm_relu, (image.to(memory_format=torch.channels_last), torch.rand(8))),
            (lambda x, m: aten._softmax(x * 0.125 + m * -1e9, -1, False), (x, mask)),
            (lambda x, r: aten.relu(aten._softmax(x + r, 0, False) * 2), (x, r)),
            (lambda x, r: (last_sum(x), aten.amax(x + r, [1]), aten.mean.dim(x * r, [1], True)), (x, r)),
            (lambda x: last_sum(aten._softmax(x, -1, False) * x), (x,)),
            (lambda x: aten.argmax(aten._softmax(x, -1, False), -1), (x,)),
            (lambda x: x - aten.amax(x, [0], True), (x,)),
            (lambda x: x / aten.linalg_vector_norm(x, 2, [0], True), (x,)),
            (lambda x: last_sum(aten.relu(x).view(6, 5, 10)), (x,)),
            (lambda x: aten._softmax(x[:, None, :] + x[None, :, :], -1, False), (x,)),
            (lambda x: last_sum(x[:, None, :] * x[None, :, :]), (x,)),
            (lambda x, r: aten.mean((x - r) * (x - r)), (torch.randn(3, 100_000), torch.randn(3, 100_000))),
            (lambda x: aten._softmax(x * 2, -1, False) + x, (torch.randn(2, 100_000),)),
        ]
    )


def a_layout(draw: random.Random) -> torch.Tensor:
    """Return a tensor of up to four dimensions that are in any order in memory, with gaps or without."""
    shape = [draw.choice((1, 2, 3, 5, 19, 33)) for _ in range(draw.randint(1, 4))]
    order = draw.sample(range(len(shape)), len(shape))
    whole = torch.randn([shape[dim] * draw.choice((1, 1, 2)) for dim in order])
    cut = whole[tuple(slice(whole.shape[n] - shape[dim], None) for n, dim in enumerate(order))]
    return cut.permute([order.index(dim) for dim in range(len(shape))])


@pytest.mark.parametrize("seed", range(3))
def test_any_layout_and_any_dimensions(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    cases: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for _ in range(25):
        x = a_layout(draw)
        dims = sorted(draw.sample(range(x.dim()), draw.randint(1, x.dim())))
        reduced = draw.choice(
            [
                lambda x, d=dims: aten.sum.dim_IntList(aten.relu(x), d, True),
                lambda x, d=dims: aten.amax(x * 2, d, True),
                lambda x, d=dims: aten.var.correction(x, d, correction=0, keepdim=True),
                lambda x, d=dims: aten.argmin(x, d[0], True),
                lambda x, d=dims: aten.max.dim(x, d[-1], True)[0],
            ]
        )
        after = draw.choice([lambda x, r: r, lambda x, r: x * r, lambda x, r: (r, x - r), lambda x, r: r + 1])
        cases.append((lambda x, f=reduced, g=after: g(x, f(x)), (x,)))
    check(cases)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return aten.native_layer_norm(x, list(weight.shape), weight, bias, 1e-5)


def plain_norm(x: torch.Tensor) -> Any:
    return aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5)


def test_short_rows_go_through_each_pass_in_blocks() -> None:
    def loops(text: str) -> list[str]:
        return re.findall(r"for \(i64 (\w+) = (\w+); [^;]*; (?:\w+\+\+|\w+ \+= \w+)\)", text)

    text = text_of(norm, torch.empty(1000, 48), torch.empty(48), torch.empty(48))
    assert [name for name, _ in loops(text)] == ["i0_0", "i0", "r0", "i0", "r0", "i0", "r0"]
    assert "i0_0 += 16" in text
    few = text_of(norm, torch.empty(100, 48), torch.empty(48), torch.empty(48))
    assert "i0_0 += 4" in few
    for shape in ((3, 48), (1000, 513)):
        assert "i0_0" not in text_of(plain_norm, torch.empty(shape))
    softmax = text_of(lambda x: aten._softmax(x, -1, False), torch.empty(1000, 48))
    assert "i0_0" not in softmax  # what is kept of a row is kept of one row only


def test_the_length_of_rows_is_a_number_where_it_is_the_models_own() -> None:
    assert "r0 < 48;" in text_of(norm, torch.empty(1000, 48), torch.empty(48), torch.empty(48))
    assert "r0 < n1;" in text_of(plain_norm, torch.empty(1000, 48))
    narrow = text_of(norm, torch.empty(1000, 40), torch.empty(40), torch.empty(40))
    assert narrow.count("simdlen(8)") == 3


def test_blocks_of_rows_give_what_pytorch_gives() -> None:
    torch.manual_seed(0)
    cases: list[Any] = []
    for rows_, columns in ((4, 5), (5, 8), (17, 40), (255, 48), (257, 24), (259, 512), (1000, 1), (1000, 7)):
        x = torch.randn(rows_, columns)
        x[0, 0] = x[-1, -1] = float("nan")
        cases += [(norm, (x, torch.randn(columns), torch.randn(columns))), (plain_norm, (x,))]
    image = torch.randn(3, 40, 7, 9)
    cases += [
        (norm, (image.permute(0, 2, 3, 1), torch.randn(40), torch.randn(40))),
        (norm, (image, torch.randn(7, 9), torch.randn(7, 9))),
        (lambda x, y: plain_norm(aten.add.Tensor(x, y)), (image.permute(2, 0, 3, 1), torch.randn(3, 1, 40))),
        (lambda x, i: plain_norm(aten.index_select(x, 0, i)), (torch.randn(9, 24), torch.randint(0, 9, (300,)))),
        (lambda x: plain_norm(x), (torch.randn(300, 16).half(),)),
        (lambda x: plain_norm(x), (torch.randn(300, 16).double(),)),
        (lambda x: (x - aten.amax(x, [-1], True), aten.amin(x, [-1])), (image,)),
    ]
    check(cases)
