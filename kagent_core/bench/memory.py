"""How much memory a call needs, as PyTorch's allocator sees it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler import profile

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


def measure_memory(call: Callable[[], object]) -> CallMemory:
    """Call a function that was never called before, and call it once more.

    What the first call allocates and does not free is what the function keeps. Where kernels call ``malloc``
    themselves, past PyTorch's allocator, nobody counts it.

    Parameters
    ----------
    call
        Compiles when it is first called. Its result is dropped at once.
    """
    kept = sum(_allocations(call))
    live = peak = 0
    for nbytes in _allocations(call):
        live += nbytes
        peak = max(peak, live)
    return CallMemory(kept, peak)


def _allocations(call: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation in a call, in order; what is freed is negative."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says on stderr that it starts and stops
    gc.collect()
    with profile(use_cpu=True, profile_memory=True) as profiler:
        call()
        gc.collect()  # compiling leaves cycles
    results: Any = profiler.kineto_results
    events = [event for event in results.events() if event.name() == _MEMORY_EVENT]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
