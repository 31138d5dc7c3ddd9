"""Launch configs for devices of all sorts, from what their `DeviceInfo` tells and nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pyopencl as cl
import pytest
import torch

import kagent_core
from kagent_core.capture.schemas import resolve_overload
from kagent_core.extract.launch_config import beyond_limits
from kagent_core.specs import Device, DeviceInfo, DType, KernelDescriptor, LaunchConfig, OpCall, TensorSpec
from kagent_opencl.deriver import GROUPS_PER_CORE, GROUPS_PER_UNIT, OpenClDeriver
from kagent_opencl.platforms import device_of, list_devices

CPU = DeviceInfo(
    Device("opencl", 0),
    "CPU",
    max_threads_per_block=4096,
    max_block=(4096, 4096, 4096),
    compute_units=4,
    runs_loops=True,
)
GPU = DeviceInfo(
    Device("opencl", 1),
    "GPU",
    max_threads_per_block=256,
    max_block=(256, 256, 64),
    shared_nbytes=32768,
    compute_units=20,
    thread_multiple=64,
)
ODD: dict[str, dict[str, Any]] = {
    "groups of one": {"max_threads_per_block": 1, "max_block": (1, 1, 1)},
    "groups of eight": {"max_threads_per_block": 8},
    "long in x only": {"max_threads_per_block": 1024, "max_block": (1024, 2, 1)},
    "short in x": {"max_threads_per_block": 1024, "max_block": (16, 1024, 64)},
    "flat": {"max_threads_per_block": 256, "max_block": (256, 256, 64)},
    "no power of two": {"max_threads_per_block": 1000, "max_block": (1000, 24, 3), "thread_multiple": 48},
    "unknown units": {"compute_units": 0, "thread_multiple": 1},
    "a small grid": {"max_grid": (3, 65535, 65535)},
}
DEVICES = {
    f"{name}, {what}": replace(info, **changes)
    for name, info in (("CPU", CPU), ("GPU", GPU))
    for what, changes in {"as it is": dict[str, Any](), **ODD}.items()
}


def tensor(*shape: int) -> TensorSpec:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorSpec(DType("float32", 4), shape, strides, 0, 0)


def call(signature: str, result: TensorSpec, **arguments: Any) -> OpCall:
    inputs = tuple(value for value in arguments.values() if isinstance(value, TensorSpec))
    return OpCall(0, "op", signature, arguments, inputs, (result,), (result,), overload=resolve_overload(signature))


def generated(items: int, info: DeviceInfo, threads: int | None = None) -> LaunchConfig | None:
    kernel = KernelDescriptor("aten::relu", "k", source="", packed=(), items=items, threads=threads)
    return OpenClDeriver().derive([], kernel, info)


def by_hand(called: OpCall, info: DeviceInfo) -> LaunchConfig | None:
    return OpenClDeriver().derive([called], KernelDescriptor(called.signature, "k", source=""), info)


# -- generated kernels


@pytest.mark.parametrize("items", [1, 7, 63, 64, 65, 5000, 10**6, 2**33])
@pytest.mark.parametrize("info", DEVICES.values(), ids=DEVICES)
def test_every_device_can_launch_it(info: DeviceInfo, items: int) -> None:
    config = generated(items, info)
    assert config is not None
    assert beyond_limits(config, info) is None
    assert math.prod(config.grid[1:]) == math.prod(config.block[1:]) == 1


@pytest.mark.parametrize("info", DEVICES.values(), ids=DEVICES)
def test_nothing_to_do_is_no_launch(info: DeviceInfo) -> None:
    assert generated(0, info) is None
    assert generated(0, info, threads=64) is None


def test_a_cpu_gets_a_work_item_for_each_piece_in_few_groups() -> None:
    for items in (1, 3, 100, 128, 129, 20_000):
        config = generated(items, CPU)
        assert config is not None
        total = config.grid[0] * config.block[0]
        assert items <= total < items + config.block[0]  # so that each does one piece, neighbours in one group
        assert config.grid[0] <= GROUPS_PER_CORE * 4
        assert config.grid[0] >= min(items, 4)  # every core has some
    large = generated(10**7, CPU)
    assert large is not None
    assert large.block == (256, 1, 1)


def test_more_cores_get_more_groups() -> None:
    few, many = generated(10_000, CPU), generated(10_000, replace(CPU, compute_units=64))
    assert few is not None
    assert many is not None
    assert few.grid[0] < many.grid[0] <= GROUPS_PER_CORE * 64


def test_a_gpu_gets_groups_of_a_multiple_of_what_runs_together() -> None:
    for items in (1, 63, 65, 1000, 1280, 1281, 4000, 10**6, 10**8):
        config = generated(items, GPU)
        assert config is not None
        assert config.block[0] % 64 == 0
        assert config.grid[0] <= GROUPS_PER_UNIT * 20
        if items <= 64 * 20:
            assert config.block[0] == 64  # spread over the compute units first
    odd = generated(10**6, replace(GPU, max_threads_per_block=250))
    assert odd is not None
    assert odd.block == (192, 1, 1)


def test_groups_of_a_fixed_number_of_work_items() -> None:
    assert generated(10, GPU, threads=64) == LaunchConfig((10, 1, 1), (64, 1, 1))
    assert generated(10, replace(GPU, max_grid=(4, 1, 1)), threads=64) == LaunchConfig((4, 1, 1), (64, 1, 1))


# -- kernels written by hand


@pytest.mark.parametrize("info", DEVICES.values(), ids=DEVICES)
def test_kernels_by_hand_stay_within_the_limits(info: DeviceInfo) -> None:
    info = replace(info, max_grid=GPU.max_grid)
    calls = (
        call("aten::relu", tensor(1000, 33), self=tensor(1000, 33)),
        call("aten::mm", tensor(70, 50), self=tensor(70, 20), mat2=tensor(20, 50)),
        call("aten::bmm", tensor(5, 70, 50), self=tensor(5, 70, 20), mat2=tensor(5, 20, 50)),
        call("aten::amax", tensor(9), self=tensor(9, 5000), dim=(1,)),
    )
    for called in calls:
        config = by_hand(called, info)
        assert config is not None
        assert beyond_limits(config, info) is None


def test_kernels_by_hand_by_their_operator() -> None:
    product = call("aten::mm", tensor(70, 50), self=tensor(70, 20), mat2=tensor(20, 50))
    assert by_hand(product, GPU) == LaunchConfig((4, 5, 1), (16, 16, 1))
    narrow = by_hand(product, replace(GPU, max_block=(256, 4, 1)))
    assert narrow == LaunchConfig((4, 18, 1), (16, 4, 1))
    wide = by_hand(product, replace(GPU, max_block=(8, 256, 1)))
    assert wide == LaunchConfig((7, 5, 1), (8, 16, 1))
    rows = call("aten::amax", tensor(9), self=tensor(9, 5000), dim=(1,))
    assert by_hand(rows, GPU) == LaunchConfig((9, 1, 1), (256, 1, 1))
    assert by_hand(rows, replace(GPU, max_block=(24, 1, 1))) == LaunchConfig((9, 1, 1), (16, 1, 1))
    assert by_hand(call("aten::relu", tensor(0, 3), self=tensor(0, 3)), GPU) is None


def test_a_block_that_is_too_long_in_one_dimension() -> None:
    assert beyond_limits(LaunchConfig(block=(1, 2, 65)), GPU) == "65 threads per block in z, opencl:1 takes 64"


# -- this device


def test_what_the_device_tells(device: str) -> None:
    [info] = [info for info in list_devices() if str(info.device) == device]
    opened = device_of(info)
    assert info.max_block == tuple(opened.max_work_item_sizes)
    assert info.compute_units == opened.max_compute_units
    assert info.thread_multiple >= 1
    assert info.runs_loops is bool(opened.type & cl.device_type.CPU)
    assert dict(info.lacks).keys() == (set() if "cl_khr_fp64" in opened.extensions else {"float64"})


def test_forced_groups_beyond_a_dimension(device: str) -> None:
    [info] = [info for info in list_devices() if str(info.device) == device]
    beyond = LaunchConfig(block=(1, 1, info.max_block[2] + 1))
    with (
        kagent_core.force_launch_config("aten::relu", beyond),
        pytest.raises(kagent_core.errors.LaunchConfigError, match=re.escape(f"{device} takes")),
    ):
        kagent_core.run_op("aten::relu", torch.ones(3), device=device)
