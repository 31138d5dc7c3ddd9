"""How much memory a call needs, as PyTorch's allocator sees it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler import profile

from kagent_core.bench.timing import no_collection

_MEMORY_EVENT = "[memory]"  # as the profiler names it


@dataclass(frozen=True)
class CallMemory:
    """Memory of a compiled function.

    Attributes
    ----------
    kept_nbytes
        What it keeps from call to call, such as an arena.
    peak_nbytes
        Most of what a call allocates and has not freed yet, its results among it.
    """

    kept_nbytes: int
    peak_nbytes: int

    @property
    def nbytes(self) -> int:
        """Everything that there must be for a call besides its arguments."""
        return self.kept_nbytes + self.peak_nbytes

    def as_dict(self) -> dict[str, int]:
        """Return the values for JSON."""
        return {"kept_nbytes": self.kept_nbytes, "peak_nbytes": self.peak_nbytes}


def measure_memory(calls: Mapping[str, Callable[[], object]]) -> dict[str, CallMemory]:
    """Call functions that were never called before, each twice.

    What the first call allocates and does not free is what the function keeps. Where kernels call ``malloc``
    themselves, past PyTorch's allocator, nobody counts it.

    Parameters
    ----------
    calls
        By name. They compile when they are first called. Their results are dropped at once.
    """
    with no_collection():
        gc.freeze()  # so that collecting what compiling leaves is quick
        try:
            return {name: _measure(call) for name, call in calls.items()}
        finally:
            gc.unfreeze()


def _measure(call: Callable[[], object]) -> CallMemory:
    def first_call() -> None:
        call()
        gc.collect()  # compiling leaves cycles

    kept = sum(_allocations(first_call))
    live = peak = 0
    for nbytes in _allocations(call):
        live += nbytes
        peak = max(peak, live)
    return CallMemory(kept, peak)


def _allocations(call: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation in a call, in order; what is freed is negative."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says on stderr that it starts and stops
    with profile(use_cpu=True, profile_memory=True) as profiler:
        call()
    results: Any = profiler.kineto_results
    events = [event for event in results.events() if event.name() == _MEMORY_EVENT]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
