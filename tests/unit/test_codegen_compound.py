"""Compound reductions: what each kind's states come to, and the loops that they are found in."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.compound import ARGMAX, ARGMIN, COMPOUNDS, SOFTMAX, WELFORD, Compound, of_one
from kagent_core.codegen.elements import Element
from kagent_core.codegen.expressions import Expr, Expressions, walk
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.rules import normalization, reductions

from ..codegen_programs import check, text_of

aten = torch.ops.aten
INF, NAN = math.inf, math.nan


def exp(value: float) -> float:
    return math.exp(value) if value < 700 else value if math.isnan(value) else INF


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b,
    "gt": lambda a, b: a > b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda a: not a,
    "select": lambda condition, then, otherwise: then if condition else otherwise,
    "isnan": math.isnan,
    "isinf": math.isinf,
    "fmax": lambda a, b: b if math.isnan(a) else a if math.isnan(b) else max(a, b),
    "exp": exp,
    "cast": lambda value: value,
}


def computed(element: Element) -> Any:
    """Compute an element without variables in Python's numbers, which are float64."""
    values: dict[int, Any] = {}
    for node in walk(element.expr):
        args = [values[arg.number] for arg in node.args]
        values[node.number] = node.payload if node.op == "constant" else OPERATORS[node.op](*args)
    return values[element.expr.number]


def numbers(values: Sequence[float], dtypes: Sequence[str]) -> list[Element]:
    made = Expressions()
    return [Element(made.constant(value, dtype), made) for value, dtype in zip(values, dtypes, strict=True)]


def first_state(kind: Compound, dtypes: Sequence[str]) -> list[float]:
    ends = {"least": -INF, "greatest": INF}
    return [ends.get(part.first, part.first) for part in kind.parts]  # type: ignore[arg-type,misc]


def state_of(kind: Compound, taken: Sequence[Any], dtypes: Sequence[str], merge_in: random.Random) -> list[Any]:
    """Return the state of some elements, taken one by one and merged two and two in any order."""
    operands = ["float64", "int64"][: len(taken[0])]
    states = [[computed(part) for part in of_one(kind, *numbers(element, operands))] for element in taken]
    states.append(first_state(kind, dtypes))
    while len(states) > 1:
        one, other = (states.pop(merge_in.randrange(len(states))) for _ in range(2))
        both = numbers([*one, *other], [*dtypes, *dtypes])
        states.append([computed(part) for part in kind.merge(both[: len(one)], both[len(one) :])])
    return states[0]


ROWS = (
    [3.0, 1.0, 3.0, -2.0, 0.5],
    [1.0],
    [-INF, -INF, -INF],
    [-INF, 2.0, 2.0],
    [1.0, NAN, 5.0, NAN],
    [INF, 1.0, -INF],
    [INF, 1.0, NAN],
    [0.0, -0.0, 0.0],
)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_states_merged_in_any_order_are_what_pytorch_gives(row: list[float], seed: int) -> None:
    order = random.Random(seed)
    tensor = torch.tensor(row, dtype=torch.float64)
    for kind, position in ((ARGMAX, tensor.argmax()), (ARGMIN, tensor.argmin())):
        value, place = state_of(kind, [(value, n) for n, value in enumerate(row)], ["float64", "int64"], order)
        assert place == position
        torch.testing.assert_close(torch.tensor(value, dtype=torch.float64), tensor[position], equal_nan=True)
    taken = [(value,) for value in row]
    count, mean, squares = state_of(WELFORD, taken, ["float64"] * 3, order)
    assert count == len(row)
    found = torch.tensor([mean, squares / count], dtype=torch.float64)
    wanted = torch.stack([tensor.mean(), tensor.var(correction=0)])
    torch.testing.assert_close(found, wanted, equal_nan=True)
    top, weights = state_of(SOFTMAX, taken, ["float64"] * 2, order)
    found = torch.tensor(weights, dtype=torch.float64).log() + (0 if math.isinf(top) else top)
    torch.testing.assert_close(found, tensor.logsumexp(0), equal_nan=True)


def test_a_state_before_anything_is_taken_changes_none() -> None:
    for kind in COMPOUNDS.values():
        dtypes = ["float64", "int64" if kind in (ARGMAX, ARGMIN) else "float64", "float64"][: len(kind.parts)]
        state = [2.0, 3, 0.5][: len(kind.parts)]
        both = numbers([*first_state(kind, dtypes), *state], dtypes * 2)
        merged = kind.merge(both[: len(state)], both[len(state) :])
        assert [computed(part) for part in merged] == state


def test_equal_compound_reductions_are_one() -> None:
    made = Expressions()
    axes = (Axis("r0", 5, reduced=True),)
    parts = [made.constant(1.0, "float64"), made.count(axes)]
    one, other = (made.compound("argmax", parts, axes) for _ in range(2))
    assert one == other
    assert [part.dtype for part in one] == ["float64", "int64"]
    assert made.compound("argmin", parts, axes)[0] is not one[0]
    value = Expr("load", (), "float32", None, frozenset(axes), -1)
    assert made.reduce("max", value, axes) is not made.reduce("max", value, axes, in_block=True)


