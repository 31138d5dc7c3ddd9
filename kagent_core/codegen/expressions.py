"""Expressions: what one element of a tensor is computed from, as a graph without repetitions.

An expression is a load, a number, an index turned into a value, a primitive of other expressions, a conversion, a
reduction over loop variables of its own, or a part of what a compound reduction gives. Equal expressions of one kernel
are one object, so that whatever several results have in common is computed once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kagent_core.codegen.dtypes import FLOATS, HALVES, INTEGERS
from kagent_core.codegen.indices import Axis, Computed, Index
from kagent_core.codegen.primitives import PRIMITIVES, Result
from kagent_core.specs import TensorSpec

REDUCTIONS = ("sum", "prod", "max", "min", "fmax", "any", "all")
"""Kinds of reductions; ``fmax`` ignores NaN. Of no elements, sum and any are 0, prod and all 1; the others are not."""

COMPOUND = "compound"
"""Kind of the reductions whose state has several parts, which `kagent_core.codegen.compound` describes."""

INTEGER_DIVISIONS = frozenset({"trunc_div", "floor_div", "rem", "fmod"})
"""Primitives that, of integers, report a division by zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A node. Compared by identity: an `Expressions` makes each only once.

    Attributes
    ----------
    op
        ``load``, ``constant``, ``size``, ``index``, ``given``, ``cast``, ``bitcast``, ``checked``, ``reduce``, ``part``
        of a compound reduction, ``count`` of the elements of one of its blocks, or the name of a primitive.
    args
        Operands.
    dtype
        Of the value. A half type says that a float32 has been rounded to it.
    payload
        What else the node stands for: a `Load`, a number, an `Index`, a `Reduction`; the number of a part; of a count,
        the loop variables.
    axes
        The loop variables that the value depends on.
    number
        Order of creation.
    """

    op: str
    args: tuple[Expr, ...]
    dtype: str
    payload: Any
    axes: frozenset[Axis]
    number: int

    @property
    def is_float(self) -> bool:
        """Whether the value is a floating-point number."""
        return self.dtype in FLOATS

    def __str__(self) -> str:
        if self.op == "constant":
            return str(self.payload)
        inner = [str(self.payload)] if self.payload is not None else []
        inner += [str(arg) for arg in self.args]
        return f"{self.op}({', '.join(inner)})"


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a tensor in memory.

    Attributes
    ----------
    tensor
        What the kernel gets a pointer to the first element of.
    offset
        From that first element, in elements.
    """

    tensor: TensorSpec
    offset: Index

    def __str__(self) -> str:
        return f"b{self.tensor.buffer}[{self.offset}]"


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a reduction is over.

    Attributes
    ----------
    kind
        One of `REDUCTIONS`, or `COMPOUND`.
    axes
        Its own loop variables, outermost first.
    compound
        Name of the kind of a compound reduction, whose operands are the parts of what a block of elements comes to,
        or, where they hold no reductions, of what one element does.
    in_block
        Whether it is over the elements of a block only: it is one of those that a compound reduction is made of.
    """

    kind: str
    axes: tuple[Axis, ...]
    compound: str = ""
    in_block: bool = False

    @property
    def name(self) -> str:
        """What it is called in kernels."""
        return self.compound or (f"block_{self.kind}" if self.in_block else self.kind)

    def __str__(self) -> str:
        return f"{self.name} over {', '.join(axis.name for axis in self.axes)}"


@dataclass(frozen=True, slots=True)
class Check:
    """A promise that an index keeps: one that does not is an error of the user's, and reported as such.

    Attributes
    ----------
    size
        The index must be from ``-size`` to ``size - 1``; negative ones count from the end where `wraps`.
    wraps
        Whether negative ones are taken.
    error
        What PyTorch raises: IndexError, or RuntimeError.
    """

    size: int
    wraps: bool
    error: type[Exception] = IndexError

    def __str__(self) -> str:
        return f"of {self.size}"


class Expressions:
    """Makes the expressions of one kernel.

    Parameters
    ----------
    round_halves
        Whether values of half types are rounded after every operator, as eager PyTorch does. Else a value that stays
        inside the kernel is kept in float32.
    wide
        The type in which what float32 is too narrow for is computed: float64, or float32 itself where a device has no
        wider one.
    """

    def __init__(self, round_halves: bool = True, wide: str = "float64") -> None:
        self.round_halves = round_halves
        self.wide = wide
        self._known: dict[Any, Expr] = {}
        self._mask: Expr | None = None

    # -- leaves

    def load(self, tensor: TensorSpec, offset: Index) -> Expr:
        """Return an element of a tensor. Under a condition (`masked`), memory is read only where it holds."""
        axes = offset.axes | (self._mask.axes if self._mask is not None else frozenset())
        args = () if self._mask is None else (self._mask,)
        return self._make("load", args, tensor.dtype.name, Load(tensor, offset), axes)

    def given(self, dtype: str, axes: frozenset[Axis], name: str = "") -> Expr:
        """Return a value that the kernel has computed before: without a name, the one that an epilogue begins with."""
        return self._make("given", (), dtype, name, axes)

    def constant(self, value: bool | float, dtype: str) -> Expr:
        """Return a number, converted to `dtype` as PyTorch converts scalars."""
        if dtype == "bool":
            value = bool(value)
        elif dtype in FLOATS:
            value = rounded(float(value), dtype)
        else:
            value = _wrapped(int(value), dtype)
        key = ("constant", dtype, _number_key(value))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Expr("constant", (), dtype, value, frozenset(), len(self._known))
        return found

    def size(self, value: int, dtype: str) -> Expr:
        """Return a number that depends on shapes, which the kernel gets as a parameter."""
        return self.cast(self._make("size", (), "int64", value, frozenset()), dtype)

    def index(self, index: Index, dtype: str = "int64") -> Expr:
        """Return an index as a value."""
        if not index.terms:
            return self.constant(index.constant, dtype)
        if index.constant == 0 and len(index.terms) == 1 and index.terms[0][1] == 1:
            atom = index.terms[0][0]
            if isinstance(atom, Computed) and atom.value.dtype == dtype:
                return atom.value
        return self.cast(self._make("index", (), "int64", index, index.axes), dtype)

    # -- what is made of them

    def op(self, name: str, *args: Expr) -> Expr:
        """Return a primitive of some operands, which have the same type but for a condition in front.

        Raises
        ------
        TypeError
            When the operands do not fit the primitive: a lowering rule is wrong.
        """
        primitive = PRIMITIVES[name]
        same = args[1:] if primitive.result is Result.LAST else args
        if len(args) != primitive.arity or len({arg.dtype for arg in same}) != 1:
            raise TypeError(f"primitive '{name}' of {', '.join(arg.dtype for arg in args)}")
        if same[0].dtype in HALVES and primitive.result is Result.OPERANDS and name not in _KEEPS_HALVES:
            raise TypeError(f"primitive '{name}' of {same[0].dtype}: half types are computed in float32")
        if self._mask is not None and name in INTEGER_DIVISIONS and not args[0].is_float:
            # where the condition does not hold there is nothing to report
            args = (args[0], self.op("select", self._mask, args[1], self.constant(1, args[1].dtype)))
        if primitive.commutative and args[0].number > args[1].number:
            args = (args[1], args[0])
        simple = _simplified(name, args)
        if simple is not None:
            return simple
        dtype = "bool" if primitive.result is Result.BOOL else args[-1].dtype
        axes = frozenset[Axis]().union(*(arg.axes for arg in args))
        return self._make(name, args, dtype, None, axes)

    def cast(self, value: Expr, dtype: str) -> Expr:
        """Return a value converted as ATen converts: floats towards zero to integers, anything but 0 to true."""
        if value.dtype == dtype:
            return value
        if value.op == "constant" and (dtype in FLOATS or value.dtype not in FLOATS):
            return self.constant(value.payload, dtype)
        if value.op == "cast":
            inner = value.args[0]
            if value.dtype == "float32" and inner.dtype in HALVES and dtype == inner.dtype:
                return inner  # up and down again
            if not self.round_halves and value.dtype in HALVES and dtype == "float32" and inner.dtype == "float32":
                return inner
        return self._make("cast", (value,), dtype, None, value.axes)

    def bitcast(self, value: Expr, dtype: str) -> Expr:
        """Return the bits of a value as another type of the same size."""
        return value if value.dtype == dtype else self._make("bitcast", (value,), dtype, None, value.axes)

    def checked(self, value: Expr, size: int, wraps: bool, error: type[Exception] = IndexError) -> Expr:
        """Return an index from 0 to `size` - 1, made from an int64 value that the kernel checks.

        Under a condition (`masked`), the index counts only where it holds.
        """
        axes = value.axes | (self._mask.axes if self._mask is not None else frozenset())
        args = (value,) if self._mask is None else (value, self._mask)
        return self._make("checked", args, "int64", Check(size, wraps, error), axes)

    def reduce(self, kind: str, value: Expr, axes: tuple[Axis, ...], in_block: bool = False) -> Expr:
        """Return a reduction of a value over some loop variables, or over a block of their steps."""
        outer = value.axes.difference(axes)
        return self._make("reduce", (value,), value.dtype, Reduction(kind, axes, in_block=in_block), outer)

    def count(self, axes: tuple[Axis, ...]) -> Expr:
        """Return the number of elements of a block of a compound reduction over some loop variables."""
        return self._make("count", (), "int64", axes, frozenset())

    def compound(self, kind: str, parts: Sequence[Expr], axes: tuple[Axis, ...]) -> tuple[Expr, ...]:
        """Return the parts of a compound reduction over some loop variables.

        Parameters
        ----------
        kind
            Its name in `kagent_core.codegen.compound.COMPOUNDS`.
        parts
            Those of a block, or of an element.
        axes
            The loop variables.
        """
        outer = frozenset[Axis]().union(*(part.axes for part in parts)).difference(axes)
        state = self._make("reduce", tuple(parts), parts[0].dtype, Reduction(COMPOUND, axes, kind), outer)
        return tuple(self._make("part", (state,), part.dtype, number, outer) for number, part in enumerate(parts))

    def rebuilt(self, node: Expr, args: tuple[Expr, ...], payload: Any) -> Expr:
        """Return a node with other operands and another payload, such as one for other loops."""
        axes = frozenset[Axis]().union(*(arg.axes for arg in args))
        if isinstance(payload, Load):
            axes |= payload.offset.axes
        elif isinstance(payload, Index):
            axes |= payload.axes
        elif isinstance(payload, Reduction):
            axes = axes.difference(payload.axes)
        return self._make(node.op, args, node.dtype, payload, axes)

    @contextmanager
    def masked(self, condition: Expr) -> Iterator[None]:
        """Read memory only where a condition holds, for as long as the block lasts; else a load gives 0."""
        before = self._mask
        self._mask = condition if before is None else self.op("and", before, condition)
        try:
            yield
        finally:
            self._mask = before

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Read memory whatever the condition, for as long as the block lasts: the places are known to be there."""
        before, self._mask = self._mask, None
        try:
            yield
        finally:
            self._mask = before

    @property
    def mask(self) -> Expr | None:
        """The condition under which memory is read now."""
        return self._mask

    def _make(self, op: str, args: tuple[Expr, ...], dtype: str, payload: Any, axes: frozenset[Axis]) -> Expr:
        key = (op, args, dtype, payload)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Expr(op, args, dtype, payload, axes, len(self._known))
        return found


