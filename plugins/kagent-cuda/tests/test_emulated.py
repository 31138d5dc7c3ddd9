"""What kernels compute on the emulated device is what CUDA says that they do."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.config import load_config
from kagent_core.errors import KagentError
from kagent_core.kernels import override
from kagent_core.layout import CONTIGUOUS
from kagent_core.session import session_for
from kagent_core.specs import LaunchConfig
from kagent_cuda.emulated.launches import run_kernel
from kagent_cuda.emulated.memory import ALIGNMENT

from .conftest import Emulator


def test_numbers_of_threads_and_blocks(emulator: Emulator) -> None:
    source = """
    extern "C" __global__ void k(int *out) {
        int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 100 * block + thread;
    }
    """
    out = emulator.empty(4 * 24 * 12)
    emulator.run(source, out, grid=(2, 3, 2), block=(4, 3, 2))
    assert emulator.read(out, "i") == [100 * block + thread for block in range(12) for thread in range(24)]


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("__shfl_sync(~0u, x, 5)", lambda lane: 5),
        ("__shfl_sync(~0u, x, 3, 8)", lambda lane: lane // 8 * 8 + 3),
        ("__shfl_sync(~0u, x, 33)", lambda lane: 1),
        ("__shfl_up_sync(~0u, x, 2)", lambda lane: lane - 2 if lane >= 2 else lane),
        ("__shfl_up_sync(~0u, x, 2, 16)", lambda lane: lane - 2 if lane % 16 >= 2 else lane),
        ("__shfl_down_sync(~0u, x, 7)", lambda lane: lane + 7 if lane + 7 < 32 else lane),
        ("__shfl_down_sync(~0u, x, 1, 4)", lambda lane: lane + 1 if lane % 4 != 3 else lane),
        ("__shfl_xor_sync(~0u, x, 16)", lambda lane: lane ^ 16),
        ("__shfl_xor_sync(~0u, x, 5, 8)", lambda lane: lane ^ 5),
    ],
)
@pytest.mark.parametrize(("kind", "code"), [("float", "f"), ("int", "i"), ("double", "d"), ("long long", "q")])
def test_shuffles(emulator: Emulator, shuffle: str, expected: Callable[[int], int], kind: str, code: str) -> None:
    source = f'extern "C" __global__ void k({kind} *out) {{ {kind} x = threadIdx.x; out[threadIdx.x] = {shuffle}; }}'
    out = emulator.empty(32 * struct.calcsize(code))
    emulator.run(source, out)
    assert emulator.read(out, code) == [expected(lane) for lane in range(32)]


def test_votes(emulator: Emulator) -> None:
    source = """
    extern "C" __global__ void k(int *out) {
        int lane = threadIdx.x % 32;
        out[0] = __ballot_sync(~0u, lane % 3 == 0);
        int any = __any_sync(~0u, lane == 4), none = __any_sync(~0u, lane > 40);
        int all = __all_sync(~0u, lane < 32), some = __all_sync(~0u, lane < 31);
        if (lane < 8) out[2] = __ballot_sync(0xff, lane > 1);
        int count = __syncthreads_count(threadIdx.x < 40), both = __syncthreads_and(threadIdx.x < 64);
        int either = __syncthreads_or(threadIdx.x == 63);
        if (threadIdx.x == 0) out[1] = any + 2 * none + 4 * all + 8 * some, out[3] = count, out[4] = both + 2 * either;
    }
    """
    out = emulator.empty(20)
    emulator.run(source, out, block=(64, 1, 1))
    assert emulator.read(out, "I") == [sum(1 << n for n in range(0, 32, 3)), 5, 0xFC, 40, 3]


def test_a_block_that_is_no_whole_number_of_warps(emulator: Emulator) -> None:
    source = """
    extern "C" __global__ void k(float *out) {
        float x = threadIdx.x;
        out[threadIdx.x] = __shfl_down_sync(~0u, x, 4);
    }
    """
    out = emulator.empty(4 * 40)
    emulator.run(source, out, block=(40, 1, 1))
    last = emulator.read(out)[32:]
    assert last[:4] == [36, 37, 38, 39]
    assert all(math.isnan(value) for value in last[4:])  # undefined on a device: those threads do not exist


def test_atomics(emulator: Emulator) -> None:
    source = """
    extern "C" __global__ void k(int *i, float *f, double *d, unsigned long long *u) {
        __shared__ int most;
        if (threadIdx.x == 0) most = 0;
        __syncthreads();
        atomicMax(&most, (int)threadIdx.x * 7 % 50);
        __syncthreads();
        atomicAdd(i, 2); atomicMax(i + 1, (int)threadIdx.x); atomicMin(i + 2, -(int)threadIdx.x);
        if (threadIdx.x == 0) atomicAdd(i + 3, most);
        int old = i[4], seen;
        do { seen = old; old = atomicCAS(i + 4, seen, seen + 3); } while (old != seen);
        atomicAdd(f, 0.5f); atomicAdd(d, 0.25); atomicAdd(u, 1ull);
    }
    """
    places = [emulator.empty(nbytes) for nbytes in (20, 4, 8, 8)]
    for place in places:
        emulator.memory.write(place, 0, memoryview(bytes(place.nbytes)))
    emulator.run(source, *places, grid=(2, 1, 1), block=(64, 1, 1))
    assert emulator.read(places[0], "i") == [256, 63, -63, 98, 384]
    assert [emulator.read(place, code) for place, code in zip(places[1:], "fdQ", strict=True)] == [[64], [32], [128]]


@pytest.mark.parametrize(("kind", "dtype"), [("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)])
def test_halves_round_as_torch_does(emulator: Emulator, kind: str, dtype: torch.dtype) -> None:
    name = {"__half": "half", "__nv_bfloat16": "bfloat16"}[kind]
    source = f"""
    extern "C" __global__ void k(const float *x, {kind} *out, float *back, int n) {{
        for (int i = threadIdx.x; i < n; i += blockDim.x) {{
            {kind} h = __float2{name}(x[i]);
            out[i] = h;
            back[i] = __{name}2float(h);
        }}
    }}
    """
    special = [0.0, -0.0, math.inf, -math.inf, 65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 1e-40, 3.4e38, 1 + 2**-11]
    values = torch.cat([torch.tensor(special), torch.randn(2000) * 10.0 ** torch.randint(-9, 6, (2000,))])
    x, out, back = emulator.floats(values.tolist()), emulator.empty(2 * len(values)), emulator.empty(4 * len(values))
    emulator.run(source, x, out, back, ctypes.c_int(len(values)))
    expected = values.to(dtype)
    assert emulator.read(out, "h") == expected.view(torch.int16).tolist()
    assert emulator.read(back) == expected.float().tolist()


def test_structs_and_small_types_among_parameters(emulator: Emulator) -> None:
    source = """
    struct Strides { long s[3]; };
    extern "C" __global__ void k(char a, short b, int c, const Strides d, float *out, bool e, double f) {
        out[0] = a + b + c + d.s[0] + d.s[2] + e + f;
    }
    """
    out = emulator.empty(4)
    kernel = emulator.machine.compile(source, "k")
    assert kernel.places == ((0, 1), (2, 2), (4, 4), (8, 24), (32, 8), (40, 1), (48, 8))
    block = struct.pack("<bxhi3qQ?7xd", 1, 2, 3, 10, 20, 30, out.address, True, 0.5)
    run_kernel(emulator.machine, emulator.memory, emulator.info, kernel, LaunchConfig(), block)
    assert emulator.read(out) == [47.5]


def test_allocations(emulator: Emulator) -> None:
    for nbytes in (0, 1, 5, 16, 4096, 5000):
        allocation = emulator.empty(nbytes)
        assert allocation.address % ALIGNMENT == 0
        assert emulator.read(allocation, "b") == [-1] * nbytes
        emulator.memory.free(allocation)
    with pytest.raises(MemoryError, match="bytes wanted"):
        emulator.empty(2**31)


SCALE = """
extern "C" __global__ void scale(const float *self, float *out, long long numel) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < numel) out[i] = 10 * self[i];
}
"""
PROTOTYPE = "void scale(const float *self, float *out, int64_t numel)"


def test_a_kernel_of_a_program(device: str) -> None:
    x = torch.randn(1000)[1:]
    options: dict[str, Any] = {"source": SCALE, "prototype": PROTOTYPE, "dtypes": {"float32"}, "layout": CONTIGUOUS}
    with override("aten::relu", device=device, **options):
        torch.testing.assert_close(kagent_core.run_op("aten::relu", x, device=device), 10 * x)
        with pytest.raises(KagentError, match=r"kernel 'scale' did not write \d+ of the 3996 bytes of result"):
            kagent_core.compile(torch.relu, device=device, launch_configs={"aten::relu": "3,1,1/256,1,1"})(x)


def test_a_prototype_that_is_not_the_sources(device: str) -> None:
    options: dict[str, Any] = {"source": SCALE, "dtypes": {"float32"}, "layout": CONTIGUOUS}
    prototype = PROTOTYPE.replace("int64_t", "int32_t")
    with (
        override("aten::relu", device=device, prototype=prototype, **options),
        pytest.raises(KagentError, match="declared as int32_t, 4 bytes, but parameter 2 was compiled with 8"),
    ):
        kagent_core.run_op("aten::relu", torch.randn(10), device=device)


def test_a_whole_model_without_a_fallback(device: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True, norm_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 16), layer, torch.nn.Linear(16, 10))
    options = {"device": device}
    compiled = kagent_core.compile(model, device=device)
    session_for(load_config(options)).reports.clear()
    tokens = torch.randint(0, 10, (3, 7))
    results = []
    for run in (model, compiled):
        model.zero_grad(set_to_none=True)
        run(tokens).square().mean().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    reports = session_for(load_config(options)).reports
    assert reports
    assert [report.fallbacks for report in reports if report.fallbacks] == []
