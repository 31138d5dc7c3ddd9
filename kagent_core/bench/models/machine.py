"""What the machine can do, as the kernels of a model are compared with it: its best product, and copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.bench.timing import no_collection

PRODUCT = 512
"""Rows, columns and depth of the product: its three matrices fit the second-level cache of many processors."""

COPIES = (2**17, 2**21, 2**24, 2**27)
"""Bytes that copies read and write in all."""

_SECONDS, _BATCH_SECONDS = 0.2, 0.002


@dataclass(frozen=True)
class Machine:
    """The most that was measured.

    Attributes
    ----------
    gflops
        10⁹ floating-point operations per second of a float32 product whose weights oneDNN has packed.
    copies
        Pairs of bytes and 10⁹ bytes per second, of copies of different sizes, ascending: reading and writing both
        count. Small ones stay in the caches.
    """

    gflops: float
    copies: Sequence[tuple[int, float]]

    def bandwidth(self, nbytes: int) -> float:
        """Return 10⁹ bytes per second of the smallest copy that moves as much as a kernel, or of the largest."""
        return next((speed for size, speed in self.copies if size >= nbytes), self.copies[-1][1])

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "product_gflops": round(self.gflops, 1),
            "copy_gbytes_per_s": {str(nbytes): round(speed, 1) for nbytes, speed in self.copies},
        }


def measure_machine() -> Machine:
    """Measure with the threads that torch is set to."""
    with no_collection(), torch.no_grad():
        return Machine(_product(), [(nbytes, _copy(nbytes)) for nbytes in COPIES])


def _product() -> float:
    x, weight = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PRODUCT)
    flops = 2 * PRODUCT**3
    return flops / _seconds(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")) / 1e9


def _copy(nbytes: int) -> float:
    source = torch.ones(nbytes // 8)
    target = torch.empty_like(source)
    return nbytes / _seconds(lambda: target.copy_(source)) / 1e9


def _seconds(call: Callable[[], object]) -> float:
    """Return the least seconds of a call, as the mean of as many as take a few milliseconds."""
    call()
    began = time.perf_counter()
    call()
    calls = max(1, int(_BATCH_SECONDS / max(time.perf_counter() - began, 1e-7)))
    least, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        least = min(least, (time.perf_counter() - began) / calls)
    return least
