"""What lowering rules compute with: elements that behave like numbers, and tensors that give elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.codegen.dtypes import FLOATS, compute_dtype
from kagent_core.codegen.expressions import Expr, Expressions
from kagent_core.codegen.indices import Index
from kagent_core.specs import TensorSpec

Number = bool | int | float
Indices = tuple[Index, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """One element of a tensor, as an expression with operators.

    Numbers take the element's type, as PyTorch's scalars do. Comparisons give booleans; ``&``, ``|`` and ``~`` are
    bitwise, and logical for booleans.
    """

    expr: Expr
    made_by: Expressions

    @property
    def dtype(self) -> str:
        """Name of the element's type."""
        return self.expr.dtype

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point number."""
        return self.dtype in FLOATS

    def to(self, dtype: str) -> Element:
        """Convert as ``Tensor.to`` does."""
        return Element(self.made_by.cast(self.expr, dtype), self.made_by)

    def compute(self) -> Element:
        """Convert to the type that is computed in: float32 for the half types."""
        return self.to(compute_dtype(self.dtype))

    def widened(self) -> Element:
        """Convert to the type in which float32 is summed up: float64, or float32 where a device has no wider one."""
        return self.to(self.made_by.wide)

    def number(self, value: Number) -> Element:
        """Return a number of this element's type."""
        return Element(self.made_by.constant(value, self.dtype), self.made_by)

    def op(self, name: str, *others: Element | Number) -> Element:
        """Apply a primitive, with this element as its first operand."""
        args = [other if isinstance(other, Element) else self.number(other) for other in others]
        return Element(self.made_by.op(name, self.expr, *(arg.expr for arg in args)), self.made_by)

    def _swapped(self, name: str, other: Number) -> Element:
        return self.number(other).op(name, self)

    def __add__(self, other: Element | Number) -> Element:
        return self.op("add", other)

    def __radd__(self, other: Number) -> Element:
        return self._swapped("add", other)

    def __sub__(self, other: Element | Number) -> Element:
        return self.op("sub", other)

    def __rsub__(self, other: Number) -> Element:
        return self._swapped("sub", other)

    def __mul__(self, other: Element | Number) -> Element:
        return self.op("mul", other)

    def __rmul__(self, other: Number) -> Element:
        return self._swapped("mul", other)

    def __truediv__(self, other: Element | Number) -> Element:
        return self.op("div", other)

    def __rtruediv__(self, other: Number) -> Element:
        return self._swapped("div", other)

    def __neg__(self) -> Element:
        return self.op("neg")

    def __and__(self, other: Element | Number) -> Element:
        return self.op("and", other)

    def __or__(self, other: Element | Number) -> Element:
        return self.op("or", other)

    def __xor__(self, other: Element | Number) -> Element:
        return self.op("xor", other)

    def __invert__(self) -> Element:
        return self.op("not")

    def __lt__(self, other: Element | Number) -> Element:
        return self.op("lt", other)

    def __le__(self, other: Element | Number) -> Element:
        return self.op("le", other)

    def __gt__(self, other: Element | Number) -> Element:
        return self.op("gt", other)

    def __ge__(self, other: Element | Number) -> Element:
        return self.op("ge", other)

    def equals(self, other: Element | Number) -> Element:
        """Whether it equals another one (``==`` is left to Python's own identity)."""
        return self.op("eq", other)

    def differs(self, other: Element | Number) -> Element:
        """Whether it differs from another one."""
        return self.op("ne", other)

    def where(self, then: Element | Number, otherwise: Element | Number) -> Element:
        """Return `then` where this boolean holds, else `otherwise`. At least one of them is an element."""
        if not isinstance(then, Element):
            if not isinstance(otherwise, Element):
                raise TypeError("a choice between two numbers has no type")
            then = otherwise.number(then)
        return self.op("select", then, otherwise if isinstance(otherwise, Element) else then.number(otherwise))


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor as a rule sees it: something that gives elements.

    Attributes
    ----------
    spec
        The tensor.
    element
        Gives the element at an index.
    """

    spec: TensorSpec
    element: Callable[[Indices], Element]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """Name of the tensor's element type."""
        return self.spec.dtype.name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def at(self, index: Sequence[Index | int]) -> Element:
        """Return the element at an index, which has a part per dimension."""
        if len(index) != len(self.shape):
            raise ValueError(f"{len(index)} indices into {self.spec}")
        parts = (Index() if size == 1 else Index.of(part) for part, size in zip(index, self.shape, strict=True))
        return self.element(tuple(parts))

    def broadcast_at(self, index: Sequence[Index]) -> Element:
        """Return the element that broadcasting puts at an index of a shape with as many dimensions or more."""
        return self.at(tuple(index)[len(index) - len(self.shape) :])


def is_number(value: Any) -> bool:
    """Whether a value is a number that PyTorch takes as a scalar."""
    return isinstance(value, bool | int | float)
