"""Layout contracts, compared with PyTorch's own idea of its memory formats."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kagent_core.layout import ANY_STRIDES, CHANNELS_LAST, CHANNELS_LAST_3D, CONTIGUOUS, Layout, at_most
from kagent_core.specs import DType, KernelDescriptor, TensorSpec

FORMATS = {
    CONTIGUOUS: torch.contiguous_format,
    CHANNELS_LAST: torch.channels_last,
    CHANNELS_LAST_3D: torch.channels_last_3d,
}


def spec(shape, strides):
    return TensorSpec(DType("float32", 4), tuple(shape), tuple(strides), 0, 0)


@st.composite
def tensors(draw, least=0):
    """Shape and strides: dense in some order of the dimensions, here and there with another stride."""
    shape = draw(st.lists(st.integers(least, 3), max_size=5))
    strides, expected = [1] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim], expected = expected, expected * max(shape[dim], 1)
    for dim in draw(st.sets(st.sampled_from(range(len(shape))), max_size=1) if shape else st.just(set())):
        strides[dim] = draw(st.integers(0, 7))
    return spec(shape, strides)


@given(tensors(least=1))
def test_orders_are_those_of_pytorch(tensor):
    real = torch.empty_strided(tensor.shape, tensor.strides)
    for layout, memory_format in FORMATS.items():
        assert layout.takes(tensor) == real.is_contiguous(memory_format=memory_format)
    assert CONTIGUOUS.takes(tensor) == tensor.is_contiguous


@pytest.mark.parametrize(
    ("shape", "layouts"),
    [
        ((2, 3), {CONTIGUOUS}),
        ((2, 3, 4, 5), {CONTIGUOUS}),
        ((2, 1, 4, 5), {CONTIGUOUS, CHANNELS_LAST}),
        ((2, 1, 4, 5, 6), {CONTIGUOUS, CHANNELS_LAST_3D}),
    ],
)
def test_row_major_tensors_with_one_channel_are_channels_last_too(shape, layouts):
    tensor = torch.empty(shape)
    assert {layout for layout in FORMATS if layout.takes(spec(shape, tensor.stride()))} == layouts


def test_a_tensor_without_elements_is_in_every_order_of_its_rank():
    assert CONTIGUOUS.takes(spec((0, 3), (7, 5)))
    assert CHANNELS_LAST.takes(spec((0, 3, 2, 2), (7, 5, 3, 1)))
    assert not CHANNELS_LAST.takes(spec((0, 3), (3, 1)))


@given(tensors(), st.integers(0, 6))
def test_dimensions_are_counted(tensor, dims):
    assert at_most(dims).takes(tensor) == (len(tensor.shape) <= dims)
    assert ANY_STRIDES.takes(tensor)


def test_a_negative_number_of_dimensions_is_refused():
    with pytest.raises(ValueError, match="at most -1 dimensions"):
        at_most(-1)


ATOMS = [ANY_STRIDES, CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_3D, at_most(0), at_most(2), at_most(4)]


@st.composite
def combined(draw, depth=3):
    """A layout, and what it must take, told without it."""
    if depth == 0 or draw(st.booleans()):
        atom = draw(st.sampled_from(ATOMS))
        return atom, atom.takes
    (left, takes_left), (right, takes_right) = draw(combined(depth - 1)), draw(combined(depth - 1))
    if draw(st.booleans()):
        return left & right, lambda tensor: takes_left(tensor) and takes_right(tensor)
    return left | right, lambda tensor: takes_left(tensor) or takes_right(tensor)


@given(combined(), tensors())
def test_combinations_take_what_their_parts_take(pair, tensor):
    layout, takes = pair
    assert layout.takes(tensor) == takes(tensor)


@given(combined(), combined())
def test_combining_is_commutative_and_absorbs(one, other):
    a, b = one[0], other[0]
    assert set((a | b).contracts) == set((b | a).contracts)
    assert set((a & b).contracts) == set((b & a).contracts)
    assert set((a | (a & b)).contracts) == set((a | a).contracts)
    assert (a | ANY_STRIDES).takes_all


def test_layouts_are_told_in_words():
    told = {str(layout) for layout in (ANY_STRIDES, CONTIGUOUS & CHANNELS_LAST, at_most(3), CONTIGUOUS & at_most(3))}
    assert told == {
        "tensors of any strides",
        "channels-last and contiguous tensors",
        "tensors of at most 3 dimensions",
        "contiguous tensors of at most 3 dimensions",
    }
    assert str(CONTIGUOUS | CHANNELS_LAST_3D) == "contiguous tensors or channels-last 3d tensors"


def test_equal_layouts_are_equal_and_can_be_keys():
    assert CONTIGUOUS & at_most(3) & at_most(2) == at_most(2) & CONTIGUOUS
    assert CONTIGUOUS | (CONTIGUOUS & at_most(3)) == CONTIGUOUS
    assert ANY_STRIDES & CONTIGUOUS == CONTIGUOUS
    assert Layout() == ANY_STRIDES
    assert len({CONTIGUOUS, CONTIGUOUS | CONTIGUOUS}) == 1
    for one, other in itertools.combinations(ATOMS, 2):
        assert one != other


def test_a_kernel_has_a_layout_per_tensor():
    mixed = KernelDescriptor("aten::mm", "mm", layout=at_most(2), layouts={"mat2": CONTIGUOUS})
    assert (mixed.layout_of("self"), mixed.layout_of("mat2")) == (at_most(2), CONTIGUOUS)
    pairs = KernelDescriptor("aten::mm", "mm", layout=at_most(2), layouts=[("mat2", CONTIGUOUS)])
    assert mixed == pairs
    assert hash(mixed) == hash(pairs)
    assert mixed != KernelDescriptor("aten::mm", "mm", layout=at_most(2))
    assert KernelDescriptor("aten::mm", "mm", dtypes={"float32"}).dtypes == frozenset({"float32"})
