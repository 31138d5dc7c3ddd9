"""Launches whose results lie between guard zones: whatever a kernel writes before or behind them is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kagent_core.device import NamedArg, PointerArg, Runtime
from kagent_core.specs import Access, LaunchConfig

GUARD_NBYTES = 1 << 14
"""Before and behind what a kernel writes: more than the threads of two blocks of 1024 reach with an element each."""

_GUARD = b"\x5c" * GUARD_NBYTES
_ALIGNMENT = 256
"""Bytes: a tensor begins as many behind a multiple of this as it did."""


class GuardedLaunches:
    """Takes the place of a runtime's launches.

    What a kernel writes is in memory of its own for the time of the launch, between zones that nobody may touch, and is
    copied back behind it. A tensor that lies in memory that the kernel reads by another argument stays where it is.

    Attributes
    ----------
    overruns
        What was written beside tensors since this was last emptied, in words.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.overruns: list[str] = []
        self._runtime = runtime
        self._inside = False
        self._launch = runtime.launch
        self._launch_on = runtime.launch_on

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every launch inside the ``with`` block."""

        def nothing_prepared(*args: Any) -> None:
            return None

        own: dict[str, Callable[..., Any]] = {
            "launch": lambda *args: self._guarded(self._launch, (), *args),
            "launch_on": lambda stream, *args: self._guarded(self._launch_on, (stream,), *args),
            **dict.fromkeys(("prepare", "prepare_on", "record"), nothing_prepared),
        }
        before = {name: vars(self._runtime)[name] for name in own if name in vars(self._runtime)}
        vars(self._runtime).update(own)
        try:
            yield
        finally:
            for name in own:
                del vars(self._runtime)[name]
            vars(self._runtime).update(before)

    def _guarded(
        self,
        launch: Callable[..., None],
        first: tuple[Any, ...],
        kernel: Any,
        config: LaunchConfig,
        args: Sequence[Any],
    ) -> None:
        if self._inside:  # as where `launch` is `launch_on` of the first stream
            launch(*first, kernel, config, args)
            return
        self._inside = True
        pointers = list(_pointers(args))
        guarded: list[tuple[PointerArg, PointerArg]] = []
        try:
            self._runtime.synchronize()
            for pointer in filter(lambda each: _takes_guards(each, pointers), pointers):
                guarded.append((pointer, self._moved(pointer)))  # noqa: PERF401  freed below if the next one fails
            launch(*first, kernel, config, [_passed(arg, guarded) for arg in args])
            self._runtime.synchronize()
            for pointer, moved in guarded:
                self._look(pointer, moved)
        finally:
            self._inside = False
            for _, moved in guarded:
                self._runtime.free(moved.buffer)

    def _moved(self, pointer: PointerArg) -> PointerArg:
        """Return a tensor's memory between guards, with what it holds."""
        begin, nbytes = GUARD_NBYTES + pointer.byte_offset % _ALIGNMENT, pointer.nbytes
        held = bytearray(nbytes)
        self._runtime.copy_out(pointer.buffer, pointer.byte_offset, memoryview(held))
        buffer = self._runtime.allocate(begin + nbytes + GUARD_NBYTES)
        before = _GUARD + bytes([_GUARD[0]]) * (begin - GUARD_NBYTES)
        self._runtime.copy_in(buffer, 0, memoryview(before + bytes(held) + _GUARD))
        return replace(pointer, buffer=buffer, byte_offset=begin)

    def _look(self, pointer: PointerArg, moved: PointerArg) -> None:
        """Copy a tensor's memory back, and note what was written beside it."""
        begin, end = moved.byte_offset, moved.byte_offset + moved.nbytes
        found = bytearray(end + GUARD_NBYTES)
        self._runtime.copy_out(moved.buffer, 0, memoryview(found))
        for where, zone in (("before", found[:begin]), ("behind", found[end:])):
            count = len(zone) - zone.count(_GUARD[0])
            if count:
                self.overruns.append(f"{count} bytes {where} {pointer.spec} were written")
        self._runtime.copy_in(pointer.buffer, pointer.byte_offset, memoryview(found)[begin:end])


def _pointers(args: Sequence[Any]) -> Iterator[PointerArg]:
    for arg in args:
        value = arg.value if isinstance(arg, NamedArg) else arg
        if isinstance(value, PointerArg):
            yield value
        elif isinstance(value, tuple):
            yield from _pointers(value)


def _passed(arg: Any, guarded: Sequence[tuple[PointerArg, PointerArg]]) -> Any:
    if isinstance(arg, NamedArg):
        return replace(arg, value=_passed(arg.value, guarded))
    if isinstance(arg, tuple):
        return tuple(_passed(item, guarded) for item in arg)
    return next((moved for pointer, moved in guarded if pointer is arg), arg)


def _takes_guards(pointer: PointerArg, pointers: Sequence[PointerArg]) -> bool:
    """Whether a kernel writes a tensor, and reaches its memory by no other argument."""
    if pointer.access is Access.IN or not pointer.nbytes:
        return False
    begin, end = pointer.byte_offset, pointer.byte_offset + pointer.nbytes
    return not any(
        other.buffer is pointer.buffer and other.byte_offset < end and begin < other.byte_offset + other.nbytes
        for other in pointers
        if other is not pointer
    )
