"""Expressions of generated kernels: index arithmetic, promotion, primitives and the names of their values."""

from __future__ import annotations

import doctest
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.codegen import dtypes, elements, indices, lowering, table
from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.dtypes import common_dtype, name_of
from kagent_core.codegen.expressions import Expressions, Load, walk
from kagent_core.codegen.indices import Axis, Computed, Index, Quotient, flatten, offset_of, refine, unflatten
from kagent_core.codegen.primitives import PRIMITIVES
from kagent_core.codegen.writer import RESERVED, Parameters, Statements
from kagent_core.specs import DType, TensorSpec

from .builders import tensor as build_tensor

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES += (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensor(buffer: int, *shape: int, dtype: str = "float32") -> TensorSpec:
    """A contiguous tensor of a type by name."""
    return build_tensor(buffer, *shape, dtype=DType(dtype, getattr(torch, dtype).itemsize))


@pytest.mark.parametrize("module", [indices, table, dtypes, elements, lowering], ids=lambda module: module.__name__)
def test_examples(module):
    assert doctest.testmod(module).failed == 0


# -- index arithmetic, against Python's own


AXES = (Axis("i", 4), Axis("j", 6), Axis("k", 1), Axis("l", 5, reduced=True))
PLACES = itertools.product(*(range(axis.extent) for axis in AXES))
EVERYWHERE = [dict(zip(AXES, place, strict=True)) for place in PLACES]


def value_of(index: Index, at: dict[Axis, int]) -> int:
    """Compute an index with integers."""
    total = index.constant
    for atom, factor in index.terms:
        if isinstance(atom, Axis):
            total += factor * at[atom]
            continue
        assert not isinstance(atom, Computed)
        inner = value_of(atom.index, at)
        total += factor * (inner // atom.divisor if isinstance(atom, Quotient) else inner % atom.divisor)
    return total


factors = st.integers(-12, 12)
sums = st.builds(
    lambda numbers, constant: sum((Index.of(a) * n for a, n in zip(AXES, numbers, strict=True)), Index((), constant)),
    st.lists(factors, min_size=len(AXES), max_size=len(AXES)),
    st.integers(-20, 20),
)
any_index = st.recursive(
    sums,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, n: a * n, inner, factors),
        st.builds(lambda a, n: a // n, inner, st.integers(1, 12)),
        st.builds(lambda a, n: a % n, inner, st.integers(1, 12)),
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(any_index, any_index, st.integers(1, 15), st.integers(-9, 9))
def test_index_arithmetic_is_integer_arithmetic(one, other, divisor, factor):
    quotient, remainder = one // divisor, one % divisor
    total, difference, product = one + other, one - other, one * factor
    low, high = one.bounds
    for at in EVERYWHERE:
        a, b = value_of(one, at), value_of(other, at)
        assert low <= a <= high
        assert value_of(quotient, at) == a // divisor
        assert value_of(remainder, at) == a % divisor
        assert value_of(total, at) == a + b
        assert value_of(difference, at) == a - b
        assert value_of(product, at) == a * factor


@settings(max_examples=50, deadline=None)
@given(sums, sums)
def test_substitution_puts_an_index_in_an_axis_place(index, replacement):
    replaced = index.substitute({AXES[0]: replacement})
    for at in EVERYWHERE:
        assert value_of(replaced, at) == value_of(index, {**at, AXES[0]: value_of(replacement, at)})


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def factorizations(numel: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of so many elements."""
    divisors = [d for d in range(1, numel + 1) if numel % d == 0]

    @st.composite
    def shape(draw):
        left, sizes = numel, []
        while left > 1:
            least = 1 if len(sizes) < 5 else 2
            size = draw(st.sampled_from([d for d in divisors if left % d == 0 and d >= least]))
            sizes.append(size)
            left //= size
        return tuple(sizes)

    return shape()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 12, 30, 64]).flatmap(lambda n: st.tuples(factorizations(n), factorizations(n))))
def test_a_reshape_reads_the_element_at_the_same_position(two):
    shape, other = two
    axes = [Axis(f"a{n}", size) for n, size in enumerate(shape)]
    parts = unflatten(flatten([Index.of(axis) for axis in axes], shape), other)
    assert len(parts) == len(other)
    for number, place in enumerate(itertools.product(*map(range, shape))):
        at = dict(zip(axes, place, strict=True))
        found = tuple(value_of(part, at) for part in parts)
        assert found == next(itertools.islice(itertools.product(*map(range, other)), number, None))


@settings(max_examples=60, deadline=None)
@given(shapes, st.data())
def test_an_offset_is_where_torch_finds_the_element(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    view = torch.arange(math.prod(shape) + 3)[3:].view(shape).permute(order)
    axes = [Axis(f"a{n}", size) for n, size in enumerate(view.shape)]
    offset = offset_of([Index.of(axis) for axis in axes], view.stride(), view.storage_offset())
    for place in itertools.product(*map(range, view.shape)):
        assert value_of(offset, dict(zip(axes, place, strict=True))) == view[place].item()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([12, 36, 64]).flatmap(lambda n: st.lists(factorizations(n), min_size=1, max_size=3)))
def test_refined_sizes_make_up_every_shape(given_shapes):
    fine = refine(given_shapes)
    cuts = [set(itertools.accumulate(reversed(shape), lambda a, b: a * b)) - {1} for shape in given_shapes]
    if fine is None:  # some two cuts do not divide each other
        ordered = sorted(set().union(*cuts))
        assert any(b % a for a, b in itertools.pairwise(ordered))
        return
    assert set(itertools.accumulate(reversed(fine), lambda a, b: a * b)) == set().union(*cuts)


# -- promotion


def kinds(dtype: torch.dtype) -> list:
    """A tensor with dimensions and one without, each as the table sees it and as torch does."""
    name = name_of(dtype)
    return [
        (tensor(0, 3, dtype=name), torch.zeros(3, dtype=dtype)),
        (tensor(0, dtype=name), torch.zeros((), dtype=dtype)),
    ]


OPERANDS = [kind for dtype in DTYPES for kind in kinds(dtype)] + [(number, number) for number in (True, 2, 2.5)]


def test_promotion_is_torch_result_type():
    for (mine, theirs), (other, its) in itertools.product(OPERANDS, repeat=2):
        if isinstance(theirs, torch.Tensor) or isinstance(its, torch.Tensor):
            assert common_dtype([mine, other]) == name_of(torch.result_type(theirs, its)), (theirs, its)


def test_promotion_of_three_operands():
    """Those with dimensions decide, unless one without is of a higher category."""
    for specs, want in (
        (("int8:3", "int32:", "int16:3"), "int16"),
        (("int8:3", "float64:", 2.5), "float64"),
        (("float16:3", "float64:", 2.5), "float16"),
        (("float16:3", "bfloat16:3", "float64:"), "float32"),
        (("bool:3", "uint8:", 2), "uint8"),
        (("bool:3", True, 2), "int64"),
    ):
        values = [
            tensor(0, *map(int, filter(None, spec.split(":")[1:])), dtype=spec.split(":")[0])
            if isinstance(spec, str)
            else spec
            for spec in specs
        ]
        assert common_dtype(values) == want


# -- expressions


def test_equal_expressions_are_one():
    e = Expressions()
    i = Index.of(Axis("i", 8))
    x, y = e.load(tensor(0, 8), i), e.load(tensor(1, 8), i)
    assert e.load(tensor(0, 8), i) is x
    assert e.op("add", x, y) is e.op("add", y, x)
    assert e.op("sub", x, y) is not e.op("sub", y, x)
    assert e.op("mul", x, e.constant(1, "float32")) is x
    assert e.op("add", x, e.constant(0, "float32")) is not x  # -0.0 + 0.0 is 0.0
    assert e.constant(0.0, "float32") is not e.constant(-0.0, "float32")
    assert e.constant(math.nan, "float32") is e.constant(math.nan, "float32")
    assert e.constant(1, "float32") is not e.constant(1, "float64")


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**70), 2**70), st.sampled_from(["uint8", "int8", "int16", "int32", "int64"]))
def test_integer_constants_wrap_around(value, dtype):
    info = torch.iinfo(getattr(torch, dtype))
    assert Expressions().constant(value, dtype).payload == (value - info.min) % 2**info.bits + info.min


@settings(max_examples=200, deadline=None)
@given(st.floats(), st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
def test_float_constants_are_rounded(value, dtype):
    want = torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype)).item()
    got = Expressions().constant(value, dtype).payload
    assert got == want or (math.isnan(got) and math.isnan(want))


def test_halves_are_rounded_after_each_operator_unless_told_otherwise():
    for rounds in (True, False):
        e = Expressions(round_halves=rounds)
        x = e.load(tensor(0, 8, dtype="bfloat16"), Index.of(Axis("i", 8)))
        total = e.op("add", e.cast(x, "float32"), e.cast(x, "float32"))
        again = e.cast(e.cast(total, "bfloat16"), "float32")
        assert (again is total) is not rounds
        assert e.cast(e.cast(x, "float32"), "bfloat16") is x


def test_primitives_take_operands_of_one_type():
    e = Expressions()
    x, n = e.constant(2.5, "float32"), e.constant(2, "int32")
    half = e.load(tensor(0, 8, dtype="float16"), Index())
    for name, args in (("add", (x, n)), ("add", (x,)), ("exp", (half,)), ("select", (e.op("lt", x, x), x, n))):
        with pytest.raises(TypeError, match=name):
            e.op(name, *args)
    assert e.op("lt", half, half).dtype == "bool"
    assert e.op("max", half, half).dtype == "float16"


def test_under_a_condition_loads_and_divisions_depend_on_it():
    e = Expressions()
    i = Index.of(Axis("i", 8))
    x = e.load(tensor(0, 8, dtype="int32"), i)
    condition = e.op("lt", x, e.constant(3, "int32"))
    with e.masked(condition):
        inside = e.load(tensor(1, 8, dtype="int32"), i)
        quotient = e.op("floor_div", x, inside)
    assert inside.args == (condition,)
    assert quotient.args[1].op == "select"
    assert [node.payload for node in walk(quotient) if node.op == "load"] == [
        Load(tensor(0, 8, dtype="int32"), i),
        Load(tensor(1, 8, dtype="int32"), i),
    ]
    assert e.mask is None


# -- their spelling


def test_every_primitive_has_a_spelling():
    integers_alone = {"trunc_div", "floor_div", "rem", "and", "or", "xor", "not", "shl", "shr", "ipow"}
    language = CFamily()
    for primitive in PRIMITIVES.values():
        e = Expressions()
        dtype = "int32" if primitive.name in integers_alone else "float32"
        args = [e.load(tensor(n, 8, dtype=dtype), Index()) for n in range(primitive.arity)]
        if primitive.name == "select":
            args[0] = e.op("lt", args[1], args[2])
        text = language.primitive(e.op(primitive.name, *args), [f"a{n}" for n in range(len(args))])
        assert all(f"a{n}" in text for n in range(primitive.arity)), primitive.name
        assert text.count("(") == text.count(")")
    assert integers_alone <= set(PRIMITIVES)


def test_values_are_not_called_as_functions_are():
    statements = Statements(CFamily(), Parameters(CFamily(), (), ()), {})
    names = [statements.fresh_name(base) for base in ("exp", "exp", "_softmax", "__and__", "_", "log", "add", "add")]
    assert names[2] == "softmax"
    assert names[-2:] == ["add", "add_1"]
    assert len(set(names)) == len(names)
    assert not RESERVED.intersection(names)
    assert all(not name.startswith("_") for name in names)
