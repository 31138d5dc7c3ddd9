"""ParameterBuffer: the scalars of a plan, in one piece of memory that stays where it is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kagent_core.errors import PackingError
from kagent_core.prototype.abi import Abi
from kagent_core.prototype.c_types import CType
from kagent_core.specs import KernelTask

_STORAGE_ALIGNMENT = 64  # of a cache line: no type that a kernel takes asks for more


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one value in a `ParameterBuffer`.

    Attributes
    ----------
    type
        Its C type.
    offset
        From the buffer's start, in bytes.
    label
        The parameter and its kernel, for messages.
    padding
        What fills an array behind the values that are given.
    """

    type: CType
    offset: int
    label: str
    padding: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the value, in bytes."""
        return self.type.nbytes


class ParameterBuffer:
    r"""Values in their C types, each aligned as its type asks, in one piece of memory.

    First values are appended; `freeze` then gives them their memory, whose addresses hold as long as the buffer
    lives. From there on a value can be patched, and none can be added. Patching must wait until the device has
    finished with the launches that read the value.

    Parameters
    ----------
    abi
        How the device lays out types; by default as a 64-bit device does.

    Examples
    --------
    >>> buffer = ParameterBuffer()
    >>> flag, count = buffer.append("uint8_t", 1), buffer.append("int32_t", -2)
    >>> buffer.freeze()
    >>> flag.offset, count.offset, bytes(buffer.view(flag))
    (0, 4, b'\x01')
    >>> buffer.patch(count, 7)
    >>> buffer.value(count)
    7
    """

    def __init__(self, abi: Abi | None = None) -> None:
        self._abi = abi or Abi()
        self._pending: bytearray | None = bytearray()
        self._memory = memoryview(b"")
        self._address = 0

    @property
    def frozen(self) -> bool:
        """Whether the values have their memory."""
        return self._pending is None

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return len(self._memory) if self._pending is None else len(self._pending)

    @property
    def memory(self) -> memoryview:
        """All bytes of a frozen buffer."""
        self._require_frozen("shown")
        return self._memory.toreadonly()

    def append(self, spelling: str, value: Any, label: str = "a parameter", padding: int = 0) -> Slot:
        """Add a value of the C type that is spelled so.

        Parameters
        ----------
        spelling
            Such as ``int64_t``.
        value
            What `CType.convert` takes.
        label
            The parameter and its kernel, for messages.
        padding
            What fills an array behind the given values.

        Raises
        ------
        PackingError
            When the value does not fit the type, or the buffer is frozen.
        """
        ctype = self._abi.type(spelling)
        return self._add(ctype, ctype.pack(ctype.convert(value, label, padding)), label, padding)

    def append_bytes(self, spelling: str, data: bytes, label: str = "a parameter") -> Slot:
        """Add a value that is packed already, as `PackedArg.data` is.

        Raises
        ------
        PackingError
            When the bytes are not as many as the type has, or the buffer is frozen.
        """
        ctype = self._abi.type(spelling)
        if len(data) != ctype.nbytes:
            raise PackingError(f"{label} is a {ctype.name} of {ctype.nbytes} bytes, but {len(data)} bytes came")
        return self._add(ctype, data, label, 0)

    def freeze(self) -> None:
        """Give the values their memory. A second call does nothing."""
        if self._pending is not None:
            self._adopt(self._pending)

    def copy(self) -> ParameterBuffer:
        """Return a frozen buffer of the same values in memory of its own: the same slots are valid in it."""
        self._require_frozen("copied")
        other = ParameterBuffer(self._abi)
        other._adopt(self._memory)
        return other

    def view(self, slot: Slot) -> memoryview:
        """Return the bytes of a value, read only. They change when it is patched."""
        self._require_frozen("read")
        return self._memory[slot.offset : slot.offset + slot.nbytes].toreadonly()

    def value(self, slot: Slot) -> Any:
        """Return a value as a kernel sees it."""
        return slot.type.unpack(self.view(slot))

    def address(self, slot: Slot) -> int:
        """Return where a value lies in the host's memory."""
        self._require_frozen("pointed to")
        return self._address + slot.offset

    def patch(self, slot: Slot, value: Any) -> None:
        """Change a value in place.

        Raises
        ------
        PackingError
            When the value does not fit its type: the old one stays.
        """
        self._require_frozen("patched")
        slot.type.pack_into(self._memory, slot.offset, slot.type.convert(value, slot.label, slot.padding))

    def _add(self, ctype: CType, data: bytes, label: str, padding: int) -> Slot:
        if self._pending is None:
            raise PackingError(f"{label} comes too late: the parameter buffer is frozen")
        self._pending += bytes(-len(self._pending) % ctype.alignment)
        slot = Slot(ctype, len(self._pending), label, padding)
        self._pending += data
        return slot

    def _adopt(self, data: bytearray | memoryview) -> None:
        # over-allocated, because ctypes aligns to 16 bytes at best
        storage = (ctypes.c_ubyte * (len(data) + _STORAGE_ALIGNMENT))()
        start = -ctypes.addressof(storage) % _STORAGE_ALIGNMENT
        self._memory = memoryview(storage).cast("B")[start : start + len(data)]
        self._memory[:] = data
        self._address = ctypes.addressof(storage) + start
        self._pending = None

    def _require_frozen(self, what: str) -> None:
        if self._pending is not None:
            raise PackingError(f"a parameter buffer is {what} before it has its memory", hint="call freeze() first")


def collect_parameters(
    tasks: Iterable[KernelTask], abi: Abi | None = None
) -> tuple[ParameterBuffer, list[tuple[Slot | None, ...]]]:
    """Put every packed value of some tasks into one frozen buffer.

    Returns
    -------
    tuple
        The buffer, and for each task the slot of each of its arguments: None for a tensor, and for an argument
        of a kernel that declares no C types.
    """
    buffer = ParameterBuffer(abi)
    slots = [
        tuple(
            None
            if arg.data is None or arg.type is None
            else buffer.append_bytes(
                arg.type,
                arg.data,
                f"parameter '{arg.name}' of kernel '{task.kernel.name}' for {task.kernel.signature}",
            )
            for arg in task.args
        )
        for task in tasks
    ]
    buffer.freeze()
    return buffer, slots
