"""Where generated kernels report errors of the user's: an index out of range, an integer divided by zero."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kagent_core.device import PointerArg
from kagent_core.execute.pool import Block, DeviceMemory
from kagent_core.specs import Access, DType, KernelTask, TensorSpec

_SIZE = 8
_NUMBER = DType("int64", _SIZE)


class Reports:
    """One int64 of device memory for each task whose kernel reports, all 0 unless something went wrong.

    Parameters
    ----------
    memory
        The device's.
    tasks
        Of a segment.
    """

    def __init__(self, memory: DeviceMemory, tasks: Sequence[KernelTask]) -> None:
        self._memory = memory
        self._runtime = memory.runtime
        self._slots = {task.id: slot for slot, task in enumerate(t for t in tasks if t.kernel.reports)}
        self._nbytes = _SIZE * len(self._slots)
        self._block: Block | None = None
        self._buffer: Any = None
        if self._slots:
            self._block = memory.take(self._nbytes, "intermediates", f"{tasks[0].calls[0]} and what follows")
            self._buffer = self._block.buffer
            with memory.lock:
                self._clear()

    def args(self, task: KernelTask) -> list[PointerArg]:
        """Return the argument that a task's kernel has behind the packed ones; none for one that reports nothing."""
        slot = self._slots.get(task.id)
        if slot is None:
            return []
        spec = TensorSpec(_NUMBER, (1,), (1,), 0, -1)
        return [PointerArg(self._buffer, slot * _SIZE, spec, Access.INOUT)]

    def first(self) -> tuple[int, int] | None:
        """Return the id of the first task that reported something and what, and forget it; None when all went well.

        To be called when the device has finished.
        """
        if not self._slots:
            return None
        found = bytearray(self._nbytes)
        self._runtime.copy_out(self._buffer, 0, memoryview(found))
        if not any(found):
            return None
        self._clear()
        codes = struct.unpack(f"<{len(self._slots)}q", found)
        return next((task, codes[slot]) for task, slot in self._slots.items() if codes[slot])

    def close(self) -> None:
        """Give the memory back."""
        if self._block is not None:
            self._memory.give(self._block)
            self._block = self._buffer = None

    def _clear(self) -> None:
        self._runtime.copy_in(self._buffer, 0, memoryview(bytes(self._nbytes)))
