"""Expressions over arguments: what Python gives, and nothing that could run anything else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.errors import PackingError
from kagent_core.prototype.expressions import Expression

from .builders import tensor

NAMES = {
    "self": tensor(0, 2, 3, 5),
    "other": tensor(1, 4, strides=(2,)),
    "bias": None,
    "size": (7, 2, 3),
    "alpha": 2.5,
    "dim": -1,
    "min": None,
    "memory_format": "channels_last",
    "tensors": (tensor(2, 8), tensor(3, 9)),
}


def value(text):
    return Expression(text).evaluate(NAMES.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("self.numel()", 30),
        ("self.shape[0] * self.shape[-1]", 10),
        ("self.shape", (2, 3, 5)),
        ("self.strides[0]", 15),
        ("self.size(1) + self.stride(1)", 8),
        ("self.ndim == self.dim() == 3", True),
        ("self.ndim < 3 < alpha", False),
        ("self.itemsize", 4),
        ("self.dtype", "float32"),
        ("self.dtype == 'float32'", True),
        ("self.dtype in ('float16', 'bfloat16')", False),
        ("self.dtype not in ['float16']", True),
        ("self.is_contiguous() and not other.is_contiguous()", True),
        ("prod(self.shape[1:])", 15),
        ("prod(size[::2]) - sum(size[:2])", 12),
        ("prod(())", 1),
        ("ceil_div(self.numel(), 16)", 2),
        ("len(tensors) + tensors[1].shape[0]", 11),
        ("dim % self.ndim", 2),
        ("dim if dim >= 0 else dim + self.ndim", 2),
        ("-inf if min is None else min", -math.inf),
        ("0 if bias is None else bias.numel()", 0),
        ("bias is not None", False),
        ("memory_format == 'channels_last'", True),
        ("memory_format != 'channels_last' or dim", -1),
        ("bias or size or alpha", (7, 2, 3)),
        ("2 ** 10 // 3 / 2", 170.5),
        ("+3 - -4", 7),
        ("max(self.shape) - abs(dim)", 4),
        ("int(alpha) + float(2) + bool(3)", 5.0),
        ("(1 + 2j) * 2", 2 + 4j),
        (" 1 ", 1),
    ],
)
def test_what_expressions_give(text, expected):
    result = value(text)
    assert result == expected
    assert type(result) is type(expected)


def test_nan_is_a_constant():
    assert math.isnan(value("nan"))


OPERATORS = ["+", "-", "*", "//", "%", "<", "<=", "==", "!=", ">", ">=", "and", "or"]
NUMBERS = st.integers(-9, 9).map(str)
TEXTS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(lambda parts: f"({' '.join(parts)})")
        | inner.map(lambda text: f"(-{text})")
        | st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})")
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_arithmetic_is_pythons(text):
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(PackingError, match="has no value here"):
            value(text)
    else:
        assert value(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os')", "uses '__import__', which is no function"),
        ("self.__class__", "uses '__class__', which is no property of a tensor"),
        ("self.shape.__len__()", "uses '__len__', which is no method of a tensor"),
        ("(lambda: 1)()", "calls something that is no function"),
        ("lambda: 1", "has a Lambda"),
        ("[x for x in size]", "has a ListComp"),
        ("{1: 2}", "has a Dict"),
        ("f'{size}'", "has a JoinedStr"),
        ("(x := 1)", "has a NamedExpr"),
        ("max(*size)", "has a Starred"),
        ("max(size, key=abs)", "gives an argument by name"),
        ("1 @ 2", "has a MatMult"),
        ("1 << 99", "has a LShift"),
        ("b'x'", "has the constant b'x'"),
        ("...", "has the constant Ellipsis"),
        ("self.shape[", "is no expression: "),
        ("x = 1", "is no expression: "),
        ("", "is no expression: "),
        ("1\0", "is no expression: "),
        ("self.numle()", "uses 'numle', which is no method of a tensor"),
    ],
)
def test_what_is_no_expression(text, message):
    with pytest.raises(PackingError) as caught:
        Expression(text)
    assert message in caught.value.message
    assert caught.value.message.startswith(f"'{text}' ")


@pytest.mark.parametrize(
    ("text", "hint"),
    [("self.shpae", "did you mean 'shape'?"), ("zz('x')", "use 'abs', 'bool', 'ceil_div'")],
)
def test_hints(text, hint):
    with pytest.raises(PackingError) as caught:
        Expression(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("self.shape[3]", "tuple index out of range"),
        ("self.numel() // 0", "by zero"),
        ("bias.shape", "'bias' is None, not a tensor"),
        ("size.numel()", "'size' is a tuple, not a tensor"),
        ("alpha[0]", "'alpha' is a float, not a list"),
        ("size['x']", "tuple indices must be integers"),
        ("self + 1", "a TensorSpec is no number"),
        ("size * 1000", "a tuple is no number"),
        ("prod(tensors)", "a TensorSpec is no number"),
        ("sum(('a', 'b'))", "a str is no number"),
        ("'a' * 1000", "a str is no number"),
        ("self.numel", "'numel' is a method: write 'numel()'"),
        ("min < 1", "not supported between instances of 'NoneType' and 'int'"),
        ("9 ** 9 ** 9 ** 9", "a power is too large"),
        ("2 ** 120 * 2 ** 120 * 2 ** 120", "a number is too large"),
        ("self.size()", "missing 1 required positional argument"),
        ("int('x')", "invalid literal"),
    ],
)
def test_what_has_no_value(text, message):
    expression = Expression(text)
    with pytest.raises(PackingError) as caught:
        expression.evaluate(NAMES.__getitem__)
    assert message in caught.value.message
    assert caught.value.message.startswith(f"'{text}' has no value here: ")


def test_a_deep_expression_is_an_error_not_a_crash():
    with pytest.raises(PackingError):
        value("(" * 5000 + "1" + ")" * 5000)
    with pytest.raises(PackingError):
        value("-" * 5000 + "1")


def test_names_are_those_that_are_looked_up():
    expression = Expression("max(self.shape[0], dim) if min is None else inf + self.numel()")
    assert sorted(expression.names) == ["dim", "min", "self"]
    assert repr(Expression("a + 1")) == "Expression('a + 1')"
