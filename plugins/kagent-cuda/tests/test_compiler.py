"""NVRTC compiles without a GPU, for every architecture that is wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kagent_core.errors import CompilationError
from kagent_cuda import compiler
from kagent_cuda.compiler import NvrtcCompiler, supported_architectures
from kagent_cuda.language import CudaLanguage

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

REVERSE = """
extern "C" __global__ void __launch_bounds__(256) reverse(const f32 *__restrict__ x, f32 *__restrict__ out) {
    __shared__ f32 tile[256] __attribute__((aligned(16)));
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[255 - threadIdx.x] + store_bf16(load_f16(1)) + INFINITY + NAN;
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_kernels_use(architecture: str, tmp_path: Path) -> None:
    compiled = NvrtcCompiler(architecture, tmp_path).compile(CudaLanguage().preamble() + REVERSE, "reverse")
    assert compiled.binary.startswith(b"\x7fELF")
    assert compiled.symbol == "reverse"
    usage = compiled.usage["reverse"]
    assert usage.shared_nbytes == 1024
    assert 4 <= usage.registers <= 64
    assert usage.spilled_nbytes == 0


def test_fixed_width_types_and_infinity(tmp_path: Path) -> None:
    source = """#include <stdint.h>
    __global__ void k(int64_t *x, uint8_t y, float *z) {
        static_assert(sizeof(int64_t) == 8 && sizeof(uint32_t) == 4 && sizeof(int16_t) == 2, "sizes");
        x[0] = y; z[0] = INFINITY + NAN;
    }"""
    assert NvrtcCompiler("sm_90", tmp_path).compile(source, "k").binary


def test_local_memory_is_told(tmp_path: Path) -> None:
    source = """
    extern "C" __global__ void k(float *x, int n) {
        float own[128];
        for (int i = 0; i < 128; i++) own[i] = x[i];
        x[0] = own[n];
    }
    """
    usage = NvrtcCompiler("sm_90", tmp_path).compile(source, "k").usage["k"]
    assert usage.stack_nbytes == 512


def test_products_and_sums_are_not_contracted(tmp_path: Path) -> None:
    # the binary of a contracted sum is that of fmaf
    body = 'extern "C" __global__ void k(float *x) { x[0] = %s; }'
    compiled = NvrtcCompiler("sm_90", tmp_path)
    plain = compiled.compile(body % "x[1] * x[2] + x[3]", "k").binary
    fused = compiled.compile(body % "fmaf(x[1], x[2], x[3])", "k").binary
    assert plain != fused


def test_names_without_extern_c(tmp_path: Path) -> None:
    source = "template <int N> __global__ void k(int *x) { x[0] = N; }\n__global__ void one(int *x) { x[0] = 1; }"
    made = NvrtcCompiler("sm_80", tmp_path)
    for name in ("k<3>", "one"):
        compiled = made.compile(source, name)
        assert compiled.symbol.startswith("_Z")
        assert compiled.symbol in compiled.usage


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("x[0] = y;", r'error: identifier "y" is undefined'),
        ("int unused;", r'warning #177-D: variable "unused" was declared but never referenced'),
        ("} __global__ void other(int *x) {", 'identifier "k" is undefined'),
    ],
)
def test_what_it_refuses(body: str, told: str, tmp_path: Path) -> None:
    name = "other" if "other" not in body else "k"
    source = f"__global__ void {name if name == 'other' else 'first'}(int *x) {{ {body} }}"
    with pytest.raises(CompilationError, match=told):
        NvrtcCompiler("sm_90", tmp_path).compile(source, name)


def test_architectures() -> None:
    assert set(ARCHITECTURES) <= set(supported_architectures())


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    program = f"""
import json
from pathlib import Path
from kagent_cuda import compiler
made = []
before = compiler._compiled
compiler._compiled = lambda *args: made.append(1) or before(*args)
found = [compiler.NvrtcCompiler(a, Path({str(tmp_path)!r})).compile({REVERSE.replace("f32", "float")!r}
         .replace("store_bf16(load_f16(1)) + INFINITY + NAN", "1"), "reverse") for a in ("sm_80", "sm_90")]
print(json.dumps([len(made), [one.usage["reverse"].registers for one in found], found[0].symbol]))
"""

    def run() -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answer: list[object] = json.loads(done.stdout)
        return answer

    first, second = run(), run()
    assert (first[0], second[0]) == (2, 0)
    assert first[1:] == second[1:]
    for path in (tmp_path / compiler.SUBDIRECTORY).rglob("*.bin"):
        path.write_bytes(path.read_bytes()[:-1])
    assert run()[0] == 2


def test_the_cache_knows_architecture_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    before = compiler._compiled
    monkeypatch.setattr(compiler, "_compiled", lambda *args: made.append(args[2][0]) or before(*args))
    source = 'extern "C" __global__ void k(int *x) { x[0] = 1; }'

    def compile_for(architecture: str) -> int:
        NvrtcCompiler(architecture, tmp_path).compile(source, "k")
        return len(made)

    assert [compile_for(name) for name in ("sm_80", "sm_90", "sm_80", "sm_90")] == [1, 2, 2, 2]
    major, minor = compiler.nvrtc_version()
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (major, minor + 1))
    assert [compile_for(name) for name in ("sm_80", "sm_80")] == [3, 3]
