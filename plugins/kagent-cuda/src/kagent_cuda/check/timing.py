"""How long calls take, on the clock and on the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kagent_cuda.check.setting import Setting

ROUND_S = 0.02
ROUNDS = 5
MOST_CALLS = 400
WATCHED_CALLS = 5

Call = Callable[[], object]

# what is no work of a kernel: host tensors on their way
_NOT_COUNTED = ("Memcpy HtoD", "Memcpy DtoH")


def call_us(setting: Setting, call: Call) -> float:
    """Return the microseconds of one call of many that are started one after the other: the least of some rounds."""
    rounds = 1 if setting.tiny else ROUNDS
    for _ in range(1 if setting.tiny else 3):
        call()
    count = max(1, min(MOST_CALLS, int(ROUND_S / max(_round_s(setting, call, 1), 1e-7))))
    if setting.tiny:
        count = 1
    return min(_round_s(setting, call, count) for _ in range(rounds)) / count * 1e6


def _round_s(setting: Setting, call: Call, count: int) -> float:
    setting.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    setting.synchronize()
    return time.perf_counter() - started


def kernels_us(setting: Setting, call: Call) -> float | None:
    """Return the microseconds that the GPU computes in one call, copies to and from the host left out.

    None where PyTorch's profiler does not see the GPU.
    """
    if setting.emulated or not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    setting.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(WATCHED_CALLS):
                call()
            torch.cuda.synchronize()
        events: list[Any] = list(found.key_averages())
    except (RuntimeError, AssertionError, AttributeError):  # of a profiler that cannot see the GPU
        return None
    spent = sum(_device_us(event) for event in events if not str(event.key).startswith(_NOT_COUNTED))
    return spent / WATCHED_CALLS or None


def _device_us(event: Any) -> float:
    if event.device_type.name == "CPU":
        return 0.0
    return float(event.self_device_time_total)
