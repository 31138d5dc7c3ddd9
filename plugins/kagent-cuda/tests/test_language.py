"""CUDA C++ as it is written: what vectors, half types and constants become, and that it computes what PyTorch does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda.bindings import nvrtc

import kagent_core
from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.loops.items import write_work_items
from kagent_core.codegen.rules import RULES
from kagent_core.testing.compare import assert_same
from kagent_cuda.compiler import _HEADER, OPTIONS
from kagent_cuda.language import CudaLanguage
from tests.codegen_programs import program, source_of

aten = torch.ops.aten
LANGUAGE = CudaLanguage()


def made(function: Callable[..., Any], *args: Any) -> KernelSource:
    generator = ExpressionGenerator(LANGUAGE, write_work_items, generic=GenericKernels(GENERIC, RULES))
    return source_of(program(function, *args), generator)


def ptx(function: Callable[..., Any], *args: Any, architecture: str = "compute_90") -> str:
    """Return the assembly of the kernel that a function becomes, for a virtual architecture."""
    source = LANGUAGE.preamble() + made(function, *args).text
    _, compiled = nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", 1, [_HEADER.encode()], [b"stdint.h"])
    options = [f"--gpu-architecture={architecture}", *(each for each in OPTIONS if "ptxas" not in each)]
    [result] = nvrtc.nvrtcCompileProgram(compiled, len(options), [option.encode() for option in options])
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, nbytes = nvrtc.nvrtcGetPTXSize(compiled)
    text = b" " * nbytes
    nvrtc.nvrtcGetPTX(compiled, text)
    nvrtc.nvrtcDestroyProgram(compiled)
    return text.decode()


# -- what is written


def silu_multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * y


def test_neighbours_are_read_and_written_16_bytes_at_a_time() -> None:
    assembly = ptx(silu_multiply, torch.empty(64, 128), torch.empty(64, 128))
    assert assembly.count("ld.global.nc.v4.f32") == 2
    assert assembly.count("st.global.v4.f32") == 1
    assert not re.search(r"\b(ld|st)\.local", assembly)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((64, 33), lambda x: x[:, :32]),
        ((64, 36), lambda x: x[:, 1:33]),
        ((32, 64), lambda x: x.t()),
        ((64, 64), lambda x: x[:, ::2]),
    ],
    ids=["rows that begin anywhere", "an offset", "turned", "every other"],
)
def test_no_vectors_where_lines_begin_anywhere(
    shape: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return silu_multiply(view(x), y)

    assert "f32x4" not in made(function, torch.empty(shape), torch.empty(64, 32)).text


def test_vectors_of_rows_that_all_begin_alike() -> None:
    text = made(lambda x, y: silu_multiply(x[:, 4:36], y), torch.empty(64, 40), torch.empty(32)).text
    assert text.count("load_lanes(") == 2


def test_half_types_are_converted_by_the_hardware() -> None:
    halves = torch.empty(64, 128, dtype=torch.float16)
    assembly = ptx(silu_multiply, halves, halves, architecture="compute_75")
    assert "cvt.rn.f16.f32" in assembly
    assert "cvt.f32.f16" in assembly
    bfloats = halves.bfloat16()
    assert "cvt.rn.bf16.f32" in ptx(silu_multiply, bfloats, bfloats, architecture="compute_80")
    assert "cvt.rn.bf16.f32" not in ptx(silu_multiply, bfloats, bfloats, architecture="compute_75")


def test_blocks_say_how_many_threads_they_have_and_lanes_ask_each_other() -> None:
    text = made(lambda x: x.softmax(-1), torch.empty(60, 2000)).text
    assert "__launch_bounds__(256)" in text
    assert "__shfl_sync(" in text
    assert "shfl.sync" in ptx(lambda x: x.softmax(-1), torch.empty(60, 2000))


def test_constants_that_nothing_refers_to_are_left_out() -> None:
    text = """void k() {
    const i32 a = 1;
    const i32 b = a;
    for (;;) {
        const i32 c = 2;
        const i32 d = 3, e = d, f = 4;
        use(e);
    }
    {
        const i32 c = 5;
        use(c);
    }
    const f32 asked = __shfl_sync(0xffffffffu, x, 0);
    const f32 copied = call(x, y);
}
"""
    assert (
        LANGUAGE.finished(text)
        == """void k() {
    for (;;) {
        const i32 d = 3, e = d;
        use(e);
    }
    {
        const i32 c = 5;
        use(c);
    }
    const f32 asked = __shfl_sync(0xffffffffu, x, 0);
}
"""
    )


# -- what it computes

EDGES = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 65504.0, 65520.0, 6e-8, 1e-40, 3.3895e38]


def edges(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(EDGES * 3, dtype=torch.float32).to(dtype).view(3, 12)


def conditions(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    place = torch.arange(12)
    return torch.where(x > y, x, y), (x.isnan() | (y < 0)), torch.maximum(x, y) + place, x.clamp(-1, 1)


def whole_numbers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * y - (x & 3), x.to(torch.int8) * 100, (x > y).sum(-1), x.float() / 3, -x, ~y, x.abs()


def functions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.exp(), x.erf(), x.pow(2.5), x.atan2(x + 1), x.sign(), x.floor(), torch.hypot(x, x), x.double().sqrt()


def columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(0), x.amax(0), (x > 0).all(0), x.var(0)


def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(1), x.amin(1), x.softmax(1), (x > 0).any(1)


def begun_anywhere(x: torch.Tensor) -> torch.Tensor:
    return x[1:].view(4, 12) * 2 + x[:48].view(4, 12)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    **{
        f"conditions of {dtype}".replace("torch.", ""): (conditions, (edges(dtype), edges(dtype).flip(1)))
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    },
    "whole numbers": (whole_numbers, (torch.arange(-30, 30).view(5, 12), torch.arange(60).view(5, 12) % 7 - 3)),
    "small whole numbers": (
        whole_numbers,
        (torch.arange(-30, 30).view(5, 12).to(torch.int16), torch.arange(12).to(torch.int16)),
    ),
    "functions": (functions, (torch.linspace(0.1, 5, 36).view(3, 12),)),
    "columns": (columns, (torch.linspace(-3, 5, 40 * 8).sin().view(40, 8),)),
    "rows": (rows, (torch.linspace(-3, 5, 40 * 20).sin().view(40, 20),)),
    "rows in bfloat16": (rows, (torch.linspace(-3, 5, 40 * 20).sin().view(40, 20).bfloat16(),)),
    "a tensor that begins anywhere": (begun_anywhere, (torch.linspace(-1, 1, 49),)),
}


@pytest.mark.parametrize("name", CASES)
def test_vectors_compute_what_pytorch_does(name: str, device: str) -> None:
    function, args = CASES[name]
    compiled = torch.compile(
        function, backend="kagent", options={"device": device, "missing_kernel": "error"}, fullgraph=True
    )
    assert_same(compiled(*args), function(*args), name, every_stride=False)


ATTENTION = {
    "heads of 6": ((2, 10, 10, 6), False, None),
    "heads of 6, causal": ((1, 10, 10, 6), True, None),
    "a sum as mask": ((1, 20, 40, 16), False, "sum"),
    "hidden keys": ((1, 5, 40, 20), False, "hidden"),
    "more queries": ((1, 40, 20, 16), True, None),
    "large heads": ((1, 9, 12, 130), False, None),
    "one of each": ((1, 1, 1, 1), False, None),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_and_its_gradients(name: str, device: str) -> None:
    (heads, queries, keys, size), causal, kind = ATTENTION[name]
    torch.manual_seed(0)
    query = torch.randn(1, heads, queries, size)
    key, value = torch.randn(1, heads, keys, size), torch.randn(1, heads, keys, size)
    mask = None if kind is None else torch.randn(queries, keys)
    if mask is not None and kind == "hidden":
        mask = torch.where(mask > 0, 0, float("-inf"))
    signature = "aten::_scaled_dot_product_flash_attention_for_cpu"
    made, logs = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=mask)
    got = kagent_core.run_op(signature, query, key, value, 0.0, causal, attn_mask=mask, device=device)
    torch.testing.assert_close(got[0], made)
    args = (torch.randn_like(made), query, key, value, made, logs, 0.0, causal)
    want = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, attn_mask=mask)
    got = kagent_core.run_op(f"{signature}_backward", *args, attn_mask=mask, device=device)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
