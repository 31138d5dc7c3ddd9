"""Tensors without their data: where their elements lie in which buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kagent_core.runs import byte_runs
from kagent_core.specs.devices import Device

_SHORT_NAMES = {
    "bool": "b8",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex32": "c32",
    "complex64": "c64",
    "complex128": "c128",
}


@dataclass(frozen=True, slots=True)
class DType:
    """An element type, by PyTorch's name for it (``"float32"``), with its size in bytes."""

    name: str
    itemsize: int

    @property
    def short(self) -> str:
        """The name used in dumps: ``f32``, ``bf16``, ``i64``."""
        return _SHORT_NAMES.get(self.name, self.name)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class MemRange:
    """Bytes of one buffer, from `offset`, that a task reads or writes."""

    buffer: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte past the range."""
        return self.offset + self.nbytes

    def overlaps(self, other: MemRange) -> bool:
        """Whether the two ranges share a byte. A range without bytes overlaps nothing."""
        return (
            self.buffer == other.buffer
            and self.nbytes > 0
            and other.nbytes > 0
            and self.offset < other.end
            and other.offset < self.end
        )

    def __str__(self) -> str:
        return f"b{self.buffer}[{self.offset}:{self.end}]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data: where its elements lie in which buffer.

    Attributes
    ----------
    dtype
        Element type.
    shape, strides
        In elements, as PyTorch gives them.
    storage_offset
        Of the first element from the start of the buffer, in elements of `dtype`.
    buffer
        Number of the `BufferSpec` in the program.
    conj, neg
        PyTorch's lazy conjugation and negation bits: a reader must apply them.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    buffer: int
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first to the last one that the tensor touches, both included; 0 when empty."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def range(self) -> MemRange:
        """The bytes from the tensor's first to its last one."""
        itemsize = self.dtype.itemsize
        return MemRange(self.buffer, self.storage_offset * itemsize, self.span * itemsize)

    @property
    def ranges(self) -> tuple[MemRange, ...]:
        """The bytes that the tensor touches, exactly; `range` alone for one of very many pieces (`byte_runs`)."""
        if self.is_contiguous:
            return (self.range,)
        first = self.storage_offset * self.dtype.itemsize
        runs = byte_runs(self.shape, self.strides, self.dtype.itemsize)
        return tuple(MemRange(self.buffer, first + offset, nbytes) for offset, nbytes in runs)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps.

        As in PyTorch, dimensions of size 1 do not count, and a tensor without elements is contiguous.
        """
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def __str__(self) -> str:
        bits = ("*" if self.conj else "") + ("-" if self.neg else "")
        return f"{bits}{self.dtype.short}[{', '.join(map(str, self.shape))}]"


class BufferKind(Enum):
    """Who owns a buffer and how long it lives."""

    INPUT = "input"  # the caller's; bound on every call
    CONSTANT = "constant"  # belongs to the captured graph
    INTERMEDIATE = "intermediate"  # lives within one call, in the plan's arena
    OUTPUT = "output"  # made anew on every call and given to the caller
    MIRROR = "mirror"  # a copy of another buffer on another device


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One piece of memory of a program.

    Attributes
    ----------
    id
        Its number, which `TensorSpec.buffer` refers to.
    nbytes
        Bytes that the program touches, counted from the buffer's start.
    kind
        Who owns it.
    device
        Where it lives; None means host memory that the caller or the graph owns.
    source
        Position among the graph's inputs or constants; the mirrored buffer's id for a mirror; else None.
    torch_device
        Where the captured graph has the tensors that lie in it, as torch calls it; None for host memory.
    """

    id: int
    nbytes: int
    kind: BufferKind
    device: Device | None = None
    source: int | None = None
    torch_device: str | None = None


def flatten_tensors(value: Any) -> Iterable[TensorSpec]:
    """Yield every `TensorSpec` in an argument value, in order.

    Examples
    --------
    >>> list(flatten_tensors((1, None, "x")))
    []
    """
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from flatten_tensors(item)
