"""The ProfilerAgent: it knows how long an operator takes where, and which launch config is best."""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kagent_core.inspect.logs import get_logger
from kagent_core.profile.problem import problem_key
from kagent_core.profile.store import (
    ConfigKey,
    DeviceKey,
    Profile,
    ProfileFile,
    ProfileVersionError,
    Timing,
    TimingKey,
    TunedConfig,
    is_busy,
)
from kagent_core.specs import DeviceInfo, LaunchConfig, OpCall, TaskFinished

log = get_logger("profile")

T = TypeVar("T")


@dataclass(frozen=True)
class TimingEntry:
    """One line of what is known about times.

    Attributes
    ----------
    device, name, driver
        Identity of the device.
    kernel, signature
        What ran; the signatures of a fusion group are joined by ``+``.
    problem
        See `kagent_core.profile.problem.problem_key`.
    count
        How often it was measured.
    mean_ms, min_ms
        In milliseconds.
    """

    device: str
    name: str
    driver: str
    kernel: str
    signature: str
    problem: str
    count: int
    mean_ms: float
    min_ms: float


@dataclass(frozen=True)
class ConfigEntry:
    """One line of what is known about launch configs: the fastest for a kernel and a problem on a device."""

    device: str
    name: str
    driver: str
    kernel: str
    problem: str
    config: LaunchConfig
    elapsed_ms: float


class ProfilerAgent:
    """Keeps timings and tuned launch configs, across processes and for one user.

    Records are buffered and written in one transaction: by `flush` and `close`, after every `flush_every`
    records, and at exit. What other processes write after a device was first asked about is not seen. When
    the file cannot be used, the agent says so once, as a WARNING, and works in memory. Safe with many threads
    and processes.

    Parameters
    ----------
    path
        The file; None keeps everything in memory.
    flush_every
        Number of records after which the buffer is written.

    Examples
    --------
    >>> from kagent_core.specs import Device, DeviceInfo, LaunchConfig
    >>> agent = ProfilerAgent(None)
    >>> toy = DeviceInfo(Device("toy", 0), "Toy 3000")
    >>> agent.record_config(toy, "relu", "f32[1024]", LaunchConfig(block=(64, 1, 1)), elapsed_ms=0.5)
    >>> agent.record_config(toy, "relu", "f32[1024]", LaunchConfig(block=(256, 1, 1)), elapsed_ms=0.2)
    >>> print(agent.suggest(toy, "relu", "f32[1024]"))
    grid (1, 1, 1) x block (256, 1, 1)
    """

    def __init__(self, path: Path | None, *, flush_every: int = 1000) -> None:
        self._buffer = _Buffer(None if path is None else ProfileFile(path), flush_every)
        # runs at exit, too; it must not refer to the agent itself
        weakref.finalize(self, self._buffer.close)

    def record(self, info: DeviceInfo, event: TaskFinished) -> None:
        """Note the time of a task. One that failed, or computes no operator, is left out."""
        calls = event.task.calls
        if event.error is None and calls and _is_time(event.elapsed_ms):
            signature = "+".join(call.signature for call in calls)
            key = TimingKey(DeviceKey.of(info), event.task.kernel.name, signature, problem_key(calls))
            self._buffer.add_timing(key, float(event.elapsed_ms))

    def time_ms(self, info: DeviceInfo, call: OpCall) -> float | None:
        """Return the shortest time that a call of this size took on a device, with any kernel.

        Returns
        -------
        float or None
            In milliseconds; None when it was never measured.
        """
        known = self._buffer.known_of(DeviceKey.of(info))
        return known.times.get((call.signature, problem_key((call,))))

    def record_config(
        self, info: DeviceInfo, kernel_name: str, problem: str, config: LaunchConfig, elapsed_ms: float
    ) -> None:
        """Note the time that a kernel took with a launch config; only the fastest one is kept."""
        if _is_time(elapsed_ms):
            key = ConfigKey(DeviceKey.of(info), kernel_name, problem)
            self._buffer.add_config(key, TunedConfig(config, float(elapsed_ms)))

    def suggest(self, info: DeviceInfo, kernel_name: str, problem: str) -> LaunchConfig | None:
        """Return the fastest launch config known for a kernel and a problem on a device, or None."""
        tuned = self.tuned(info, kernel_name, problem)
        return None if tuned is None else tuned.config

    def tuned(self, info: DeviceInfo, kernel_name: str, problem: str) -> TunedConfig | None:
        """Return the fastest launch config known and its time, as `suggest`; reads launch configs alone."""
        return self._buffer.configs_of(DeviceKey.of(info)).get((kernel_name, problem))

    def has_configs(self, info: DeviceInfo) -> bool:
        """Whether a launch config is known for any kernel on a device."""
        return bool(self._buffer.configs_of(DeviceKey.of(info)))

    def forget_configs(self, info: DeviceInfo, problems: Collection[str] | None = None) -> None:
        """Forget the launch configs of one device, for some problems or for all, in the file as well."""
        self._buffer.forget_configs(DeviceKey.of(info), problems)

    def entries(self) -> list[TimingEntry]:
        """Every timing, of all devices, sorted."""
        timings = sorted(self._buffer.everything().timings.items())
        return [
            TimingEntry(*key.where, *key[1:], timing.count, timing.mean_ms, timing.min_ms) for key, timing in timings
        ]

    def config_entries(self) -> list[ConfigEntry]:
        """Every launch config, of all devices, sorted."""
        configs = sorted(self._buffer.everything().configs.items())
        return [ConfigEntry(*key.where, *key[1:], tuned.config, tuned.elapsed_ms) for key, tuned in configs]

    def clear(self) -> None:
        """Forget everything, in the file as well."""
        self._buffer.clear()

    def flush(self) -> None:
        """Write what is buffered."""
        self._buffer.flush()

    def close(self) -> None:
        """Write what is buffered. What comes later is buffered again, and written at exit."""
        self._buffer.close()