# -- the loops


def rows(function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> str:
    return text_of(function, torch.empty(shape, dtype=dtype))


def softmax(x: torch.Tensor, dim: int = -1) -> Any:
    return aten._softmax(x, dim, False)


def test_several_parts_share_one_loop() -> None:
    text = rows(lambda x: aten.max.dim(x, 1), 40, 5000)
    assert text.count("for (i64 r0_0") == 1
    assert text.count("for (i64 r0 = r0_0") == 2  # the search of a block, after its maximum
    spread = rows(lambda x: aten.var_mean.correction(x, [1]), 40, 1 << 23)
    assert spread.count("for (i64 r0_0") == 1
    assert len(re.findall(r"f64 welford_mean\b.* = 0.0;", spread)) == 1


def test_most_blocks_are_not_searched() -> None:
    text = rows(lambda x: aten.argmax(x, 1), 40, 5000)
    assert text.index("block_max < argmax_value") < text.index("continue;") < text.index("min_so_far")
    assert "continue;" not in rows(softmax, 40, 20_000)


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: aten.argmax(x, -1), 1024),
        (softmax, 8192),
        (lambda x: aten.logsumexp(x, [-1]), 8192),
        (lambda x: aten.var.correction(x, [-1]), 1 << 22),
        (lambda x: aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5), 1 << 22),
        (lambda x: aten.native_group_norm(x.view(20, 4, -1), None, None, 20, 4, x.shape[1] // 4, 1, 1e-5)[0], 1 << 22),
    ],
)
def test_rows_that_caches_hold_are_read_more_than_once(function: Callable[..., Any], most: int) -> None:
    assert "found_" not in rows(function, 20, most)
    assert "found_" in rows(function, 20, most + 4)


def test_columns_are_read_once_where_caches_do_not_hold_a_block_of_them() -> None:
    for function in (lambda x: aten.argmax(x, 0), lambda x: softmax(x, 0), lambda x: aten.var.correction(x, [0])):
        assert "found_" not in rows(function, 1 << 15, 500)
        text = rows(function, (1 << 15) + 1, 500)
        assert "found_" in text
        assert "for (i64 i0 = i0_0" in text


def test_a_device_without_caches_takes_each_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "found_" not in rows(softmax, 40, 70)
    monkeypatch.setattr(CFamily, "one_pass", True)
    text = rows(softmax, 40, 70)
    assert text.count("for (i64 r0") == 2  # the state, and the result
    assert text.index("const f64 found_weights") < text.index("softmax_weights = merged_weights;")


def test_what_a_row_has_in_common_is_declared_again_after_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> Any:
        return softmax(x * aten.exp(y)), aten.exp(y) * 2

    args = (torch.randn(30, 600), torch.randn(30, 1))
    monkeypatch.setattr(reductions, "KEPT_ROW", 0)
    monkeypatch.setattr(normalization, "KEPT_ROW", 0)
    check([(scaled, args), (scaled, (args[0][:, :50], args[1]))])
    assert "found_" in text_of(scaled, *args)
    monkeypatch.setattr(CFamily, "one_pass", True)
    check([(scaled, args)])


def test_threads_share_few_long_rows() -> None:
    text = rows(lambda x: aten.argmax(x, 1), 2, 1 << 20)
    assert "f32 argmax_value_of[64];" in text
    assert "for (i64 r0_0 = r0_first; r0_0 < r0_end; r0_0 += 512)" in text


def test_a_costly_value_is_computed_once_where_it_is_kept() -> None:
    def both(x: torch.Tensor) -> Any:
        y = aten.tanh(x)
        return y, aten.argmax(y, 1)

    assert rows(both, 40, 5000).count("tanhf(") == 1
    check([(both, (torch.randn(40, 5000),)), (both, (torch.randn(3, 1100),))])


def test_compound_reductions_beside_each_other_and_after_each_other() -> None:
    def beside(x: torch.Tensor) -> Any:
        return aten.argmax(x, 1), aten.argmin(x, 1), aten.amax(x, [1])

    def after(x: torch.Tensor) -> Any:
        return softmax(x - x.argmax(1, keepdim=True)), aten.argmin(x, 1)

    check([(beside, (torch.randn(5, 3000),)), (after, (torch.randn(3, 9000),))])


def test_a_row_of_several_loops_is_read_block_by_block() -> None:
    x = torch.randn(2, 40, 3, 70)[:, ::2]
    check([(lambda x: aten.argmax(x), (x,)), (lambda x: aten.max.dim(x.flatten(1), 1), (x,))])
    # here loops do not follow the order of positions, and there are ties
    y = torch.randint(0, 3, (60, 50))
    check([(lambda y: aten.argmax(y.t()), (y.float(),)), (lambda y: aten.argmin(y.t()), (y,))])
