"""Expressions over an operator's arguments, evaluated without running any code but their own arithmetic."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from kagent_core.errors import PackingError, choices, nearest
from kagent_core.specs import TensorSpec

Lookup = Callable[[str], Any]
"""Gives the value of a name; raises KeyError for a name that has none."""

_MAX_BITS = 256  # far beyond every C type; keeps powers from filling the memory

_NUMBERS = (bool, int, float, complex)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise OverflowError("a power is too large")
    return base**exponent


def _prod(values: Any) -> Any:
    result: Any = 1
    for value in values:
        result = _arithmetic(operator.mul, result, value)
    return result


def _sum(values: Any) -> Any:
    result: Any = 0
    for value in values:
        result = _arithmetic(operator.add, result, value)
    return result


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _arithmetic(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply an operator to two numbers: not to sequences, whose products could fill the memory."""
    for side in (left, right):
        if not isinstance(side, _NUMBERS):
            raise TypeError(f"{_kind(side)} is no number")
    result = apply(left, right)
    if isinstance(result, int) and result.bit_length() > _MAX_BITS:
        raise OverflowError("a number is too large")
    return result


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, among: item in among,
    ast.NotIn: lambda item, among: item not in among,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "bool": bool,
    "ceil_div": _ceil_div,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "prod": _prod,
    "sum": _sum,
}
CONSTANTS: Mapping[str, float] = {"inf": math.inf, "nan": math.nan}

_ATTRIBUTES: Mapping[str, Callable[[TensorSpec], Any]] = {
    "shape": lambda spec: spec.shape,
    "strides": lambda spec: spec.strides,
    "ndim": lambda spec: len(spec.shape),
    "dtype": lambda spec: spec.dtype.name,
    "itemsize": lambda spec: spec.dtype.itemsize,
}
_METHODS: Mapping[str, Callable[..., Any]] = {
    "numel": lambda spec: spec.numel,
    "dim": lambda spec: len(spec.shape),
    "size": lambda spec, dim: spec.shape[dim],
    "stride": lambda spec, dim: spec.strides[dim],
    "is_contiguous": lambda spec: spec.is_contiguous,
}

_ALLOWED = (
    ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Call, ast.Tuple, ast.List,
    ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Load, ast.And, ast.Or,
    *_BINARY, *_UNARY, *_COMPARISONS,
)  # fmt: skip


