"""The device under test, opened anew: its runtime in reach, what falls back noted, its calls watched."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kagent_core.capture.graph import CapturedGraph
from kagent_core.config import Config, load_config
from kagent_core.device import OpenDevice, Runtime
from kagent_core.hooks import hookimpl
from kagent_core.pipeline import CompiledGraph
from kagent_core.schedule.request import PlacementRequest
from kagent_core.session import Session, session_for, use_plugin
from kagent_core.specs import Device, DeviceInfo, Placement
from kagent_core.testing.collecting import only_new_garbage
from kagent_core.testing.conformance.case import CannotRunError, Ran

METHODS = (
    "allocate",
    "free",
    "copy_in",
    "copy_out",
    "load",
    "launch",
    "synchronize",
    "launch_on",
    "record_event",
    "wait_event",
    "prepare",
    "prepare_on",
    "import_host",
)
"""What the core calls of a runtime while programs are built and run."""

PREPARED = "a prepared launch"
"""Counts, and fails, what `Runtime.prepare` or `prepare_on` returned, each time that it is called."""

GUARD_NBYTES = 256
GUARD = b"\x5c" * GUARD_NBYTES
"""What lies behind every buffer of a runtime that is watched with guards."""


class InjectedFaultError(RuntimeError):
    """A call of the runtime that the kit let fail."""


class Watch:
    """Counts the calls of a runtime's methods, lets one of them fail, looks at what lies behind its buffers.

    Takes the place of the methods on the instance, so that calls that the runtime makes of its own are seen too.

    Parameters
    ----------
    runtime
        The runtime.
    guards
        Whether every buffer is made larger than asked for, by bytes that nobody may touch.

    Attributes
    ----------
    calls
        How often each method was called.
    live
        Buffers that were allocated and not freed.
    """

    def __init__(self, runtime: Runtime, guards: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.live = 0
        self._runtime = runtime
        self._guards = guards
        self._guarded: list[tuple[Any, int]] = []
        self._failing: tuple[str, int] | None = None
        self._original = {method: getattr(runtime, method) for method in METHODS}
        try:
            for method in METHODS:
                setattr(runtime, method, functools.partial(self._call, method))
        except AttributeError as error:
            raise CannotRunError(f"{type(runtime).__name__} cannot be watched: {error}") from None

    def fail(self, method: str, nth: int) -> None:
        """Let the nth call of a method from now on, counted from 1, raise an `InjectedFaultError`."""
        self._failing = (method, self.calls[method] + nth)

    def disarm(self) -> bool:
        """Let nothing fail any more; return whether something was still to fail."""
        pending, self._failing = self._failing is not None, None
        return pending

    def overrun(self) -> list[int]:
        """Sizes of the buffers whose guards were written over."""
        sizes = []
        for buffer, nbytes in self._guarded:
            behind = bytearray(GUARD_NBYTES)
            self._original["copy_out"](buffer, nbytes, memoryview(behind))
            if bytes(behind) != GUARD:
                sizes.append(nbytes)
        return sizes

    def release(self) -> None:
        """Give the runtime its methods back."""
        for method in METHODS:
            vars(self._runtime).pop(method, None)

    def _call(self, method: str, *args: Any) -> Any:
        self._count(method)
        if method == "allocate":
            return self._allocate(*args)
        if method in ("prepare", "prepare_on"):
            start = self._original[method](*args)
            return None if start is None else functools.partial(self._start, start)
        if method == "import_host":
            imported = self._original[method](*args)
            self.live += imported is not None
            return imported
        if method == "free":
            self._guarded = [(buffer, nbytes) for buffer, nbytes in self._guarded if buffer is not args[0]]
            self.live -= 1
        return self._original[method](*args)

    def _count(self, method: str) -> None:
        self.calls[method] += 1
        if self._failing == (method, self.calls[method]):
            self._failing = None
            raise InjectedFaultError(f"injected fault in call {self.calls[method]} of {method}")

    def _start(self, start: Callable[[], object]) -> object:
        self._count(PREPARED)
        return start()

    def _allocate(self, nbytes: int) -> Any:
        buffer = self._original["allocate"](nbytes + GUARD_NBYTES if self._guards else nbytes)
        self.live += 1
        if self._guards:
            self._original["copy_in"](buffer, nbytes, memoryview(bytearray(GUARD)))
            self._guarded.append((buffer, nbytes))
        return buffer


@dataclass
class Opened:
    """The device under test in a session of its own.

    Attributes
    ----------
    session
        The session.
    device
        What the plugin brought.
    lock
        Held while the runtime is used, as the executor does.
    fallbacks
        Why operators were placed elsewhere so far, by signature.
    watch
        What watches the runtime; None unless it was asked for.
    """

    session: Session
    device: OpenDevice
    lock: Any
    fallbacks: dict[str, str]
    watch: Watch | None = None

    @property
    def runtime(self) -> Runtime:
        """The device's runtime."""
        return self.device.runtime

    @property
    def watched(self) -> Watch:
        """The watch, where it was asked for."""
        assert self.watch is not None, "opened without watch=True"
        return self.watch

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[Any]:
        """Allocate a buffer for the ``with`` block."""
        with self.lock:
            buffer = self.runtime.allocate(nbytes)
        assert buffer is not None, f"allocate({nbytes}) returned None, expected a buffer or a MemoryError"
        try:
            yield buffer
        finally:
            with self.lock:
                self.runtime.free(buffer)

    def write(self, buffer: Any, byte_offset: int, data: bytes) -> None:
        """Copy bytes in."""
        with self.lock:
            self.runtime.copy_in(buffer, byte_offset, memoryview(bytearray(data)))

    def read(self, buffer: Any, byte_offset: int, nbytes: int) -> bytes:
        """Copy bytes out."""
        data = bytearray(nbytes)
        with self.lock:
            self.runtime.copy_out(buffer, byte_offset, memoryview(data))
        return bytes(data)

    def compile(self, function: Callable[..., Any], *args: torch.Tensor) -> CompiledGraph:
        """Trace a function of tensors that returns a tuple, and compile it, its plans in reach."""
        graph = make_fx(function, tracing_mode="fake")(*args)
        return CompiledGraph(self.session, CapturedGraph(graph, getattr(function, "__name__", "program")))

    def ran(self, note: str = "") -> Ran:
        """Return what a case that passed tells: what fell back so far, and a note."""
        return Ran(tuple(self.fallbacks.items()), note)


