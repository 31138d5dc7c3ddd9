"""Which file a symbol of a loaded library comes from."""

from __future__ import annotations

import ctypes
from pathlib import Path


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of ``dladdr``: the file that an address was loaded from."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def provider(library: ctypes.CDLL, symbol: str) -> Path | None:
    """Return the file in which a library, or one that it needs, finds a symbol; None when it does not."""
    info = _SymbolInfo()
    try:
        address = ctypes.cast(library[symbol], ctypes.c_void_p)
        found = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except AttributeError:  # nobody has the symbol, or the system no dladdr
        return None
    return Path(info.dli_fname.decode()) if found and info.dli_fname else None


def vector_math_library() -> Path | None:
    """Return glibc's library of vector math functions, or None where there is none."""
    try:
        return provider(ctypes.CDLL("libmvec.so.1"), "_ZGVbN4v_expf")
    except OSError:
        return None
