"""DeviceMemory: the pool that all memory of one device comes from."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from weakref import WeakSet

from kagent_core.device import Runtime
from kagent_core.errors import ExecutionError
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import Device

log = get_logger("execute")

Purpose = Literal["intermediates", "inputs", "parameters"]

SMALL_NBYTES = 512
"""A block that is kept serves any request up to this size that fits in it."""

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Block:
    """A buffer of the runtime's, and what it is used for."""

    buffer: Any
    nbytes: int
    purpose: Purpose


@dataclass(frozen=True)
class MemoryUse:
    """What a device's memory is used for, in bytes.

    Attributes
    ----------
    in_use_nbytes
        By plans and parameters.
    cached_nbytes
        Of blocks that nothing uses and that are kept for the next one who asks.
    peak_nbytes
        The most that was in use at once.
    limit_nbytes
        The most that may be in use and cached; None where only the device's driver sets a limit.
    by_purpose
        `in_use_nbytes` by what it is for: ``parameters``, ``intermediates``, ``inputs``.
    """

    in_use_nbytes: int
    cached_nbytes: int
    peak_nbytes: int
    limit_nbytes: int | None
    by_purpose: Mapping[str, int]

    def __str__(self) -> str:
        uses = ", ".join(f"{spelled_nbytes(nbytes)} {purpose}" for purpose, nbytes in self.by_purpose.items() if nbytes)
        limit = "" if self.limit_nbytes is None else f" of {spelled_nbytes(self.limit_nbytes)}"
        told = f"{spelled_nbytes(self.in_use_nbytes)}{limit} in use{f' ({uses})' if uses else ''}"
        return f"{told}, {spelled_nbytes(self.cached_nbytes)} cached, peak {spelled_nbytes(self.peak_nbytes)}"


class Evictable(Protocol):
    """What can give up memory that it does not use at the moment."""

    def idle_since(self) -> float | None:
        """Return when the part that idles longest was used last; None when nothing idles."""

    def evict(self) -> bool:
        """Give that part's memory back; return whether there was any. Called without the device's lock."""


