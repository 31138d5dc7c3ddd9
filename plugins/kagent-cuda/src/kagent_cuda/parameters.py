"""A kernel's parameters as the CUDA driver takes them: one block of bytes, each value at its own alignment."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.device import PointerArg, ScalarArg
from kagent_core.errors import PackingError
from kagent_core.prototype.abi import Abi

POINTER_NBYTES = 8

Place = tuple[int, int]
"""Offset and bytes of a parameter in the block."""


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """All parameters of one launch.

    Attributes
    ----------
    data
        The bytes.
    places
        Where each parameter lies in them.
    """

    data: bytes
    places: tuple[Place, ...]


class HeldParameters:
    """A parameter block as the driver reads it, at an address, as long as this object is alive.

    Parameters
    ----------
    block
        The parameters.

    Attributes
    ----------
    address
        Of an array of pointers, one to each parameter.
    """

    def __init__(self, block: ParameterBlock) -> None:
        self._data = ctypes.create_string_buffer(block.data, max(len(block.data), 1))
        base = ctypes.addressof(self._data)
        self._pointers = (ctypes.c_void_p * max(len(block.places), 1))(*(base + offset for offset, _ in block.places))
        self.address = ctypes.addressof(self._pointers)


def pack_parameters(
    args: Sequence[PointerArg | ScalarArg], address_of: Callable[[Any], int], abi: Abi
) -> ParameterBlock:
    """Return the parameter block of a launch.

    Parameters
    ----------
    args
        What `Runtime.launch` was given.
    address_of
        Returns the device address of a buffer.
    abi
        Says how a type is aligned.
    """
    data, places = bytearray(), []
    for arg in args:
        if isinstance(arg, PointerArg):
            value: bytes | memoryview = struct.pack("<Q", address_of(arg.buffer) + arg.byte_offset)
            alignment = POINTER_NBYTES
        else:
            value, alignment = arg.data, abi.type(arg.type).alignment
        data += bytes(-len(data) % alignment)
        places.append((len(data), len(value)))
        data += value
    return ParameterBlock(bytes(data), tuple(places))


def check_places(kernel: str, given: Sequence[Place], compiled: Sequence[Place]) -> None:
    """Check where the parameters of a launch lie against what the compiled kernel says.

    Parameters
    ----------
    kernel
        Its name, for messages.
    given
        Of the launch.
    compiled
        Of the kernel, as the driver tells them.

    Raises
    ------
    PackingError
        Where they differ.
    """
    hint = "declare the parameters as the source does, in its order"
    if len(given) != len(compiled):
        raise PackingError(
            f"kernel '{kernel}' was compiled with {len(compiled)} parameters, {len(given)} were packed", hint=hint
        )
    for number, (mine, wanted) in enumerate(zip(given, compiled, strict=True)):
        if mine != wanted:
            raise PackingError(
                f"parameter {number} of kernel '{kernel}' was packed with {mine[1]} bytes at offset {mine[0]}, "
                f"expected {wanted[1]} bytes at offset {wanted[0]}",
                hint=hint,
            )
