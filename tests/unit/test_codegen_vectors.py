"""Kernels of work-items with explicit vectors: which values become vectors, what is left over, and the whole texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.indices import Axis, Index, Remainder
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.loops.items import write_work_items
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.vectors import Vectors, neighbours
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.extract.deriver import StandardDeriver
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor

from ..codegen_programs import program, source_of

GOLDEN = Path(__file__).parent / "golden_vectors"
UPDATE = "python -m pytest tests/unit/test_codegen_vectors.py --update-golden"

aten = torch.ops.aten


class OpenClC(WorkItemLanguage):
    """OpenCL C with vectors of 8."""

    vector_width = 8
    vectors_per_item = 4

    def function(self, name: str, dtype: str) -> str:
        return name


class Single(OpenClC):
    """The same without vectors."""

    vector_width = 0


class Short(OpenClC):
    """The same with one vector for each work-item, as where neighbouring items run together."""

    vectors_per_item = 1


def made(function: Callable[..., Any], *args: Any, language: type[OpenClC] = OpenClC) -> KernelSource:
    generic = GenericKernels(GENERIC, RULES)
    return source_of(program(function, *args), ExpressionGenerator(language(), write_work_items, generic=generic))


def text_of(function: Callable[..., Any], *args: Any, language: type[OpenClC] = OpenClC) -> str:
    return made(function, *args, language=language).text


# -- whole texts

KERNELS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gelu": (aten.gelu, ((1003,),)),
    "softmax": (lambda x: aten._softmax(x, -1, False), ((60, 200),)),
    "layer_norm": (lambda x, w, b: aten.native_layer_norm(x, [203], w, b, 1e-5)[0], ((60, 203), (203,), (203,))),
    "column_sum": (lambda x: x.sum(0), ((250, 70),)),
    "mm_bias_gelu": (lambda x, y, b: aten.gelu(torch.mm(x, y) + b), ((70, 40), (40, 50), (50,))),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_as_it_was_reviewed(name: str, request: pytest.FixtureRequest) -> None:
    function, shapes = KERNELS[name]
    text = text_of(function, *map(torch.empty, shapes))
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


# -- what becomes a vector


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8]
)
def test_elements_of_every_type_are_vectors(dtype: torch.dtype) -> None:
    text = text_of(lambda x, y: x + y, torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype))
    assert "vstore8(" in text
    assert "for (i64 i0 = i0_first; i0 + 8 <= i0_end; i0 += 8)" in text


def test_what_does_not_depend_on_the_lane_is_read_once() -> None:
    text = text_of(lambda x, y: x + y[:, None], torch.empty(40, 64), torch.empty(40))
    vectors, single = re.findall(r"vload8\(0, (x\d)", text), re.findall(r"= (x\d)\[i0\]", text)
    assert len(vectors) == len(single) == 1
    assert vectors != single
    assert text.index(f"{single[0]}[i0]") < text.index("for (i64 i1")


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x.t() + y, ((70, 100), (100, 70))),
        (lambda x: x[:, ::2] + 1, ((40, 128),)),
        (lambda x: x.flip(1) * 2, ((40, 64),)),
        (lambda x: aten.constant_pad_nd(x, [1, 2], 0.5), ((6, 30),)),
        (lambda x: x + 1, ((7,),)),
    ],
    ids=["transposed", "strided", "reversed", "a condition per lane", "too few"],
)
def test_other_reads_stay_single(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    given = [torch.empty(shape) for shape in shapes]
    assert "x8" not in text_of(function, *given)
    assert text_of(function, *given, language=Short) == text_of(function, *given, language=Single)


def test_a_processor_loops_over_pieces_of_lines_that_are_no_vectors() -> None:
    found = made(lambda x: x[:, ::2] + 1, torch.empty(40, 201))
    assert "i1_first = i1_piece * 32, i1_end = i1_first + 32 < n" in found.text
    assert "for (i64 i1 = i1_first; i1 < i1_end; i1++) {" in found.text
    assert found.items == 40 * 4


def test_items_follow_each_other_the_way_that_is_read() -> None:
    """Short pieces of rows, one below the other: what they read are neighbours."""
    found = made(lambda x, y: x.t() + y, torch.empty(100, 70), torch.empty(70, 100))
    head = found.text[: found.text.index("for (i64 i0 =")]
    assert re.search(r"const i64 i1 = \(i64\)\(item % n\d\);", head)
    assert "i0_piece * 8" in found.text
    assert found.items == 100 * 9


def test_divisions_that_may_fail_stay_single() -> None:
    given = torch.empty(100, dtype=torch.int64)
    assert "x8" not in text_of(lambda x, y: x // y, given, given)
    assert "x8" in text_of(lambda x, y: x * y, given, given)


def test_order_of_booleans_stays_single() -> None:
    given = torch.empty(100, dtype=torch.bool)
    assert "x8" not in text_of(lambda x, y: x < y, given, given)
    assert "x8" in text_of(lambda x, y: x & y, given, given)
    assert "x8" not in text_of(lambda x: x.amax(0), torch.empty(100, 64, dtype=torch.bool))


def test_masks_have_the_width_of_what_they_choose() -> None:
    x, d = torch.empty(64), torch.empty(64, dtype=torch.float64)
    text = text_of(lambda x, d: torch.where(x > 0, d, -d), x, d)
    assert re.search(r"select\(.*, convert_long8\(gt\)\)", text)
    text = text_of(lambda x, d: torch.where(d > 0, x, -x), x, d)
    assert re.search(r"i32x8 gt = convert_int8\(.* > .*\)", text)


def test_places_are_counted_along_the_lane() -> None:
    text = text_of(lambda x: torch.tril(x), torch.empty(40, 64))
    assert "(i64x8)(0, 1, 2, 3, 4, 5, 6, 7)" in text


def test_looked_up_rows_are_vectors() -> None:
    text = text_of(aten.embedding, torch.empty(500, 48), torch.empty(6, 20, dtype=torch.int64))
    assert "vload8(0, x" in text
    assert text.count("*report") == 2  # the parameter, and one check for each row


# -- what is left over


def test_a_length_that_vectors_fill_has_no_rest() -> None:
    assert "vload8" in text_of(aten.gelu, torch.empty(1024))
    assert "x0[i0]" not in text_of(aten.gelu, torch.empty(1024))
    assert "?" not in text_of(aten.gelu, torch.empty(1024))
    assert "x0[i0]" in text_of(aten.gelu, torch.empty(1025))


def test_items_are_pieces_of_vectors() -> None:
    assert made(aten.gelu, torch.empty(1024)).items == 1024 // 32
    assert made(aten.gelu, torch.empty(1025)).items == 1024 // 32 + 1
    assert made(aten.gelu, torch.empty(1025), language=Single).items == 1025
    assert made(lambda x: x.sum(1), torch.empty(30, 1000)).items == 30
    assert made(lambda x: x.sum(0), torch.empty(1000, 70)).items == 8
    assert made(lambda x: x.sum(0), torch.empty(1000, 70), language=Single).items == 70


def test_texts_are_the_same_for_other_lengths() -> None:
    assert text_of(aten.gelu, torch.empty(1003)) == text_of(aten.gelu, torch.empty(2005))


# -- reductions


def test_sums_of_long_rows_go_on_in_float64() -> None:
    short = text_of(lambda x: x.sum(1), torch.empty(30, 256))
    assert "f64" not in short
    assert "sum_lanes_f32(sum_so_far_lanes)" in short
    long = text_of(lambda x: x.sum(1), torch.empty(30, 264))
    assert "r0_0 += 256" in long  # 32 elements in every lane
    assert "f64 sum_so_far = 0;" in long
    assert "sum_so_far += sum_lanes_f32(sum_so_far_lanes_chunk);" in long


def test_single_values_of_rows_are_summed_up_in_short_chunks() -> None:
    assert "r0_0 += 32" in text_of(lambda x: x.sum(1), torch.empty(30, 264), language=Single)


def test_nan_is_looked_for_in_every_lane() -> None:
    text = text_of(lambda x: x.amax(1), torch.empty(30, 64))
    assert "amax_so_far_lanes_nan |= " in text or "max_so_far_lanes_nan |= " in text
    assert "or_lanes_i32(max_so_far_lanes_nan)" in text


def test_reductions_across_memory_have_a_row_in_every_lane() -> None:
    text = text_of(lambda x: x.sum(0), torch.empty(250, 64))
    assert "f64x8 sum_so_far" in text
    assert "_lanes_" not in text
    assert "left" not in text
    assert "left" in text_of(lambda x: x.sum(0), torch.empty(250, 65))


# -- parametrised kernels


def test_products_and_what_follows_them_are_vectors() -> None:
    x, y = torch.empty(70, 40), torch.empty(40, 64)
    text = text_of(lambda x, y: aten.gelu(torch.mm(x, y)), x, y)
    assert "mad_f32x8(" in text
    assert "const f32x8 gelu" in text
    assert "mad_f32(" not in text


def test_an_epilogue_that_reads_across_stays_single() -> None:
    x, y, z = torch.empty(70, 40), torch.empty(40, 64), torch.empty(64, 70)
    text = text_of(lambda x, y, z: torch.mm(x, y) + z.t(), x, y, z)
    assert "mad_f32x8(" in text
    assert "const f32 made" in text
    assert "const f32x8 made" not in text


def test_products_of_integers_stay_single() -> None:
    given = torch.empty(64, 64, dtype=torch.int64)
    assert "x8" not in text_of(torch.mm, given, given)


# -- spelling


def test_functions_that_are_computed_lane_by_lane() -> None:
    class Careful(Vectors):
        by_lane = ("sin",)

    class Language(OpenClC):
        vector_spelling = Careful

    text = text_of(lambda x: x.sin() + x.cos(), torch.empty(64), language=Language)
    assert "sin_by_lane_f32x8(" in text
    assert "cos(" in text
    assert "{ return (f32x8)(sin(x.s0), sin(x.s1)," in Language().preamble()


def test_a_language_without_vectors_has_no_types_for_them() -> None:
    assert "f32x" not in Single().preamble()
    assert "typedef float8 f32x8;" in OpenClC().preamble()


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_lanes_are_put_together_halves_with_halves(width: int) -> None:
    class Language(OpenClC):
        vector_width = width

    [line] = [line for line in Language().preamble().splitlines() if f" sum_lanes_f32(f32x{width} x)" in line]
    assert line.count(".lo + ") == width.bit_length() - 1


def test_how_far_an_index_goes_per_lane() -> None:
    lane, other = Axis("i1", 64), Axis("i0", 4)
    assert neighbours(Index.of(other) * 64 + Index.of(lane), lane) == 1
    assert neighbours(Index.of(lane) * 3, lane) == 3
    assert neighbours(Index.of(other), lane) == 0
    assert neighbours(Index.of(Remainder(Index.of(lane), 5)), lane) is None


# -- launches


@pytest.mark.parametrize(
    ("items", "least", "grid", "block"),
    [(128, 1, 64, 2), (40, 1, 40, 1), (128, 32, 4, 32), (10**6, 1, 3907, 256), (10, 32, 1, 10)],
)
def test_few_items_are_spread_over_blocks(items: int, least: int, grid: int, block: int) -> None:
    info = DeviceInfo(Device("toy", 0), "Toy", max_threads_per_block=1024)
    config = StandardDeriver(least).derive([], KernelDescriptor("aten::mm", "mm", "x", items=items), info)
    assert config is not None
    assert (config.grid[0], config.block[0]) == (grid, block)


# -- a device without float64


def test_a_language_without_a_type_has_it_nowhere() -> None:
    whole = OpenClC()
    without = whole.without({"float64": "toy:0 has no float64"})
    assert "f64" in whole.preamble()
    assert "two_sum" not in whole.preamble()
    assert "f64" not in without.preamble()
    assert "double" not in without.preamble()
    assert "two_sum_f32x8" in without.preamble()
    assert whole.wide == "float64" != without.wide
    assert not whole.lacks


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.double(), "toy:0 has no float64"),
        (torch.erfinv, "aten::erfinv computes in float64 inside, and toy:0 has no float64"),
        (lambda x: x.sum(-1), None),
        (lambda x: x.sum(0), None),
        (lambda x: torch.var_mean(x, -1)[0], None),
        (lambda x: x.cumsum(0), None),
        (lambda x: x @ x.t(), None),
    ],
)
def test_kernels_of_a_device_without_a_type(function: Callable[..., Any], reason: str | None) -> None:
    language = OpenClC().without({"float64": "toy:0 has no float64"})
    generator = ExpressionGenerator(language, write_work_items, generic=GenericKernels(GENERIC, RULES))
    calls = program(function, torch.randn(3, 5000)).calls
    refused = [generator.can_generate([call]) for call in calls]
    assert [told for told in refused if told is not None] == ([] if reason is None else [reason])
    for call in calls if reason is None else ():
        made = generator.source([call], {spec.buffer for spec in call.outputs})
        assert "f64" not in made.text