@dataclass(eq=False)  # pluggy compares plugins
class _Door:
    """The plugin through which the kit comes in: it wraps the device's runtime and notes what is placed elsewhere."""

    wanted: Device
    watched: bool
    guards: bool
    watches: list[Watch] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)

    @hookimpl(wrapper=True)
    def kagent_runtime(self, info: DeviceInfo, config: Config) -> Any:
        runtime = yield
        if self.watched and info.device.type == self.wanted.type and isinstance(runtime, Runtime):
            self.watches.append(Watch(runtime, self.guards))
        return runtime

    @hookimpl(wrapper=True)
    def kagent_place(self, request: PlacementRequest) -> Any:
        placements: Sequence[Placement] | None = yield
        for call, placement in zip(request.program.calls, placements or (), strict=False):
            if placement.device.type != self.wanted.type:
                self.fallbacks.setdefault(call.signature, placement.reason)
        return placements


@contextlib.contextmanager
def opened(device: str, *, watch: bool = False, guards: bool = False, **options: Any) -> Iterator[Opened]:
    """Open a device anew, in a session of its own; whatever is compiled for it in the ``with`` block uses this session.

    Parameters
    ----------
    device
        As users name it.
    watch
        Whether the runtime's calls are counted.
    guards
        Whether buffers get guards behind them, too.
    **options
        Config keys beside the device.
    """
    door = _Door(Device.parse(device), watch or guards, guards)
    with only_new_garbage(), use_plugin(door):
        session = session_for(load_config(options={"device": device, **options}))
        try:
            executor = session.executor_for(session.target.device)
            watched = door.watches[0] if door.watches else None
            if watched is not None:  # what the runtime keeps for itself, such as for waiting, is no plan's
                with executor.lock:
                    executor.opened.runtime.synchronize()
                watched.live = 0
            yield Opened(session, executor.opened, executor.lock, door.fallbacks, watched)
        finally:
            close_session(session)
            for watch_of in door.watches:
                watch_of.release()


def close_session(session: Session) -> None:
    """Let go of what was compiled in a session, and close its devices."""
    if session.reports:  # something was compiled
        torch._dynamo.reset()
        gc.collect()
        session.close_abandoned()
    session.close()


@contextlib.contextmanager
def registered(device: str) -> Iterator[None]:
    """Register `kagent_core.testing.FakeDevice` for the ``with`` block where a device is a fake one nobody brings."""
    from kagent_core.plugins import PluginManager
    from kagent_core.testing.fake import DEVICE_TYPE, FakeDevice

    named = Device.parse(device)
    if named.type != DEVICE_TYPE or _is_known(device) or DEVICE_TYPE in PluginManager(load_config()).device_types():
        yield
        return
    with use_plugin(FakeDevice(count=(named.index or 0) + 1)):
        yield


def _is_known(device: str) -> bool:
    from kagent_core.errors import DeviceError

    try:
        session_for(load_config(options={"device": device}))
    except DeviceError:
        return False
    return True
