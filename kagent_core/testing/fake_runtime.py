"""FakeRuntime: memory and launches of the fake device, with a close look at what kernels touch."""

from __future__ import annotations

import functools
import inspect
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kagent_core.capture.schemas import torch_dtype
from kagent_core.device import LaunchError, NamedArg, PointerArg, Runtime, ScalarArg, call_kernel
from kagent_core.specs import Access, KernelDescriptor, LaunchConfig, TensorSpec

POISON = 0xA5
"""Every byte of memory that was never written, or was freed, reads as this."""


@dataclass(eq=False)
class FakeBuffer:
    """Memory of the fake device."""

    data: bytearray | memoryview
    freed: bool = False


class FakeFaultError(RuntimeError):
    """A fault that was asked for."""


class HazardError(RuntimeError):
    """A kernel began before an earlier launch that touches the same bytes had finished."""


class AccessError(RuntimeError):
    """A kernel touched memory that its task does not declare, or that is freed."""


@dataclass(frozen=True)
class FakeKernel:
    """A kernel as the fake device launches it.

    Attributes
    ----------
    descriptor
        The kernel.
    takes_config
        Whether its function has a keyword-only parameter ``config``, and so is called with the launch config.
    """

    descriptor: KernelDescriptor
    takes_config: bool


@dataclass(eq=False)
class _Launch:
    """One launch: what it runs and how, and the bytes that its task declares."""

    number: int
    kernel: KernelDescriptor
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    pointers: list[PointerArg]
    done: threading.Event = field(default_factory=threading.Event)


