"""The values that flow through kagent. torch is the reference where it has the same notion."""

import itertools
import traceback

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kagent_core.errors import DeviceError
from kagent_core.specs import (
    Device,
    DeviceInfo,
    DType,
    LaunchConfig,
    MemRange,
    OpCall,
    Provenance,
    TensorSpec,
    flatten_tensors,
    format_value,
)

F32 = DType("float32", 4)
F16 = DType("float16", 2)


def spec_of(tensor, buffer=0):
    dtype = DType(str(tensor.dtype).removeprefix("torch."), tensor.element_size())
    return TensorSpec(dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), buffer)


def spec(*shape, dtype=F32, **changes):
    strides = tuple(itertools.accumulate((*reversed(shape[1:]),), lambda a, b: a * b, initial=1))[::-1]
    return TensorSpec(dtype, shape, strides if shape else (), **{"storage_offset": 0, "buffer": 0, **changes})


# -- devices


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu")),
        ("opencl:1", Device("opencl", 1)),
        ("my_npu2:10", Device("my_npu2", 10)),
    ],
)
def test_device_names_are_read_and_printed_alike(text, device):
    assert Device.parse(text) == device
    assert str(device) == text


@pytest.mark.parametrize("text", ["", "CPU", "cuda:", ":0", "cuda:-1", "cuda:0 ", "cuda:x", "cuda:0:1", "2d", "a-b"])
def test_what_is_no_device_name_is_refused(text):
    with pytest.raises(DeviceError) as caught:
        Device.parse(text)
    assert caught.value.message.startswith(f"'{text}'")
    assert "opencl:0" in caught.value.hint


def test_a_device_is_available_unless_it_has_a_reason():
    assert DeviceInfo(Device("toy"), "Toy").available
    assert not DeviceInfo(Device("toy"), "Toy", reason="unplugged").available


# -- memory


@st.composite
def tensors(draw):
    """Strided tensors: any strides, zero included, any offset, any shape of up to 3 dimensions."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.int8, torch.float64]))
    storage = torch.zeros(100, dtype=dtype)
    return storage.as_strided(shape, strides, offset)


def touched_bytes(tensor):
    size = tensor.element_size()
    places = itertools.product(*(range(n) for n in tensor.shape))
    starts = [
        size * (tensor.storage_offset() + sum(i * s for i, s in zip(place, tensor.stride(), strict=True)))
        for place in places
    ]
    return {start + byte for start in starts for byte in range(size)}


@given(tensors())
def test_a_range_covers_exactly_from_the_first_to_the_last_byte(tensor):
    covered = spec_of(tensor).range
    touched = touched_bytes(tensor)
    if not touched:
        assert covered.nbytes == 0
    else:
        assert (covered.offset, covered.end) == (min(touched), max(touched) + 1)


@given(tensors())
def test_numel_and_contiguity_are_torchs(tensor):
    assert spec_of(tensor).numel == tensor.numel()
    assert spec_of(tensor).is_contiguous == tensor.is_contiguous()


@given(tensors(), tensors())
def test_tensors_that_share_a_byte_overlap(one, two):
    shared = touched_bytes(one) & touched_bytes(two)
    assume(shared)
    assert spec_of(one).range.overlaps(spec_of(two).range)
    assert not spec_of(one).range.overlaps(spec_of(two, buffer=1).range)


@pytest.mark.parametrize(
    ("one", "two", "overlap"),
    [
        ((0, 8), (8, 8), False),
        ((0, 8), (7, 1), True),
        ((4, 4), (0, 16), True),
        ((4, 0), (0, 16), False),
        ((4, 0), (4, 0), False),
    ],
)
def test_ranges_overlap_when_they_share_a_byte(one, two, overlap):
    first, second = MemRange(3, *one), MemRange(3, *two)
    assert first.overlaps(second) is second.overlaps(first) is overlap


# -- text


def test_specs_print_as_people_write_them():
    assert str(spec(2, 3)) == "f32[2, 3]"
    assert str(spec(dtype=F16)) == "f16[]"
    assert str(spec(2, conj=True, neg=True)) == "*-f32[2]"
    assert str(DType("float8_e4m3fn", 1)) == "float8_e4m3fn"
    assert DType("float8_e4m3fn", 1).short == "float8_e4m3fn"
    assert str(MemRange(2, 4, 8)) == "b2[4:12]"
    assert str(LaunchConfig((2, 1, 1), (64, 1, 1))) == "grid (2, 1, 1) x block (64, 1, 1)"
    assert str(LaunchConfig(shared_nbytes=96)).endswith(" + 96 B shared")
    assert LaunchConfig(block=(4, 5, 6)).threads_per_block == 120


def test_a_call_prints_its_arguments_and_results():
    x = spec(2, 3)
    call = OpCall(7, "add_1", "aten::add.Tensor", {"self": x, "alpha": 2, "sizes": (1, x)}, (x,), (x,), (x, None))
    assert str(call) == "add_1: aten::add.Tensor(self=f32[2, 3], alpha=2, sizes=[1, f32[2, 3]]) -> (f32[2, 3], None)"


def test_tensors_are_found_in_nested_arguments_in_order():
    one, two, three = (spec(n) for n in (1, 2, 3))
    assert list(flatten_tensors((one, (2, "x", (two, None)), three))) == [one, two, three]
    assert list(flatten_tensors(one)) == [one]
    assert format_value((1, (2.5, "a"))) == "[1, [2.5, 'a']]"


# -- provenance


def stack_of(source, filename):
    """The stack of an error that `source` raises, as Python prints it; its lines are unknown to Python."""
    try:
        exec(compile(source, filename, "exec"), {})
    except ZeroDivisionError as error:
        return "".join(traceback.format_tb(error.__traceback__))


def test_the_line_is_the_innermost_frames():
    stack = '  File "a.py", line 3, in outer\n    x = f(y)\n  File "b.py", line 7, in f\n    return y / 0\n'
    assert Provenance(stack).line == "b.py:7: return y / 0"


def test_carets_under_a_line_do_not_count():
    stack = '  File "a.py", line 3, in outer\n    x = f(y)\n        ^^^^\n'
    assert Provenance(stack).line == "a.py:3: x = f(y)"


@pytest.mark.parametrize("ending", ["\n", ""])
def test_frames_without_source_are_frames(ending):
    stack = f'  File "a.py", line 3, in outer\n  File "<string>", line 1, in <module>{ending}'
    assert Provenance(stack).line == "<string>:1"


def test_a_real_stack():
    line = Provenance(stack_of("def f():\n    return 1 / 0\n\nf()\n", "no such file.py")).line
    assert line == "no such file.py:2"


def test_an_unknown_stack_has_no_line():
    assert Provenance().line is None
    assert Provenance("nothing of the kind").line is None
