"""Kernels whose blocks' threads share rows: which rows they share, how values are put together, and the whole texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.groups import SubGroups, WorkGroups
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.loops.items import write_work_items
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.extract.deriver import StandardDeriver
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor

from ..codegen_programs import program, source_of

GOLDEN = Path(__file__).parent / "golden_groups"
UPDATE = "python -m pytest tests/unit/test_codegen_groups.py --update-golden"

aten = torch.ops.aten

WARPS = SubGroups(32, "32", "(threadIdx.x % 32)", "__shfl_sync(0xffffffffu, {value}, {lane})")
BY_FUNCTION = SubGroups(reduces={"add": "sub_group_reduce_add({value})", "max": "sub_group_reduce_max({value})"})
NONE = WorkGroups(threads=64)


def made(
    function: Callable[..., Any], *args: Any, groups: WorkGroups | None = NONE, vector_width: int = 0
) -> KernelSource:
    language = WorkItemLanguage()
    language.groups = groups
    language.vector_width = vector_width
    language.narrow_indices = True
    generic = GenericKernels(GENERIC, RULES)
    return source_of(program(function, *args), ExpressionGenerator(language, write_work_items, generic=generic))


def text_of(function: Callable[..., Any], *args: Any, groups: WorkGroups | None = NONE) -> str:
    return made(function, *args, groups=groups).text


# -- whole texts


def softmax(x: torch.Tensor) -> Any:
    return aten._softmax(x, -1, False)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return aten.native_layer_norm(x, list(weight.shape), weight, bias, 1e-5)[0]


def column_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    return tuple(aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True))


KERNELS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], WorkGroups]] = {
    "softmax": (softmax, ((60, 2000),), NONE),
    "layer_norm_with_warps": (layer_norm, ((4096, 384), (384,), (384,)), WorkGroups(threads=128, sub_groups=WARPS)),
    "argmax_with_warps": (lambda x: x.argmax(-1), ((60, 5000),), WorkGroups(threads=64, sub_groups=WARPS)),
    "column_sum": (column_sum, ((2500, 70),), NONE),
    "mm_bias_relu": (lambda x, y, bias: torch.relu(torch.mm(x, y) + bias), ((70, 40), (40, 50), (50,)), NONE),
    "attention": (attention, ((2, 3, 40, 64), (2, 3, 50, 64), (2, 3, 50, 64)), NONE),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_as_it_was_reviewed(name: str, request: pytest.FixtureRequest) -> None:
    function, shapes, groups = KERNELS[name]
    text = text_of(function, *map(torch.empty, shapes), groups=groups)
    path = GOLDEN / f"{name}.cl"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    reviewed = path.read_bytes().decode() if path.exists() else ""
    if text != reviewed:
        lines = difflib.unified_diff(reviewed.splitlines(True), text.splitlines(True), path.name, "generated")
        pytest.fail(f"{''.join(lines)}\nIf that is what it should be, review it and update the files:\n    {UPDATE}")


def test_every_file_is_that_of_a_kernel() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.cl" for name in KERNELS}


# -- which rows are shared


def test_without_groups_every_work_item_has_its_own_rows() -> None:
    source = made(softmax, torch.empty(60, 2000), groups=None)
    assert "barrier" not in source.text
    assert (source.items, source.threads) == (60, None)


@pytest.mark.parametrize(
    ("shape", "groups", "items"),
    [
        ((60, 2000), NONE, 60),
        ((1 << 16, 2000), NONE, 1 << 16),
        ((1 << 16, 100), NONE, 1 << 15),
        ((1 << 16, 100), WorkGroups(threads=256), 1 << 13),
        ((10_001, 100), WorkGroups(threads=256), 1251),
        ((6, 100), WorkGroups(threads=256), 3),
        ((100,), WorkGroups(threads=256), 1),
    ],
)
def test_blocks_have_as_many_rows_as_fill_them(shape: tuple[int, ...], groups: WorkGroups, items: int) -> None:
    source = made(softmax, torch.empty(shape), groups=groups)
    assert (source.items, source.threads) == (items, groups.threads)


@pytest.mark.parametrize("shape", [(60, 31), (3, 4, 5), (60, 1)])
def test_short_rows_are_not_shared(shape: tuple[int, ...]) -> None:
    assert made(lambda x: x.sum(-1), torch.empty(shape)).threads is None


def test_columns_are_shared_where_they_are_few() -> None:
    assert made(column_sum, torch.empty(2500, 70)).threads == 64
    assert made(column_sum, torch.empty(2500, 1 << 16)).threads is None
    assert made(column_sum, torch.empty(31, 70)).threads is None


def test_what_reduces_nothing_is_not_shared() -> None:
    assert made(lambda x: x * 2, torch.empty(60, 2000)).threads is None


def test_neighbouring_columns_are_neighbouring_threads() -> None:
    text = text_of(column_sum, torch.empty(2500, 70))
    assert "const i32 slot = thread % 8;" in text
    assert "const i32 part = thread / 8;" in text
    assert "const i32 i0_here = i0_block * 8 + slot;" in text


def test_loops_over_several_axes_are_shared_as_one() -> None:
    text = text_of(lambda x: x.sum((0, 2)), torch.empty(16, 5, 49))
    assert re.search(r"for \(i32 step = part; step < n\d \* n\d; step \+= 64\) \{\s+const i32 r1 = step % n\d;", text)


# -- how values are put together


def test_every_barrier_is_reached_by_all_threads() -> None:
    """Barriers stand in loops that all threads go through alike: over rows, and over the distances of a tree."""
    for function in (softmax, lambda x: x.argmax(-1), lambda x: x.var(-1), column_sum):
        depth: list[str] = []
        for line in text_of(function, torch.empty(2500, 5000)).splitlines():
            if line.strip().startswith("}"):
                depth.pop()
            if "barrier(" in line:
                assert all("item" in head or "distance" in head for head in depth[1:]), depth
            if line.rstrip().endswith("{"):
                depth.append(line)


def test_rows_are_taken_in_vectors_where_the_language_has_any() -> None:
    text = made(softmax, torch.empty(60, 2000), vector_width=4).text
    assert text.count("vload4(") == 3
    assert text.count("vstore4(") == 1
    assert "r0 = part * 4; r0 < n1; r0 += 256" in text
    assert "max_lanes_f32(" in text
    assert "sum_lanes_f32(" in text


def test_what_a_thread_keeps_of_its_row_are_vectors() -> None:
    text = made(softmax, torch.empty(60, 1000), vector_width=4).text
    assert text.count("vload4(") == 1
    assert "f32x4 kept[4];" in text
    assert "if (r0 < n1) {" in text  # of 250 vectors, not every thread has 4


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (softmax, (60, 2001)),
        (softmax, (60, 124)),
        (column_sum, (2500, 72)),
        (lambda x: x.argmax(-1), (60, 5000)),
        (lambda x: x[:, ::2].softmax(-1), (60, 2000)),
    ],
    ids=["no whole number", "fewer than half of the threads", "columns", "a compound reduction", "every other"],
)
def test_no_vectors_where_a_row_is_none_of_them(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    source = made(function, torch.empty(shape), vector_width=4)
    assert source.threads is not None
    assert "vload4(" not in source.text


def test_rows_that_fit_a_warp_need_no_memory() -> None:
    groups = WorkGroups(threads=128, sub_groups=WARPS)
    text = text_of(softmax, torch.empty(1 << 16, 100), groups=groups)
    assert "__shfl_sync" in text
    assert "__local" not in text.replace("__local_", "")
    assert "barrier" not in text


def test_functions_of_sub_groups_are_used_where_they_keep_nan() -> None:
    groups = WorkGroups(threads=64, sub_groups=BY_FUNCTION)
    total = text_of(lambda x: x.sum(-1), torch.empty(60, 2000), groups=groups)
    assert "sub_group_reduce_add(" in total
    assert "distance" not in total
    for dtype, is_used in ((torch.float32, False), (torch.int32, True), (torch.int16, False)):
        greatest = text_of(lambda x: x.amax(-1), torch.empty(60, 2000, dtype=dtype), groups=groups)
        assert ("sub_group_reduce_max(" in greatest) == is_used, dtype


def test_narrow_values_are_shuffled_as_32_bits() -> None:
    groups = WorkGroups(threads=64, sub_groups=WARPS)
    text = text_of(lambda x: x.amax(-1), torch.empty(60, 2000, dtype=torch.int8), groups=groups)
    assert "const i8 other_0 = (i8)__shfl_sync(0xffffffffu, (i32)(max_so_far), " in text


def test_a_block_with_too_little_memory_does_not_share() -> None:
    assert made(softmax, torch.empty(60, 2000), groups=replace(NONE, local_nbytes=255)).threads is None
    assert made(softmax, torch.empty(60, 2000), groups=replace(NONE, local_nbytes=256)).threads == 64


def test_indices_that_need_64_bits_have_them() -> None:
    def length_of(numel: int) -> str:
        return text_of(lambda x: x.sum(-1), torch.empty(1).expand(2, numel))

    assert "for (i32 r0 = " in length_of(1 << 30)
    assert "for (i64 r0 = " in length_of(1 << 31)
    assert "for (i64 r0 = " in length_of((1 << 31) - 5)  # beyond which the last step leads


# -- what is kept


@pytest.mark.parametrize(("length", "reads"), [(33, 1), (1000, 1), (1024, 1), (1025, 3)])
def test_rows_of_few_elements_per_thread_are_read_once(length: int, reads: int) -> None:
    text = text_of(softmax, torch.empty(5000, length))
    assert len(re.findall(r"x0\[", text)) == reads
    assert text.count("expf(") == (1 if reads == 1 else 2)


def test_steps_that_every_thread_has_are_under_no_condition() -> None:
    assert "if (r0 < " in text_of(softmax, torch.empty(60, 1000))
    assert "if (r0 < " not in text_of(softmax, torch.empty(60, 960))


def test_what_one_pass_needs_is_not_kept() -> None:
    assert "kept" not in text_of(lambda x: x.exp().sum(-1), torch.empty(60, 1000))
    weighted = text_of(lambda x, w: (x * w).softmax(-1) * w, torch.empty(60, 960), torch.empty(960))
    assert len(re.findall(r"kept\w*\[turn\] = ", weighted)) == 3  # of both tensors, and the exponentials


def test_what_is_costly_is_computed_once() -> None:
    def normed(x: torch.Tensor, y: torch.Tensor) -> Any:
        return aten.native_layer_norm(aten.gelu(x) + y, [960], None, None, 1e-5)[0]

    for dtype in (torch.float32, torch.bfloat16):
        text = text_of(normed, torch.empty(60, 960, dtype=dtype), torch.empty(60, 960, dtype=dtype))
        assert text.count("erff(") == 1
        assert len(re.findall(r"kept\w*\[turn\] = ", text)) == 1


# -- launching


def test_every_block_has_the_threads_that_a_kernel_is_written_for() -> None:
    source = made(softmax, torch.empty(60, 2000))
    kernel = KernelDescriptor("aten::_softmax", "softmax", "", items=source.items, threads=source.threads)
    for info in (DeviceInfo(Device("toy", 0), ""), DeviceInfo(Device("toy", 0), "", max_grid=(7, 1, 1))):
        config = StandardDeriver().derive((), kernel, info)
        assert config is not None
        assert (config.grid, config.block) == ((min(60, info.max_grid[0]), 1, 1), (64, 1, 1))