class FakeRuntime(Runtime):
    """Runs Python kernels on memory of its own: later, elsewhere, and with a close look at what they touch.

    Each stream is a thread that waits a random moment before every kernel. A kernel gets tensors on private copies of
    the bytes that its task declares; results are written back element by element. So

    - a write to a tensor that is declared as input is an `AccessError`, and so is memory that was freed;
    - memory that nobody wrote reads as `POISON`, results that a kernel does not fill stay poisoned;
    - a kernel that begins before an earlier launch on the same bytes has finished is a `HazardError`;
    - a scalar is read when the kernel runs, not when it is launched.

    A kernel with a keyword-only parameter ``config`` is given the `LaunchConfig`, and is to do what the threads of that
    grid would do: what too small a grid leaves out stays poisoned.

    Parameters
    ----------
    streams
        How many.
    delay_ms
        Longest wait before a kernel, in milliseconds.
    seed
        Of the waits.
    faults
        For ``allocate``, ``free``, ``copy_in``, ``copy_out``, ``load``, ``launch``, ``kernel``, ``synchronize`` or
        ``event``: the number of the call, from 1, that fails with a `FakeFaultError`.

    Attributes
    ----------
    live
        Buffers that are allocated and not freed.
    launches
        Names of the kernels launched so far.
    copied_in, copied_out
        Bytes moved so far.
    calls
        How often each method was called.
    """

    def __init__(
        self, streams: int = 1, delay_ms: float = 0.0, seed: int = 0, faults: Mapping[str, int] | None = None
    ) -> None:
        self.streams = streams
        self.live = 0
        self.launches: list[str] = []
        self.copied_in = 0
        self.copied_out = 0
        self.calls: Counter[str] = Counter()
        self.faults = dict(faults or {})
        self._delay_ms = delay_ms
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._pending: list[_Launch] = []
        self._since_synchronize = 0
        self._error: Exception | None = None

    # -- memory

    def allocate(self, nbytes: int) -> FakeBuffer:
        """Return poisoned memory."""
        self._count("allocate")
        self.live += 1
        return FakeBuffer(bytearray([POISON]) * max(nbytes, 1))

    def free(self, buffer: FakeBuffer) -> None:
        """Poison the memory and refuse it from here on."""
        self._count("free")
        if buffer.freed:
            raise AccessError("a buffer of the fake device was freed twice")
        buffer.freed = True
        buffer.data[:] = bytes([POISON]) * len(buffer.data)
        self.live -= 1

    def copy_in(self, buffer: FakeBuffer, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes into a buffer, after everything launched before."""
        self._count("copy_in")
        self._wait()
        _check(buffer, byte_offset, data.nbytes)
        buffer.data[byte_offset : byte_offset + data.nbytes] = data.cast("B")
        self.copied_in += data.nbytes

    def copy_out(self, buffer: FakeBuffer, byte_offset: int, data: memoryview) -> None:
        """Copy a buffer's bytes to the host, after everything launched before."""
        self._count("copy_out")
        self._wait()
        _check(buffer, byte_offset, data.nbytes)
        data.cast("B")[:] = buffer.data[byte_offset : byte_offset + data.nbytes]
        self.copied_out += data.nbytes

    # -- kernels

    def load(self, kernel: KernelDescriptor) -> FakeKernel:
        """Return the kernel, and whether it asks for its launch config."""
        self._count("load")
        return FakeKernel(kernel, _takes_config(kernel.function))

    def launch(self, kernel: FakeKernel, config: LaunchConfig, args: Sequence[Any]) -> None:
        """Start a kernel on the first stream."""
        self.launch_on(0, kernel, config, args)

    def launch_on(self, stream: int, kernel: FakeKernel, config: LaunchConfig, args: Sequence[Any]) -> None:
        """Start a kernel on a stream."""
        self._count("launch")
        self.launches.append(kernel.descriptor.name)
        keywords = {"config": config} if kernel.takes_config else {}
        pointers = list(_pointers(args))
        launch = _Launch(self._since_synchronize, kernel.descriptor, tuple(args), keywords, pointers)
        self._since_synchronize += 1
        with self._lock:
            self._pending.append(launch)
        self._stream(stream).put(functools.partial(self._execute, launch, self._random.random() * self._delay_ms))

    def record_event(self, stream: int) -> threading.Event:
        """Return an event that the stream sets when it gets there."""
        self._count("event")
        event = threading.Event()
        self._stream(stream).put(event.set)
        return event

    def wait_event(self, stream: int, event: threading.Event) -> None:
        """Let a stream wait for an event."""
        self._count("event")
        self._stream(stream).put(functools.partial(_wait_for, event))

    def synchronize(self) -> None:
        """Wait for every stream, and raise the first thing that went wrong since the last time."""
        try:
            self._count("synchronize")
        finally:
            self._wait()
            error, self._error = self._error, None
            self._since_synchronize = 0
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads."""
        for stream in self._queues:
            stream.put(None)
        self._queues = []

    def __del__(self) -> None:
        for stream in self._queues:  # threads hold their queue only: a runtime that is gone leaves none behind
            stream.put(None)

    # -- inside

    def _count(self, method: str) -> None:
        self.calls[method] += 1
        if self.faults.get(method) == self.calls[method]:
            raise FakeFaultError(f"injected fault in call {self.calls[method]} of {method}")

    def _stream(self, number: int) -> queue.SimpleQueue[Callable[[], None] | None]:
        while len(self._queues) <= number:
            work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._queues.append(work)
            name = f"fake-stream-{len(self._queues) - 1}"
            threading.Thread(target=_serve, args=(work,), daemon=True, name=name).start()
        return self._queues[number]

    def _wait(self) -> None:
        for launch in list(self._pending):
            launch.done.wait()
        self._pending.clear()

    def _execute(self, launch: _Launch, wait_ms: float) -> None:
        try:
            if self._error is None:
                if wait_ms:
                    time.sleep(wait_ms / 1e3)
                self._check_hazards(launch)
                self._count("kernel")
                _run_kernel(launch)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is told at the next synchronize
            with self._lock:
                if self._error is None:
                    self._error = LaunchError(launch.number, error)
        finally:
            launch.done.set()

    def _check_hazards(self, launch: _Launch) -> None:
        with self._lock:
            earlier = self._pending[: self._pending.index(launch)]
        for other in earlier:
            if not other.done.is_set() and _conflict(launch, other):
                raise HazardError(
                    f"'{launch.kernel.name}' (launch {launch.number}) began before '{other.kernel.name}' "
                    f"(launch {other.number}), which touches the same bytes, had finished"
                )


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := work.get()) is not None:
        job()


def _wait_for(event: threading.Event) -> None:
    event.wait()


def _takes_config(function: Callable[..., Any] | None) -> bool:
    try:
        parameters = inspect.signature(function).parameters if function is not None else {}
    except (TypeError, ValueError):  # not written in Python
        return False
    return "config" in parameters and parameters["config"].kind is inspect.Parameter.KEYWORD_ONLY


def _pointers(args: Iterable[Any]) -> Iterator[PointerArg]:
    for arg in args:
        if isinstance(arg, PointerArg):
            yield arg
        elif isinstance(arg, NamedArg):
            yield from _pointers([arg.value])
        elif isinstance(arg, tuple):
            yield from _pointers(arg)


def _conflict(one: _Launch, other: _Launch) -> bool:
    for a in one.pointers:
        for b in other.pointers:
            if a.buffer is b.buffer and not (a.access is Access.IN and b.access is Access.IN):
                for a_start, a_nbytes in a.runs:
                    if any(a_start < start + nbytes and start < a_start + a_nbytes for start, nbytes in b.runs):
                        return True
    return False


def _run_kernel(launch: _Launch) -> None:
    """Call a kernel with tensors on private copies of what it may touch, then write back what it may write."""
    staged: list[tuple[PointerArg, bytearray, torch.Tensor]] = []

    def stage(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return [stage(item) for item in arg]
        if isinstance(arg, ScalarArg):
            return arg.value  # read now, not when it was launched
        if not isinstance(arg, PointerArg):
            return arg
        start, nbytes = arg.byte_offset, arg.nbytes
        _check(arg.buffer, start, nbytes)
        read = arg.access is not Access.OUT
        held = bytearray(arg.buffer.data[start : start + nbytes]) if read else bytearray([POISON]) * nbytes
        tensor = _tensor_on(held, arg.spec)
        staged.append((arg, bytearray(held), tensor))
        return tensor

    assert launch.kernel.function is not None
    call_kernel(functools.partial(launch.kernel.function, **launch.keywords), launch.args, stage)
    for arg, before, tensor in staged:
        start, nbytes = arg.byte_offset, arg.nbytes
        if nbytes == 0:
            continue
        if arg.access is not Access.IN:
            _tensor_on(arg.buffer.data, arg.spec, start).copy_(tensor)
        elif not _same_bytes(tensor, before, arg.spec):
            raise AccessError(f"'{launch.kernel.name}' wrote {arg.spec}, which it declares as input")


def _tensor_on(data: bytearray | memoryview, spec: TensorSpec, start: int = 0) -> torch.Tensor:
    dtype = torch_dtype(spec.dtype)
    if spec.span == 0:
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=spec.span, offset=start)
    return flat.as_strided(spec.shape, spec.strides)


def _same_bytes(tensor: torch.Tensor, before: bytearray, spec: TensorSpec) -> bool:
    now = torch.as_strided(tensor, (spec.span,), (1,), tensor.storage_offset()).view(torch.uint8)
    return torch.equal(now, torch.frombuffer(before, dtype=torch.uint8))


def _check(buffer: FakeBuffer, byte_offset: int, nbytes: int) -> None:
    if buffer.freed:
        raise AccessError("memory of the fake device was used after it was freed")
    if byte_offset < 0 or byte_offset + nbytes > len(buffer.data):
        raise AccessError(
            f"bytes {byte_offset} to {byte_offset + nbytes} of a fake buffer of {len(buffer.data)} bytes were touched"
        )