def _is_time(elapsed_ms: float) -> bool:
    return math.isfinite(elapsed_ms) and elapsed_ms >= 0


@dataclass
class _Known:
    """What queries about one device need."""

    times: dict[tuple[str, str], float] = field(default_factory=dict)

    def add_timing(self, key: TimingKey, min_ms: float) -> None:
        short = (key.signature, key.problem)
        self.times[short] = min(min_ms, self.times.get(short, math.inf))


class _Configs(dict[tuple[str, str], TunedConfig]):
    """Launch configs of one device, by kernel and problem."""

    def add(self, key: ConfigKey, tuned: TunedConfig) -> None:
        short = (key.kernel, key.problem)
        known = self.get(short)
        if known is None or tuned.elapsed_ms < known.elapsed_ms:
            self[short] = tuned


class _Buffer:
    """Records on their way to the file, and what was read from it.

    Two locks, always taken in this order: `_io_lock` while the file is in use, `_lock` for the dictionaries.
    A thread that records never waits for the disk, unless it is one that has to write.
    """

    def __init__(self, file: ProfileFile | None, flush_every: int) -> None:
        self._file = file
        self._flush_every = flush_every
        self._pending = Profile()
        self._unwritten = 0
        self._known: dict[DeviceKey, _Known] = {}
        self._configs: dict[DeviceKey, _Configs] = {}
        self._make_locks()
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=_ForkedChild(self))

    def _make_locks(self) -> None:
        self._io_lock = threading.Lock()
        self._lock = threading.Lock()

    def add_timing(self, key: TimingKey, elapsed_ms: float) -> None:
        with self._lock:
            self._pending.add_timing(key, Timing(1, elapsed_ms, elapsed_ms))
            known = self._known.get(key.where)
            if known is not None:
                known.add_timing(key, elapsed_ms)
            due = self._count()
        if due:
            self.flush()

    def add_config(self, key: ConfigKey, tuned: TunedConfig) -> None:
        with self._lock:
            self._pending.add_config(key, tuned)
            known = self._configs.get(key.where)
            if known is not None:
                known.add(key, tuned)
            due = self._count()
        if due:
            self.flush()

    def _count(self) -> bool:
        self._unwritten += 1
        return self._file is not None and self._unwritten >= self._flush_every

    def known_of(self, where: DeviceKey) -> _Known:
        known = self._known.get(where)
        if known is not None:
            return known
        with self._io_lock:
            read = self._try_file(lambda file: file.read(where))
            with self._lock:
                profile, known = read or Profile(), _Known()
                profile.merge(self._pending.of_device(where))
                for timing_key, timing in profile.timings.items():
                    known.add_timing(timing_key, timing.min_ms)
                if read is not None or self._file is None:  # else it is busy, and is read the next time
                    self._known[where] = known
                return known

    def configs_of(self, where: DeviceKey) -> _Configs:
        known = self._configs.get(where)
        if known is not None:
            return known
        with self._io_lock:
            read = self._try_file(lambda file: file.read_configs(where))
            with self._lock:
                profile, known = read or Profile(), _Configs()
                profile.merge(self._pending.of_device(where))
                for key, tuned in profile.configs.items():
                    known.add(key, tuned)
                if read is not None or self._file is None:
                    self._configs[where] = known
                return known

    def forget_configs(self, where: DeviceKey, problems: Collection[str] | None) -> None:
        self.flush()
        with self._io_lock:
            self._try_file(lambda file: file.forget_configs(where, problems))
            with self._lock:
                for key in list(self._pending.configs):
                    if key.where == where and (problems is None or key.problem in problems):
                        del self._pending.configs[key]
                self._configs.pop(where, None)

    def everything(self) -> Profile:
        self.flush()
        with self._io_lock:
            profile = self._try_file(lambda file: file.read()) or Profile()
            with self._lock:
                profile.merge(self._pending)
                return profile

    def flush(self) -> None:
        with self._io_lock:
            with self._lock:
                if self._file is None or not self._pending:
                    return
                taken, self._pending, self._unwritten = self._pending, Profile(), 0

            def write(file: ProfileFile) -> bool:
                file.write(taken)
                return True

            if self._try_file(write):
                log.debug("wrote %d timings, %d launch configs", len(taken.timings), len(taken.configs))
                return
            with self._lock:
                self._pending.merge(taken)

    def close(self) -> None:
        self.flush()
        with self._lock:
            if self._file is not None and self._pending:
                log.warning(
                    "%d timings and %d launch configs were not written: '%s' is in use by others",
                    len(self._pending.timings),
                    len(self._pending.configs),
                    self._file.path,
                )

    def clear(self) -> None:
        with self._io_lock:
            self._try_file(lambda file: file.clear())
            with self._lock:
                self._pending, self._unwritten = Profile(), 0
                self._known.clear()
                self._configs.clear()

    def _try_file(self, work: Callable[[ProfileFile], T]) -> T | None:
        """Use the file, if there is one. When it cannot be used, say so and go on in memory."""
        if self._file is None:
            return None
        try:
            return work(self._file)
        except (OSError, sqlite3.Error, ProfileVersionError) as error:
            if is_busy(error):
                log.info("the file of timings is in use by others; trying again later")
            else:
                log.warning("timings are kept in memory only: '%s': %s", self._file.path, error)
                self._file = None
            return None

    def forget_the_parents(self) -> None:
        """In a forked child: leave the buffered records to the parent, which will write them itself."""
        self._make_locks()  # a thread that is not here any more may have held the old ones
        if self._file is not None:
            self._pending, self._unwritten = Profile(), 0


class _ForkedChild:
    """What a forked child does, without keeping the buffer alive."""

    def __init__(self, buffer: _Buffer) -> None:
        self._buffer = weakref.ref(buffer)

    def __call__(self) -> None:
        buffer = self._buffer()
        if buffer is not None:
            buffer.forget_the_parents()
