"""What goes wrong in silence on a GPU, or ends the program there, is found on the emulated device."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kagent_core.errors import CompilationError
from kagent_core.specs import Access, LaunchConfig
from kagent_cuda.emulated.launches import Region, run_kernel
from kagent_cuda.emulated.memory import Allocation, EmulationError

from .conftest import Emulator, packed

N = 64

REVERSE = """
extern "C" __global__ void k(const float *x, float *out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    BARRIER
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
"""

ROUNDS = """
extern "C" __global__ void k(const float *x, float *out) {
    __shared__ float tile[64];
    float sum = 0;
    for (int round = 0; round < 3; round++) {
        tile[threadIdx.x] = x[threadIdx.x] + round;
        __syncthreads();
        sum += tile[63 - threadIdx.x];
        BARRIER
    }
    out[threadIdx.x] = sum;
}
"""


def pair(emulator: Emulator) -> tuple[Allocation, Allocation]:
    return emulator.floats([float(n) for n in range(N)]), emulator.empty(4 * N)


def test_a_barrier_that_is_there(emulator: Emulator) -> None:
    x, out = pair(emulator)
    emulator.run(REVERSE.replace("BARRIER", "__syncthreads();"), x, out, block=(N, 1, 1))
    assert emulator.read(out) == [float(N - 1 - n) for n in range(N)]
    emulator.run(ROUNDS.replace("BARRIER", "__syncthreads();"), x, out, block=(N, 1, 1))
    assert emulator.read(out) == [3.0 * (N - 1 - n) + 3 for n in range(N)]


def test_a_barrier_that_is_missing(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match=r"kernel 'k', block \(0, 0, 0\), thread .* line [46]: .* no barrier"):
        emulator.run(REVERSE.replace("BARRIER", ""), *pair(emulator), block=(N, 1, 1))


def test_a_barrier_that_is_missing_before_memory_is_used_again(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match=r"line [68]: writes .* shared memory, which thread .* reads|no barrier"):
        emulator.run(ROUNDS.replace("BARRIER", ""), *pair(emulator), block=(N, 1, 1))


def test_a_barrier_of_a_warp_does_not_do_for_a_block(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match="no barrier between them"):
        emulator.run(REVERSE.replace("BARRIER", "__syncwarp();"), *pair(emulator), block=(N, 1, 1))


def test_a_barrier_of_a_warp_does_for_a_warp(emulator: Emulator) -> None:
    source = REVERSE.replace("BARRIER", "__syncwarp();").replace("64", "32").replace("63", "31")
    x, out = emulator.floats([float(n) for n in range(32)]), emulator.empty(4 * 32)
    emulator.run(source, x, out)
    assert emulator.read(out) == [float(31 - n) for n in range(32)]


def test_dynamic_shared_memory_is_watched_too(emulator: Emulator) -> None:
    source = REVERSE.replace("__shared__ float tile[64]", "extern __shared__ float tile[]")
    x, out = pair(emulator)
    emulator.run(source.replace("BARRIER", "__syncthreads();"), x, out, block=(N, 1, 1), shared=4 * N)
    assert emulator.read(out) == [float(N - 1 - n) for n in range(N)]
    with pytest.raises(EmulationError, match="no barrier between them"):
        emulator.run(source.replace("BARRIER", ""), x, out, block=(N, 1, 1), shared=4 * N)
    with pytest.raises(EmulationError, match="into the 128 bytes of dynamic shared memory"):
        emulator.run(source.replace("BARRIER", "__syncthreads();"), x, out, block=(N, 1, 1), shared=2 * N)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("if (threadIdx.x < 40) __syncthreads();", "ends without reaching the barrier"),
        ("if (threadIdx.x == 7) return; __syncthreads();", r"thread \(7, 0, 0\), line 1: ends without reaching"),
        ("if (threadIdx.x < 40) __syncthreads();\nelse __syncthreads();", "waits at another barrier"),
        ("for (int n = 0; n < 2 + threadIdx.x % 2; n++) __syncthreads();", "ends without reaching the barrier"),
    ],
)
def test_a_barrier_that_some_threads_do_not_reach(emulator: Emulator, body: str, told: str) -> None:
    source = f'extern "C" __global__ void k(float *out) {{ {body} out[threadIdx.x] = 0; }}'
    with pytest.raises(EmulationError, match=told):
        emulator.run(source, emulator.empty(4 * N), block=(N, 1, 1))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("if (threadIdx.x < 9) x = __shfl_xor_sync(0xffffffffu, x, 1);", "lane .* has ended|never come"),
        ("if (threadIdx.x < 9) x = __shfl_xor_sync(0xfu, x, 1);", "leaves out lane"),
        ("if (threadIdx.x < 8) x = __shfl_down_sync(0xffu, x, 4);", "reads lane .* which its mask 0xff leaves out"),
        ("if (threadIdx.x < 8) x = __shfl_sync(~0u, x, 0);\nelse x = __shfl_sync(~0u, x, 1);", "is at __shfl_sync"),
        ("x = __shfl_xor_sync(0xffffffffu, x, 1, 3);", "width 3, expected a power of two"),
        ("if (threadIdx.x < 8) __syncwarp();", "lane .* has ended|never come"),
    ],
)
def test_lanes_that_do_not_come(emulator: Emulator, body: str, told: str) -> None:
    source = f'extern "C" __global__ void k(float *out) {{ float x = threadIdx.x; {body} out[threadIdx.x] = x; }}'
    with pytest.raises(EmulationError, match=told):
        emulator.run(source, emulator.empty(4 * 32))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("out[threadIdx.x] = x[threadIdx.x + 1];", r"thread \(31, 0, 0\), line 1: invalid read of 4 bytes"),
        ("out[threadIdx.x] = x[(long)threadIdx.x - 1];", r"thread \(0, 0, 0\), line 1: invalid read"),
        ("out[threadIdx.x + 1] = x[threadIdx.x];", r"thread \(31, 0, 0\), line 1: invalid write of 4 bytes"),
        ("out[threadIdx.x] = x[1 << 28];", "invalid read"),
        ("out[threadIdx.x] = *(const float *)nullptr;", "null pointer"),
        ("float own[4] = {}; own[threadIdx.x] = 1; out[threadIdx.x] = own[0];", "index .* outside of an array"),
        ("out[threadIdx.x] = 9 / ((int)x[threadIdx.x] - 1);", r"line 1: divides an integer by zero"),
        ("atomicAdd(out + 32, 1.0f);", "invalid write of 4 bytes"),
        ("out[threadIdx.x] = deep(threadIdx.x + (1 << 30));", "local memory"),
    ],
)
def test_memory_that_is_not_the_kernels(emulator: Emulator, body: str, told: str) -> None:
    deep = "__device__ __noinline__ float deep(int n) { volatile float own[64]; own[n % 64] = n;"
    deep += " return n ? deep(n - 1) + own[n % 64] : 0; }"
    source = f'{deep} extern "C" __global__ void k(const float *x, float *out) {{ {body} }}'
    with pytest.raises(EmulationError, match=told):
        emulator.run(source, emulator.floats([1.0] * 32), emulator.empty(4 * 32))


def test_a_kernel_that_fails_leaves_the_machine_in_order(emulator: Emulator) -> None:
    x, out = pair(emulator)
    for _ in range(3):
        with pytest.raises(EmulationError):
            emulator.run(REVERSE.replace("BARRIER", "if (threadIdx.x) __syncthreads();"), x, out, block=(N, 1, 1))
        emulator.run(REVERSE.replace("BARRIER", "__syncthreads();"), x, out, block=(N, 1, 1))
        assert emulator.read(out)[0] == N - 1


VECTORS = """
extern "C" __global__ void k(const float *x, float *out, int first) {
    float4 v = *reinterpret_cast<const float4 *>(x + first);
    out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
"""


def test_a_vector_that_is_not_aligned(emulator: Emulator) -> None:
    x, out = emulator.floats([float(n) for n in range(16)]), emulator.empty(4)
    emulator.run(VECTORS, x, out, ctypes.c_int(4), block=(1, 1, 1))
    assert emulator.read(out) == [22.0]
    with pytest.raises(EmulationError, match=r"line 3: access to a .*float4.* which is not aligned to its 16 bytes"):
        emulator.run(VECTORS, x, out, ctypes.c_int(1), block=(1, 1, 1))


FILL = """
extern "C" __global__ void k(float *out, long n) {
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 1;
}
"""


def test_a_grid_that_is_too_small(emulator: Emulator) -> None:
    out = emulator.empty(4 * 100)
    region = Region(out.address, out.end, Access.OUT, ((out.address, 400),), "'out'")
    emulator.run(FILL, out, ctypes.c_long(100), grid=(4, 1, 1), regions=[region])
    with pytest.raises(EmulationError, match=r"did not write 16 of the 400 bytes of 'out', from byte 384 on.*grid \(3"):
        emulator.run(FILL, out, ctypes.c_long(100), grid=(3, 1, 1), regions=[region])


def test_memory_that_nobody_wrote_is_poison(emulator: Emulator) -> None:
    out = emulator.empty(8)
    assert all(value != value for value in emulator.read(out))
    assert emulator.read(out, "i") == [-1, -1]
    source = """extern "C" __global__ void k(float *out) {
        __shared__ float s[2];
        if (threadIdx.x == 0) s[0] = 5;
        out[threadIdx.x] = s[threadIdx.x];
    }"""
    emulator.run(source, out, block=(2, 1, 1))
    first, second = emulator.read(out)
    assert first == 5
    assert second != second


def test_a_tensor_that_may_only_be_read(emulator: Emulator) -> None:
    out = emulator.empty(4 * 32)
    regions = [Region(out.address, out.end, Access.IN)]
    with pytest.raises(EmulationError, match="writes to a tensor that the launch may only read"):
        emulator.run(FILL, out, ctypes.c_long(32), regions=regions)


def test_a_neighbour_in_the_same_allocation(emulator: Emulator) -> None:
    out = emulator.empty(4 * 64)
    regions = [Region(out.address, out.address + 4 * 32)]
    emulator.run(FILL, out, ctypes.c_long(32), grid=(2, 1, 1), regions=regions)
    with pytest.raises(EmulationError, match=r"invalid write of 4 bytes, \d+ bytes behind the nearest memory"):
        emulator.run(FILL, out, ctypes.c_long(64), grid=(2, 1, 1), regions=regions)


@pytest.mark.parametrize("parameters", ["packed without padding", "too few", "a number for a pointer"])
def test_parameters_at_the_wrong_place(emulator: Emulator, parameters: str) -> None:
    source = 'extern "C" __global__ void k(int n, float *out, char last) { out[0] = n; }'
    out = emulator.empty(4)
    emulator.run(source, ctypes.c_int(3), out, ctypes.c_char(1), block=(1, 1, 1))
    good = packed(ctypes.c_int(3), out, ctypes.c_char(1))
    bad = {
        "packed without padding": good[:4] + good[8:],
        "too few": good[:16],
        "a number for a pointer": good[:8] + (5).to_bytes(8, "little") + good[16:],
    }[parameters]
    kernel = emulator.machine.compile(source, "k")
    config = LaunchConfig((1, 1, 1), (1, 1, 1))
    told = "parameter 1 .* is the pointer" if parameters == "a number for a pointer" else "parameter block of 17 bytes"
    with pytest.raises(EmulationError, match=told):
        run_kernel(emulator.machine, emulator.memory, emulator.info, kernel, config, bad)


def test_pointers_to_memory_that_is_gone(emulator: Emulator) -> None:
    out = emulator.empty(4 * 32)
    emulator.memory.free(out)
    with pytest.raises(EmulationError, match="memory that was freed"):
        emulator.run(FILL, out, ctypes.c_long(32))
    with pytest.raises(EmulationError, match="not allocated"):
        emulator.memory.free(out)
    with pytest.raises(EmulationError, match="null pointer"):
        emulator.run(FILL, bytes(8), ctypes.c_long(32))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"block": (1025, 1, 1)}, "a block of 1025 threads"),
        ({"block": (1, 1, 128)}, "a block of .* expected at most"),
        ({"block": (0, 1, 1)}, "a block of 0 threads"),
        ({"grid": (1, 1 << 16, 1)}, "a grid of"),
        ({"grid": (0, 1, 1)}, "a grid of"),
        ({"shared": 1 << 20}, "bytes of shared memory"),
    ],
)
def test_launch_configs_beyond_the_limits(emulator: Emulator, config: dict[str, Any], told: str) -> None:
    with pytest.raises(EmulationError, match=told):
        emulator.run(FILL, emulator.empty(4), ctypes.c_long(1), **config)


def test_what_a_kernel_promises(emulator: Emulator) -> None:
    source = FILL.replace("void k", "void __launch_bounds__(2 * 32, 1) k")
    emulator.run(source, emulator.empty(4), ctypes.c_long(1), block=(64, 1, 1))
    with pytest.raises(EmulationError, match=r"a block of 96 threads .* expected 1 to 64"):
        emulator.run(source, emulator.empty(4), ctypes.c_long(1), block=(96, 1, 1))
    with pytest.raises(EmulationError, match="declares 65536 bytes of shared memory"):
        emulator.run(REVERSE.replace("tile[64]", "tile[16384]").replace("BARRIER", ""), *pair(emulator))


def test_sources_that_are_none(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match="no kernel 'k'"):
        emulator.run('extern "C" __global__ void other() {}')
    with pytest.raises(CompilationError, match=r"k\.cu:2:.*'y' was not declared"):
        emulator.run('\nextern "C" __global__ void k(float *x) { x[0] = y; }', emulator.empty(4))


def test_writes_beside_an_allocation_are_seen(emulator: Emulator) -> None:
    out = emulator.empty(5)
    ctypes.memset(out.address + 5, 1, 1)
    with pytest.raises(EmulationError, match="wrote beside an allocation of 5 bytes"):
        emulator.memory.free(out)
