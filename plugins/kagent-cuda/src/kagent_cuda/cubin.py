"""What a compiled kernel says of its parameters: read from the binary, where no driver tells."""

from __future__ import annotations

import struct

from kagent_cuda.parameters import Place

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")

_PARAMETER = 0x17
"""Attribute of ``.nv.info.<kernel>`` that tells of one parameter (``EIATTR_KPARAM_INFO`` of cuobjdump)."""

_SIZED = 0x04
"""Format of an attribute whose value has a size of its own (``EIFMT_SVAL``)."""


def parameter_places(binary: bytes, symbol: str) -> tuple[Place, ...] | None:
    """Return offset and bytes of each parameter of a kernel, in order; None where the binary does not tell.

    Parameters
    ----------
    binary
        A cubin, which is an ELF file.
    symbol
        The kernel's name in it.
    """
    try:
        info = _section(binary, f".nv.info.{symbol}")
        return _places(info or b"") or None
    except struct.error:  # cut short, or of a form that is not known
        return None


def _section(binary: bytes, name: str) -> bytes | None:
    if not binary.startswith(b"\x7fELF\x02\x01"):
        return None
    *_, table, _, _, _, _, size, count, names = _HEADER.unpack_from(binary)
    sections = [_SECTION.unpack_from(binary, table + number * size) for number in range(count)]
    texts = sections[names][4]
    for section in sections:
        begin = texts + section[0]
        if binary[begin : binary.index(b"\0", begin)] == name.encode():
            return binary[section[4] : section[4] + section[5]]
    return None


def _places(info: bytes) -> tuple[Place, ...]:
    found: dict[int, Place] = {}
    position = 0
    while position + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, position)
        position += 4
        if form != _SIZED:
            continue
        if attribute == _PARAMETER:
            ordinal, offset, flags = struct.unpack_from("<4xHHI", info, position)
            found[ordinal] = (offset, flags >> 18)
        position += value
    return tuple(found[ordinal] for ordinal in sorted(found))
