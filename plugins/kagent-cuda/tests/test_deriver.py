"""Occupancy and launch configs of devices that are not here, from what their `DeviceInfo` tells and nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kagent_core.extract.launch_config import beyond_limits
from kagent_core.specs import Device, DeviceInfo, DType, KernelDescriptor, LaunchConfig, OpCall, TensorSpec
from kagent_cuda.compiler import KernelUsage, NvrtcCompiler
from kagent_cuda.deriver import WAVES, CudaDeriver, nvrtc_usage
from kagent_cuda.devices import MAX_BLOCK, MAX_GRID, capability_of, emulated_device
from kagent_cuda.occupancy import best_block, multiprocessor, resident_blocks

UNITS = {"sm_75": 40, "sm_80": 108, "sm_90": 132, "sm_100": 148}  # T4, A100, H200, B200


def gpu(architecture: str) -> DeviceInfo:
    return DeviceInfo(
        Device("cuda", 0),
        "GPU",
        max_threads_per_block=1024,
        shared_nbytes=48 * 1024,
        max_grid=MAX_GRID,
        max_block=MAX_BLOCK,
        compute_units=UNITS[architecture],
        thread_multiple=32,
        details=(("architecture", architecture),),
    )


def tensor(*shape: int) -> TensorSpec:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorSpec(DType("float32", 4), shape, strides, 0, 0)


def call(signature: str, result: TensorSpec, **arguments: Any) -> OpCall:
    inputs = tuple(value for value in arguments.values() if isinstance(value, TensorSpec))
    return OpCall(0, "op", signature, arguments, inputs, (result,), (result,))


def derived(kernel: KernelDescriptor, info: DeviceInfo, registers: int = 32, shared: int = 0) -> LaunchConfig | None:
    deriver = CudaDeriver(lambda kernel: KernelUsage(registers, shared, 0, 0))
    config = deriver.derive([call("aten::relu", tensor(4), self=tensor(4))], kernel, info)
    assert config is None or beyond_limits(config, info) is None
    return config


def generated(items: int, threads: int | None = None) -> KernelDescriptor:
    return KernelDescriptor("aten::relu", "k", source="", items=items, threads=threads)


# -- occupancy: expected numbers are those of NVIDIA's occupancy calculator


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks"),
    [
        ((8, 0), 256, 32, 0, 8),  # all 2048 threads
        ((8, 0), 256, 40, 0, 6),  # 48 of 64 warps: 12 in each quarter
        ((8, 0), 256, 33, 0, 6),  # as with 40: registers come in eights
        ((9, 0), 1024, 64, 0, 1),
        ((9, 0), 1024, 65, 0, 0),  # does not start
        ((9, 0), 256, 255, 0, 1),
        ((7, 5), 256, 64, 0, 4),  # half as many threads at once as sm_80
        ((8, 6), 1024, 32, 0, 1),  # 1536 threads
        ((8, 6), 32, 16, 0, 16),  # no more blocks
        ((9, 0), 32, 16, 0, 32),
        ((9, 0), 256, 32, 48 * 1024, 4),  # 49 KiB each, with the system's
        ((7, 5), 256, 32, 32 * 1024, 2),  # the system takes none
        ((8, 0), 256, 32, 100 * 1024, 1),
        ((8, 0), 256, 32, 164 * 1024, 0),
        ((9, 0), 40, 168, 0, 6),  # two warps a block: 12 in all
    ],
)
def test_resident_blocks(capability: tuple[int, int], threads: int, registers: int, shared: int, blocks: int) -> None:
    assert resident_blocks(multiprocessor(capability), threads, registers, shared) == blocks


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("registers", [0, 16, 32, 40, 64, 96, 128, 255])
def test_no_block_is_better_than_the_best(capability: tuple[int, int], registers: int) -> None:
    unit = multiprocessor(capability)
    best = best_block(unit, registers)
    assert best % 32 == 0
    at_once = resident_blocks(unit, best, registers) * best
    assert at_once == max(resident_blocks(unit, n, registers) * n for n in range(32, 1025, 32)) > 0


def test_capabilities() -> None:
    assert multiprocessor((9, 0)).threads == 2048
    assert multiprocessor((8, 8)) == multiprocessor((8, 7))
    assert multiprocessor((13, 0)) == multiprocessor((12, 1))
    assert multiprocessor((5, 0)) == multiprocessor(None) == multiprocessor((7, 5))
    assert capability_of(gpu("sm_100")) == (10, 0)
    assert capability_of(emulated_device(0)) is None


# -- generated kernels


@pytest.mark.parametrize("architecture", UNITS)
def test_few_items_are_spread_over_the_device(architecture: str) -> None:
    info = gpu(architecture)
    config = derived(generated(32 * info.compute_units), info)
    assert config == LaunchConfig((info.compute_units, 1, 1), (32, 1, 1))
    assert derived(generated(1), info) == LaunchConfig((1, 1, 1), (32, 1, 1))
    assert derived(generated(0), info) is None


@pytest.mark.parametrize("architecture", UNITS)
@pytest.mark.parametrize("registers", [32, 96, 255])
def test_many_items_keep_the_device_busy_and_no_more(architecture: str, registers: int) -> None:
    info = gpu(architecture)
    config = derived(generated(2**30), info, registers)
    assert config is not None
    resident = resident_blocks(multiprocessor(capability_of(info)), config.threads_per_block, registers)
    assert resident > 0
    assert config.threads_per_block % 32 == 0
    assert config.grid == (min(resident * info.compute_units * WAVES, 2**30 // config.threads_per_block), 1, 1)


@pytest.mark.parametrize("architecture", UNITS)
def test_a_thread_for_each_item_where_that_is_not_too_many(architecture: str) -> None:
    config = derived(generated(100_000), gpu(architecture))
    assert config == LaunchConfig((391, 1, 1), (256, 1, 1))


@pytest.mark.parametrize("architecture", UNITS)
def test_blocks_that_share_their_work(architecture: str) -> None:
    info = gpu(architecture)
    assert derived(generated(300, threads=256), info) == LaunchConfig((300, 1, 1), (256, 1, 1))
    resident = {"sm_75": 1, "sm_80": 3, "sm_90": 4, "sm_100": 4}[architecture]
    config = derived(generated(2**30, threads=256), info, shared=48 * 1024)
    assert config == LaunchConfig((resident * info.compute_units * WAVES, 1, 1), (256, 1, 1))
    assert derived(generated(0, threads=256), info) is None


def test_the_emulated_device_is_small() -> None:
    config = CudaDeriver().derive([call("aten::relu", tensor(4))], generated(2**30), emulated_device(0))
    assert config is not None
    assert config.threads_per_block == 256
    assert config.grid[0] == 4 * 2 * WAVES  # of 1024 threads at once, on two multiprocessors


# -- kernels that are written by hand


@pytest.mark.parametrize("architecture", UNITS)
def test_matrix_products_get_tiles(architecture: str) -> None:
    product = call("aten::mm", tensor(100, 70), self=tensor(100, 5), mat2=tensor(5, 70))
    config = CudaDeriver().derive([product], KernelDescriptor("aten::mm", "mm", source=""), gpu(architecture))
    assert config == LaunchConfig((5, 7, 1), (16, 16, 1))


@pytest.mark.parametrize("architecture", UNITS)
@pytest.mark.parametrize(("registers", "threads"), [(32, 1024), (64, 1024), (65, 512), (255, 256)])
def test_rows_have_room_for_their_registers(architecture: str, registers: int, threads: int) -> None:
    total = call("aten::sum.dim_IntList", tensor(10), self=tensor(10, 5000), dim=(1,), keepdim=False, dtype=None)
    kernel = KernelDescriptor("aten::sum.dim_IntList", "total", source="")
    deriver = CudaDeriver(lambda kernel: KernelUsage(registers, 0, 0, 0))
    config = deriver.derive([total], kernel, gpu(architecture))
    assert config == LaunchConfig((10, 1, 1), (threads, 1, 1))


def test_elements_that_are_written_by_hand_all_get_a_thread() -> None:
    config = derived(KernelDescriptor("aten::relu", "k", source=""), gpu("sm_90"), registers=255)
    assert config == LaunchConfig((1, 1, 1), (4, 1, 1))


# -- what a kernel takes

SOURCE = """
extern "C" __global__ void k(float *out) {
    __shared__ float part[512];
    part[threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = part[511 - threadIdx.x];
}
"""


def test_usage_comes_from_the_compiled_kernel(tmp_path: Path) -> None:
    usage = nvrtc_usage(NvrtcCompiler("sm_90", tmp_path))
    kernel = KernelDescriptor("aten::relu", "k", source=SOURCE)
    found = usage(kernel)
    assert found is not None
    assert found.shared_nbytes == 2048
    assert 0 < found.registers < 32
    assert usage(kernel) is found
    assert usage(KernelDescriptor("aten::relu", "k", source="nonsense")) is None
    assert usage(KernelDescriptor("aten::relu", "k", print)) is None
