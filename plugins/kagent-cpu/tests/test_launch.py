"""Chunks over threads."""

from __future__ import annotations

import pytest
import torch

from kagent_core.config import load_config
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig
from kagent_cpu.launch import GRAIN, ChunkDeriver

from .builders import aten, call_of

INFO = DeviceInfo(Device("cpu"), "some processor")
KERNEL = KernelDescriptor("aten::relu", "relu")


def chunks(numel: int, threads: int | None) -> int:
    config = ChunkDeriver(threads).derive([call_of(aten.relu.default, torch.empty(numel))], KERNEL, INFO)
    assert config == LaunchConfig(grid=(config.grid[0], 1, 1))
    return config.grid[0]


@pytest.mark.parametrize(
    ("numel", "threads", "expected"),
    [
        (0, 4, 1),
        (1, 4, 1),
        (GRAIN, 4, 1),
        (GRAIN + 1, 4, 2),
        (3 * GRAIN, 4, 3),
        (100 * GRAIN, 4, 4),
        (100 * GRAIN, 1, 1),
    ],
)
def test_as_many_chunks_as_threads_have_work(numel: int, threads: int, expected: int) -> None:
    assert chunks(numel, threads) == expected


def test_without_the_option_torchs_own_setting_counts() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert chunks(100 * GRAIN, None) == 3
    finally:
        torch.set_num_threads(before)


def test_the_largest_tensor_counts() -> None:
    call = call_of(aten.sum.default, torch.empty(5 * GRAIN))  # a large argument, a small result
    assert ChunkDeriver(8).derive([call], KERNEL, INFO).grid == (5, 1, 1)


def test_the_plugin_hands_the_option_on() -> None:
    from kagent_cpu import plugin

    config = load_config({"device": "cpu", "threads": 2})
    deriver = plugin.kagent_launch_config_deriver(INFO, config)
    assert deriver is not None
    config = deriver.derive([call_of(aten.relu.default, torch.empty(9 * GRAIN))], KERNEL, INFO)
    assert config is not None
    assert config.grid == (2, 1, 1)
