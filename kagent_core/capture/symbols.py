"""Symbolic sizes: what their values are in one call."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from kagent_core.errors import CaptureError

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(value: Any) -> bool:
    """Whether a value is one of torch's symbolic numbers."""
    return isinstance(value, _SYMBOLIC)


class SymbolValues:
    """Values of a graph's symbols in one call. Expressions are evaluated once each."""

    def __init__(self) -> None:
        self._symbols: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}

    def bind(self, symbolic: Any, value: Any) -> None:
        """Take `value` for `symbolic` where that is a plain symbol; other expressions are ignored."""
        if is_symbolic(symbolic):
            expression = symbolic.node.expr
            if isinstance(expression, sympy.Symbol):
                self._symbols.setdefault(expression, value)

    def bind_tensor(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Bind the symbols in a tensor's sizes, strides and offset."""
        for symbolic, value in zip(fake.shape, real.shape, strict=True):
            self.bind(symbolic, value)
        for symbolic, value in zip(fake.stride(), real.stride(), strict=True):
            self.bind(symbolic, value)
        self.bind(fake.storage_offset(), real.storage_offset())

    def value(self, symbolic: Any) -> Any:
        """Return the number that a symbolic number stands for; any other value as it is.

        Raises
        ------
        CaptureError
            When it depends on a symbol that no input tells.
        """
        if type(symbolic) is int or not is_symbolic(symbolic):
            return symbolic
        expression = symbolic.node.expr
        if expression in self._known:
            return self._known[expression]
        missing = [str(s) for s in expression.free_symbols if s not in self._symbols]
        if missing:
            raise CaptureError(
                f"size {expression} depends on {', '.join(missing)}, which no input of the graph tells",
                hint="compile with dynamic=False, or report this graph (KAGENT_LOGS=capture=debug prints it)",
            )
        result = sympy_interp(PythonReferenceAnalysis, self._symbols, expression)
        kind: type = (
            float if isinstance(symbolic, torch.SymFloat) else bool if isinstance(symbolic, torch.SymBool) else int
        )
        self._known[expression] = kind(result)
        return self._known[expression]

    def ints(self, values: Any) -> tuple[int, ...]:
        """Return sizes or strides as numbers."""
        return tuple(v if type(v) is int else self.value(v) for v in values)
