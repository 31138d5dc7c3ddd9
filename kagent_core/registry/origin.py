"""Where in a program a kernel was registered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# `contextlib` runs what stands in a ``with`` line
_PASSED_OVER = ("kagent_core.registry", "kagent_core.kernels", "contextlib")


def calling_line() -> str:
    """Return file and line of the innermost call from outside the registry and `kagent_core.kernels`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED_OVER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(function: Callable[..., Any]) -> str | None:
    """Return file and line of a function's definition; None for one that is not written in Python."""
    code = getattr(function, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's name, for a kernel that has none of its own."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return name
