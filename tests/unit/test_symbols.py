"""Symbolic sizes and their values in one call."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kagent_core.capture import symbols
from kagent_core.capture.symbols import SymbolValues, is_symbolic
from kagent_core.errors import CaptureError


def fake(real):
    """A fake tensor all of whose sizes, strides and offset are symbols where torch makes them so."""
    mode = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False, duck_shape=False))
    sizes = torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
        dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * real.dim()
    )
    return mode.from_tensor(real, symbolic_context=sizes)


@pytest.fixture
def bound():
    """A fake tensor of two symbolic sizes, and the values of a call with a 4 by 6 tensor."""
    symbolic = fake(torch.zeros(2, 3))
    values = SymbolValues()
    values.bind_tensor(symbolic, torch.zeros(4, 6))
    return symbolic, values


def test_sizes_of_the_call_take_the_symbols_place(bound):
    symbolic, values = bound
    assert is_symbolic(symbolic.shape[0])
    assert values.ints(symbolic.shape) == (4, 6)
    assert values.ints(symbolic.stride()) == (6, 1)
    assert all(type(number) is int for number in values.ints(symbolic.stride()))


def test_expressions_are_computed(bound):
    (rows, columns), values = bound[0].shape, bound[1]
    assert values.value(rows * columns + 1) == 25
    assert values.value((rows * columns) // 5) == 4
    assert values.value(-rows // 3) == -2  # floors, as Python does
    assert values.value((columns + rows) % 7) == 3
    assert values.value(torch.sym_max(rows, columns)) == 6


def test_numbers_keep_their_kind(bound):
    (rows, columns), values = bound[0].shape, bound[1]
    half = values.value(torch.sym_float(rows) / 8)
    assert (type(half), half) == (float, 0.5)
    less = values.value(rows < columns)
    assert (type(less), less) == (bool, True)
    assert type(values.value(torch.sym_int(torch.sym_float(columns) / 4))) is int


@pytest.mark.parametrize("plain", [3, 2.5, True, None, "x", torch.float32])
def test_what_is_not_symbolic_stays_as_it_is(plain):
    assert not is_symbolic(plain)
    assert SymbolValues().value(plain) is plain


def test_the_first_value_of_a_symbol_stays(bound):
    symbolic, values = bound
    values.bind(symbolic.shape[0], 99)
    assert values.value(symbolic.shape[0]) == 4


def test_an_expression_binds_nothing(bound):
    rows = bound[0].shape[0]
    values = SymbolValues()
    values.bind(rows * 2, 8)
    with pytest.raises(CaptureError):
        values.value(rows)


def test_an_expression_is_evaluated_once(bound, monkeypatch):
    (rows, columns), values = bound[0].shape, bound[1]
    evaluated = []
    interpret = symbols.sympy_interp
    monkeypatch.setattr(symbols, "sympy_interp", lambda *args: evaluated.append(args) or interpret(*args))
    assert [values.value(rows * columns) for _ in range(5)] == [24] * 5
    assert len(evaluated) == 1


def test_a_symbol_that_no_input_tells_is_an_error_that_names_it(bound):
    symbolic = bound[0]
    rows = symbolic.shape[0]
    with pytest.raises(CaptureError) as caught:
        SymbolValues().value(rows + 1)
    assert str(rows.node.expr) in caught.value.message
    assert "which no input of the graph tells" in caught.value.message
    assert "dynamic=False" in caught.value.hint


def test_a_symbolic_stride_is_bound_by_the_tensor():
    real = torch.zeros(4, 8)[:, ::2]
    symbolic = fake(real)
    values = SymbolValues()
    values.bind_tensor(symbolic, torch.zeros(6, 10)[:, ::2])
    assert values.ints(symbolic.shape) == (6, 5)
    assert values.ints(symbolic.stride()) == (10, 2)