_KEEPS_HALVES = frozenset({"neg", "abs", "min", "max", "fmin", "fmax", "copysign"})
"""Primitives whose results need no rounding."""


def walk(*roots: Expr, into_reductions: bool = True) -> Iterator[Expr]:
    """Yield every node once, operands first; what only a reduction's loop computes only if `into_reductions`."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
            continue
        if node.number in seen:
            continue
        seen.add(node.number)
        stack.append((node, True))
        if node.op != "reduce" or into_reductions:
            stack.extend((arg, False) for arg in reversed(operands(node)))


def operands(node: Expr) -> tuple[Expr, ...]:
    """Return a node's operands, those that its index is computed from included."""
    index = node.payload.offset if node.op == "load" else node.payload if node.op == "index" else None
    return node.args if index is None else (*node.args, *computed_in(index))


def computed_in(index: Index) -> tuple[Expr, ...]:
    """Return the expressions whose values an index is computed from."""
    found: list[Expr] = []
    for atom, _ in index.terms:
        if isinstance(atom, Computed):
            found.append(atom.value)
        elif not isinstance(atom, Axis):
            found.extend(computed_in(atom.index))
    return tuple(found)


def _simplified(name: str, args: tuple[Expr, ...]) -> Expr | None:
    """Return one of the operands where the result is exactly it."""
    if name == "select":
        condition, then, otherwise = args
        if condition.op == "constant":
            return then if condition.payload else otherwise
        return then if then is otherwise else None
    if name in ("and", "or") and args[0].dtype == "bool":
        for one, other in (args, args[::-1]):
            if one.op == "constant":
                return other if bool(one.payload) is (name == "and") else one
    if name == "mul":
        for one, other in (args, args[::-1]):
            if one.op == "constant" and one.payload == 1:
                return other
    if name == "add" and args[0].dtype in INTEGERS:
        for one, other in (args, args[::-1]):
            if one.op == "constant" and one.payload == 0:
                return other
    return None


def _number_key(value: bool | float) -> Any:
    """Tell -0.0 from 0.0, and let NaN equal itself."""
    return (math.copysign(1.0, value), str(value)) if isinstance(value, float) else value


def rounded(value: float, dtype: str) -> float:
    """Return the nearest number of a floating-point type, ties to even."""
    if dtype == "float64" or not math.isfinite(value):
        return value
    if dtype == "bfloat16":
        (bits,) = struct.unpack("<I", struct.pack("<f", rounded(value, "float32")))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        nearest: float = struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]
        return nearest
    code = "<e" if dtype == "float16" else "<f"
    try:
        (nearest,) = struct.unpack(code, struct.pack(code, value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return nearest


def _wrapped(value: int, dtype: str) -> int:
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    value &= (1 << bits) - 1
    return value - (1 << bits) if not dtype.startswith("u") and value >> (bits - 1) else value