class DeviceMemory:
    """Memory of one device: blocks that are given back are kept, up to a limit, and idle plans make room.

    Parameters
    ----------
    runtime
        The device's.
    device
        For messages.
    lock
        Held while the runtime is used. Whoever takes memory must not hold it: eviction takes other devices' locks.
    limit_nbytes
        The most that may be allocated; None for no limit but the driver's.
    """

    def __init__(
        self, runtime: Runtime, device: Device, lock: threading.RLock, limit_nbytes: int | None = None
    ) -> None:
        self.runtime = runtime
        self.device = device
        self.lock = lock
        self._limit = limit_nbytes
        self._cached: list[tuple[int, int, Block]] = []  # by size; the number keeps blocks from being compared
        self._cached_nbytes = 0
        self._uses: Counter[str] = Counter()
        self._in_use = 0
        self._peak = 0
        self._plans: WeakSet[Any] = WeakSet()
        self._last: list[Callable[[], bool]] = []

    def take(self, nbytes: int, purpose: Purpose, needed_by: str) -> Block:
        """Return a block of at least `nbytes` bytes, with whatever bytes are in it.

        Where the device has none, blocks that are kept for reuse go first, then instances of plans that are not
        running, the one that idles longest first, then parameters that no running plan uses.

        Parameters
        ----------
        nbytes
            How many.
        purpose
            What for.
        needed_by
            Whose they are, for the error.

        Raises
        ------
        ExecutionError
            When there is not enough memory even so.
        """
        nbytes = max(nbytes, 1)
        room = self._make_room()
        while True:
            try:
                with self.lock:
                    return self._taken(nbytes, purpose)
            except MemoryError as error:
                if not next(room, False):
                    raise self._out_of_memory(nbytes, purpose, needed_by, error) from error

    def give(self, block: Block) -> None:
        """Take a block back, for the next one who asks. Nothing that was launched may still use it.

        No more is kept than has been in use at once.
        """
        with self.lock:
            self._in_use -= block.nbytes
            self._uses[block.purpose] -= block.nbytes
            insort(self._cached, (block.nbytes, next(_numbers), block))
            self._cached_nbytes += block.nbytes
            self.trim(self._peak)

    def trim(self, nbytes: int = 0) -> None:
        """Free what is kept for reuse, the largest blocks first, until no more than `nbytes` bytes are kept."""
        with self.lock:
            while self._cached and self._cached_nbytes > nbytes:
                _, _, block = self._cached.pop()
                self._cached_nbytes -= block.nbytes
                self.runtime.free(block.buffer)

    def use(self) -> MemoryUse:
        """Return what the memory is used for."""
        with self.lock:
            return MemoryUse(self._in_use, self._cached_nbytes, self._peak, self._limit, dict(self._uses))

    def register(self, plan: Evictable) -> None:
        """Let a plan make room when memory is short; it is not kept alive."""
        with self.lock:
            self._plans.add(plan)

    def register_last(self, evict: Callable[[], bool]) -> None:
        """Let something make room when no plan can any more: it gives something up, and returns whether it did."""
        self._last.append(evict)

    def _taken(self, nbytes: int, purpose: Purpose) -> Block:
        block = self._from_cache(nbytes)
        if block is None:
            block = Block(self._allocated(nbytes), nbytes, purpose)
        block.purpose = purpose
        self._uses[purpose] += block.nbytes
        self._in_use += block.nbytes
        self._peak = max(self._peak, self._in_use)
        return block

    def _from_cache(self, nbytes: int) -> Block | None:
        """The smallest block that is large enough, unless more than an eighth of it would lie idle."""
        index = bisect_left(self._cached, (nbytes, -1))
        if index == len(self._cached) or self._cached[index][0] > max(SMALL_NBYTES, nbytes + nbytes // 8):
            return None
        _, _, block = self._cached.pop(index)
        self._cached_nbytes -= block.nbytes
        return block

    def _allocated(self, nbytes: int) -> Any:
        if self._limit is not None and self._in_use + self._cached_nbytes + nbytes > self._limit:
            self.trim(max(self._limit - self._in_use - nbytes, 0))
            if self._in_use + nbytes > self._limit:
                raise MemoryError(f"the limit is {spelled_nbytes(self._limit)}")
        try:
            return self.runtime.allocate(nbytes)
        except MemoryError:
            if not self._cached:
                raise
            self.trim()
            return self.runtime.allocate(nbytes)

    def _make_room(self) -> Iterator[bool]:
        """Give up one thing at each step."""
        while True:
            with self.lock:
                plans = [(since, plan) for plan in self._plans if (since := plan.idle_since()) is not None]
            if not plans:
                break
            _, plan = min(plans, key=lambda pair: pair[0])
            if plan.evict():  # else another thread has just begun to run it
                log.debug("%s: an idle instance of a plan gave its memory up: %s", self.device, self.use())
                yield True
        for evict in self._last:
            while evict():
                log.debug("%s: a parameter gave its memory up: %s", self.device, self.use())
                yield True

    def _out_of_memory(self, nbytes: int, purpose: Purpose, needed_by: str, cause: MemoryError) -> ExecutionError:
        # what is wanted and what there is, to the byte: a request may miss by little
        return ExecutionError(
            f"{self.device} gave no {nbytes} bytes for the {purpose} of {needed_by}: {str(cause) or 'MemoryError'}; "
            f"{self.use()}",
            hint="run a smaller batch, raise device_memory_limit where it is set, call from fewer threads at once, or "
            "free what else holds the device's memory; what is in use belongs to calls that are running",
        )


def spelled_nbytes(nbytes: int) -> str:
    """Return a number of bytes for people.

    Examples
    --------
    >>> spelled_nbytes(100), spelled_nbytes(1536), spelled_nbytes(3 * 2**30)
    ('100 bytes', '1.5 KiB', '3.0 GiB')
    """
    if nbytes < 1024:
        return f"{nbytes} bytes"
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"
