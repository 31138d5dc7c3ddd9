"""Kernels that are taken only where they were measured to be the fastest."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kagent_core.config import Config
from kagent_core.profile.agent import ProfilerAgent
from kagent_core.profile.file import profile_path
from kagent_core.profile.problem import problem_key, size_class
from kagent_core.specs import DeviceInfo, OpCall


class MeasuredFaster:
    """What a kernel's `KernelDescriptor.accepts` is, where ``kagent tune`` decides whether it is taken.

    Such a kernel is one of several ways to compute the same, a library's mostly. It is taken for a problem where the
    ProfilerAgent knows it to be the fastest one, or for one of about that size. Nothing is read until a call comes that
    the kernel could take, and where no timings were ever kept, nothing at all.

    Parameters
    ----------
    info
        The device.
    config
        Says where timings are, and whether they are used.
    kernel
        The kernel's name.
    takes
        Asked first: why the kernel cannot compute a call at all, or None. By default it computes every one.
    """

    def __init__(
        self,
        info: DeviceInfo,
        config: Config,
        kernel: str,
        takes: Callable[[OpCall], str | None] | None = None,
    ) -> None:
        self.takes = takes
        self._info = info
        self._path = profile_path(config) if config.tuned else None
        self._kernel = kernel
        self._profiler: ProfilerAgent | None = None
        self._lock = threading.Lock()

    def __call__(self, call: OpCall) -> str | None:
        """Return why the kernel does not take a call, or None."""
        cannot = self.takes(call) if self.takes is not None else None
        if cannot is not None:
            return cannot
        profiler = self._opened()
        if profiler is not None and profiler.has_configs(self._info):
            for problem in (problem_key((call,)), size_class(call)):
                if profiler.tuned(self._info, self._kernel, problem) is not None:
                    return None
        return f"was not measured to be the fastest one; `kagent tune {self._info.device}` measures that"

    def _opened(self) -> ProfilerAgent | None:
        with self._lock:
            if self._profiler is None and self._path is not None and self._path.exists():
                self._profiler = ProfilerAgent(self._path)
            return self._profiler