class Expression:
    """An expression over an operator's arguments and results, such as ``self.shape[1] * len(dim)``.

    It has Python's syntax and meaning, restricted to: numbers, strings, None, tuples; arithmetic, comparisons,
    ``and``, ``or``, ``not`` and ``x if y else z``; indices and slices; a tensor's ``shape``, ``strides``,
    ``ndim``, ``dtype`` (as text), ``itemsize``, ``numel()``, ``dim()``, ``size(d)``, ``stride(d)`` and
    ``is_contiguous()``; the functions ``abs``, ``bool``, ``ceil_div``, ``float``, ``int``, ``len``, ``max``,
    ``min``, ``prod``, ``sum``; and ``inf`` and ``nan``.

    Attributes
    ----------
    text
        As it was written.
    names
        Every name that it looks up, constants left out.

    Raises
    ------
    PackingError
        When the text is not such an expression.

    Examples
    --------
    >>> Expression("prod(size[1:]) + 1").evaluate({"size": (7, 2, 3)}.__getitem__)
    7
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise PackingError(f"'{text}' is no expression: {getattr(error, 'msg', error)}") from None
        called: set[ast.AST] = set()
        names: dict[str, None] = {}
        for node in ast.walk(tree):
            _check_node(node, text)
            if isinstance(node, ast.Call):
                called.add(node.func)
            if isinstance(node, ast.Name) and node not in called:
                names[node.id] = None
        self.names = tuple(name for name in names if name not in CONSTANTS)
        self._root = tree.body

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def evaluate(self, lookup: Lookup) -> Any:
        """Return the value.

        Raises
        ------
        PackingError
            When it cannot be computed: an index out of range, a division by zero, an operand of the wrong kind.
        """
        try:
            return _evaluate(self._root, lookup)
        except (ArithmeticError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise PackingError(f"'{self.text}' has no value here: {error}") from None


def _check_node(node: ast.AST, text: str) -> None:
    """Refuse whatever is not on the list, before anything is evaluated."""
    if not isinstance(node, _ALLOWED):
        raise PackingError(
            f"'{text}' has a {type(node).__name__}, which no derived value may have",
            hint="use arithmetic, comparisons, indices, and the tensors' shape, strides, dtype and numel()",
        )
    if isinstance(node, ast.Constant) and not isinstance(node.value, (*_NUMBERS, str, type(None))):
        raise PackingError(f"'{text}' has the constant {node.value!r}, which no derived value may have")
    if isinstance(node, ast.Call):
        if node.keywords:
            raise PackingError(f"'{text}' gives an argument by name, which no derived value may do")
        if isinstance(node.func, ast.Name):
            _require(node.func.id, FUNCTIONS, "function", text)
        elif isinstance(node.func, ast.Attribute):
            _require(node.func.attr, _METHODS, "method of a tensor", text)
        else:
            raise PackingError(f"'{text}' calls something that is no function")
    if isinstance(node, ast.Attribute):
        _require(node.attr, {**_ATTRIBUTES, **_METHODS}, "property of a tensor", text)


def _require(name: str, known: Mapping[str, Any], what: str, text: str) -> None:
    if name not in known:
        close = nearest(name, known)
        raise PackingError(
            f"'{text}' uses '{name}', which is no {what} that it can use",
            hint=f"did you mean '{close}'?" if close else f"use {choices(known)}",
        )


def _evaluate(node: ast.expr, lookup: Lookup) -> Any:
    return _EVALUATORS[type(node)](node, lookup)


def _constant(node: ast.Constant, lookup: Lookup) -> Any:
    return node.value


def _name(node: ast.Name, lookup: Lookup) -> Any:
    return CONSTANTS[node.id] if node.id in CONSTANTS else lookup(node.id)


def _tuple(node: ast.Tuple | ast.List, lookup: Lookup) -> tuple[Any, ...]:
    return tuple(_evaluate(item, lookup) for item in node.elts)


def _attribute(node: ast.Attribute, lookup: Lookup) -> Any:
    if node.attr not in _ATTRIBUTES:
        raise TypeError(f"'{node.attr}' is a method: write '{node.attr}()'")
    return _ATTRIBUTES[node.attr](_tensor(node, lookup))


def _tensor(node: ast.Attribute, lookup: Lookup) -> TensorSpec:
    owner = _evaluate(node.value, lookup)
    if not isinstance(owner, TensorSpec):
        raise TypeError(f"'{ast.unparse(node.value)}' is {_kind(owner)}, not a tensor")
    return owner


def _call(node: ast.Call, lookup: Lookup) -> Any:
    arguments = [_evaluate(argument, lookup) for argument in node.args]
    if isinstance(node.func, ast.Attribute):
        return _METHODS[node.func.attr](_tensor(node.func, lookup), *arguments)
    assert isinstance(node.func, ast.Name)
    return FUNCTIONS[node.func.id](*arguments)


def _subscript(node: ast.Subscript, lookup: Lookup) -> Any:
    owner, index = _evaluate(node.value, lookup), _evaluate(node.slice, lookup)
    if not isinstance(owner, tuple):
        raise TypeError(f"'{ast.unparse(node.value)}' is {_kind(owner)}, not a list")
    return owner[index]


def _slice(node: ast.Slice, lookup: Lookup) -> slice:
    return slice(*(None if end is None else _evaluate(end, lookup) for end in (node.lower, node.upper, node.step)))


def _unary(node: ast.UnaryOp, lookup: Lookup) -> Any:
    return _UNARY[type(node.op)](_evaluate(node.operand, lookup))


def _binary(node: ast.BinOp, lookup: Lookup) -> Any:
    return _arithmetic(_BINARY[type(node.op)], _evaluate(node.left, lookup), _evaluate(node.right, lookup))


def _logical(node: ast.BoolOp, lookup: Lookup) -> Any:
    stop = isinstance(node.op, ast.Or)
    for operand in node.values[:-1]:
        value = _evaluate(operand, lookup)
        if bool(value) is stop:
            return value
    return _evaluate(node.values[-1], lookup)


def _compare(node: ast.Compare, lookup: Lookup) -> bool:
    left = _evaluate(node.left, lookup)
    for comparison, operand in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(operand, lookup)
        if not _COMPARISONS[type(comparison)](left, right):
            return False
        left = right
    return True


def _conditional(node: ast.IfExp, lookup: Lookup) -> Any:
    return _evaluate(node.body if _evaluate(node.test, lookup) else node.orelse, lookup)


_EVALUATORS: Mapping[type[ast.expr], Callable[[Any, Lookup], Any]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Tuple: _tuple,
    ast.List: _tuple,
    ast.Attribute: _attribute,
    ast.Call: _call,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.BoolOp: _logical,
    ast.Compare: _compare,
    ast.IfExp: _conditional,
}


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
