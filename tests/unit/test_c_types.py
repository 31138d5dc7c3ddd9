"""C types: sizes, tensors behind pointers, and conversion, against ctypes, numpy and brute force."""

from __future__ import annotations

import bisect
import ctypes
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kagent_core.errors import PackingError
from kagent_core.prototype.abi import Abi
from kagent_core.prototype.c_types import Kind, describe

from .builders import tensor

ABI = Abi()
WHAT = "parameter 'p' of kernel 'k'"

C_TYPES = {
    "bool": ctypes.c_bool,
    "char": ctypes.c_int8,
    "signed char": ctypes.c_int8,
    "unsigned char": ctypes.c_uint8,
    "uchar": ctypes.c_uint8,
    "short": ctypes.c_short,
    "short int": ctypes.c_short,
    "ushort": ctypes.c_ushort,
    "int": ctypes.c_int,
    "signed": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "uint": ctypes.c_uint,
    "long": ctypes.c_int64,
    "ulong": ctypes.c_uint64,
    "long unsigned int": ctypes.c_uint64,
    "long long": ctypes.c_longlong,
    "unsigned long long int": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "std::size_t": ctypes.c_size_t,
    "ptrdiff_t": ctypes.c_ssize_t,
    "intptr_t": ctypes.c_ssize_t,
    "uintptr_t": ctypes.c_size_t,
    "std::int32_t": ctypes.c_int32,
    **{f"{u}int{bits}_t": getattr(ctypes, f"c_{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)},
    "float": ctypes.c_float,
    "const double": ctypes.c_double,
    "sizes8": ctypes.c_int64 * 8,
    "strides3": ctypes.c_int64 * 3,
    "uint8_t[5]": ctypes.c_uint8 * 5,
    "float[3]": ctypes.c_float * 3,
    "const float*": ctypes.c_void_p,
}
INTEGERS = [name for name in C_TYPES if ABI.type(name).kind is Kind.INTEGER]


@pytest.mark.parametrize("name", C_TYPES)
def test_sizes_and_alignments_are_those_of_c(name):
    ctype = ABI.type(name)
    assert (ctype.nbytes, ctype.alignment) == (ctypes.sizeof(C_TYPES[name]), ctypes.alignment(C_TYPES[name]))


@pytest.mark.parametrize("name", INTEGERS)
def test_signs_are_those_of_c(name):
    assert ABI.type(name).signed is (C_TYPES[name](-1).value == -1)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("half", 2), ("__half", 2), ("bfloat16", 2), ("__nv_bfloat16", 2), ("half2", 4), ("float2", 8), ("cuComplex", 8),
     ("float _Complex", 8), ("thrust::complex<double>", 16), ("half[4]", 8), ("float2[3]", 24)],
)  # fmt: skip
def test_sizes_of_what_python_has_no_ctypes_for(name, nbytes):
    assert ABI.type(name).nbytes == nbytes


def test_the_abi_says_how_long_and_pointers_are_laid_out():
    abi = Abi(pointer_nbytes=4, long_nbytes=4, alignments={"int64_t": 4})
    assert [abi.type(name).nbytes for name in ("long", "ulong", "long long", "size_t", "const float*")] == [
        4,
        4,
        8,
        4,
        4,
    ]
    assert abi.type("float*").pack(None) == bytes(4)
    assert abi.type("int64_t").alignment == abi.type("sizes8").alignment == 4
    assert abi.type("double").alignment == 8


@pytest.mark.parametrize(
    ("pointer", "dtypes"),
    [
        ("const float*", {"float32"}),
        ("float *", {"float32"}),
        ("float const*", {"float32"}),
        ("double* const", {"float64"}),
        ("half*", {"float16"}),
        ("__nv_bfloat16*", {"bfloat16"}),
        ("bool*", {"bool"}),
        ("uchar*", {"uint8", "bool"}),
        ("char*", {"int8"}),
        ("long*", {"int64"}),
        ("uint16_t*", {"uint16"}),
        ("float2*", {"complex64", "float32"}),
        ("half2*", {"complex32", "float16"}),
        ("c10::complex<double>*", {"complex128"}),
        ("float4*", {"float32"}),
        ("uchar16*", {"uint8", "bool"}),
    ],
)
def test_dtypes_behind_pointers(pointer, dtypes):
    ctype = ABI.type(pointer)
    assert ctype.dtypes == dtypes
    assert ctype.const is ("const" in pointer.partition("*")[0])


def test_a_pointer_to_void_takes_every_dtype():
    assert ABI.type("const void*").dtypes is None


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("float32", "'float32' is no type", "did you mean 'float'?"),
        ("Float", "'Float' is no type", "did you mean 'float'?"),
        ("", "'' is no type", "give its meaning with types={...}"),
        ("image2d_t", "'image2d_t' is no type", None),
        ("float16*", "'float16' is one number in some languages and a vector in OpenCL C", "write 'half'"),
        ("uint8", "'uint8' is one number", "write 'uint8_t'"),
        ("float**", "'float**' is a pointer to pointers", "'tensors0', 'tensors1'"),
        ("float*[4]", "'float*[4]' is no array of numbers", None),
        ("void[4]", "'void[4]' is no array of numbers", None),
    ],
)
def test_what_is_no_type(name, message, hint):
    with pytest.raises(PackingError) as caught:
        ABI.type(name)
    assert message in caught.value.message
    assert hint is None or hint in caught.value.hint


# -- conversion


def packed(name, value, padding=0):
    ctype = ABI.type(name)
    return ctype.pack(ctype.convert(value, WHAT, padding))


def refusal(name, value):
    with pytest.raises(PackingError) as caught:
        packed(name, value)
    assert WHAT in caught.value.message
    return caught.value.message


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(INTEGERS), st.integers(-(2**65), 2**65) | st.integers(-300, 300))
@example("int32_t", 2**31)
@example("int32_t", -(2**31))
@example("uint8_t", 256)
def test_integers_never_wrap(name, value):
    here = C_TYPES[name](value)
    if here.value == value:
        assert packed(name, value) == bytes(here)
    else:
        assert f"which {value} does not fit" in refusal(name, value)


@settings(max_examples=300, deadline=None)
@given(st.floats())
def test_floats_are_rounded_as_c_rounds_them(value):
    there = ctypes.c_float(value)
    if math.isfinite(value) and math.isinf(there.value):
        assert f"in which {value} would become infinite" in refusal("float", value)
        return
    assert packed("float", value)[:3] == bytes(there)[:3] or math.isnan(value)
    assert packed("double", value) == struct.pack("d", value)
    seen = ABI.type("float").convert(value, WHAT)
    assert seen == there.value or (math.isnan(seen) and math.isnan(value))


@settings(max_examples=300, deadline=None)
@given(st.floats(-70000, 70000) | st.floats(-1e-4, 1e-4) | st.floats())
@example(65519.99)
@example(65520.0)
@example(-0.0)
def test_halves_are_rounded_once(value):
    with np.errstate(all="ignore"):
        there = np.float16(value)
    if math.isfinite(value) and np.isinf(there):
        assert "would become infinite" in refusal("half", value)
    elif math.isnan(value):
        assert math.isnan(ABI.type("half").unpack(packed("half", value)))
    else:
        assert packed("half", value) == there.tobytes()


def _bfloat16(bits):
    return struct.unpack("=f", struct.pack("=I", bits << 16))[0]


POSITIVE = [Fraction(_bfloat16(bits)) for bits in range(0x7F80)] + [Fraction(2) ** 128]


def _nearest_bfloat16(value):
    """Bits of the nearest bfloat16, ties to the even one, by search among all of them."""
    exact = abs(Fraction(value))
    above = min(bisect.bisect_left(POSITIVE, exact), len(POSITIVE) - 1)
    below = max(above - 1, 0)
    up, down = POSITIVE[above] - exact, exact - POSITIVE[below]
    bits = above if up < down or (up == down and above % 2 == 0) else below
    return bits | (0x8000 if math.copysign(1, value) < 0 else 0)


def _next_to_a_tie(bits, nudge):
    return _bfloat16(bits) * (1 + 2.0**-8 + nudge * 2.0**-50)


@settings(max_examples=300, deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-3.5e38, 3.5e38)
    | st.floats(-1e-37, 1e-37)
    | st.builds(_next_to_a_tie, st.integers(1, 0x7F00), st.integers(-1, 1))
)
@example(-0.0)
@example(0.0)
@example(1.0 + 2.0**-8)
@example(1.0 + 2.0**-8 + 2.0**-40)  # by way of float32 this is a tie, and falls
@example(2.0**-134)
@example(-(2.0**-135))
@example(5e-324)
@example(3.3953138837160146e38)
def test_bfloat16s_are_rounded_once(value):
    bits = _nearest_bfloat16(value)
    if bits & 0x7FFF >= 0x7F80:
        assert "would become infinite" in refusal("bfloat16", value)
    else:
        assert packed("bfloat16", value) == struct.pack("=H", bits)
        assert ABI.type("bfloat16").unpack(packed("bfloat16", value)) == _bfloat16(bits)


@pytest.mark.parametrize("name", ["half", "bfloat16", "float", "double"])
def test_infinities_and_nan_are_values(name):
    ctype = ABI.type(name)
    assert ctype.unpack(packed(name, math.inf)) == math.inf
    assert ctype.unpack(packed(name, -math.inf)) == -math.inf
    assert math.isnan(ctype.unpack(packed(name, math.nan)))


def test_a_half_is_converted_not_copied():
    assert packed("half", 1.0) == struct.pack("=H", 0x3C00)
    assert packed("bfloat16", 1.0) == struct.pack("=H", 0x3F80)


@settings(max_examples=300, deadline=None)
@given(st.complex_numbers(allow_nan=False))
def test_complex_numbers(value):
    parts = (ctypes.c_float(value.real), ctypes.c_float(value.imag))
    lost = any(math.isfinite(x) and math.isinf(y.value) for x, y in zip((value.real, value.imag), parts, strict=True))
    if lost:
        assert "would become infinite" in refusal("float2", value)
    else:
        assert packed("float2", value) == b"".join(map(bytes, parts))
        assert ABI.type("float2").unpack(packed("float2", value)) == complex(*(part.value for part in parts))
    assert packed("double2", value) == struct.pack("2d", value.real, value.imag)


@pytest.mark.parametrize(
    ("name", "value", "same_as"),
    [
        ("int32_t", True, 1),
        ("float", True, 1.0),
        ("float", 3, 3.0),
        ("float2", 2, 2 + 0j),
        ("double2", 1.5, 1.5 + 0j),
        ("bool", 1, True),
        ("bool", 0, False),
    ],
)
def test_what_c_converts_without_loss(name, value, same_as):
    assert packed(name, value) == packed(name, same_as)
    assert type(ABI.type(name).convert(value, WHAT)) is type(ABI.type(name).convert(same_as, WHAT))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("int64_t", 2.0, "takes an integer, not the float 2.0"),
        ("int32_t", 1j, "takes an integer, not the complex 1j"),
        ("float", 1 + 0j, "takes a real number, not the complex (1+0j)"),
        ("bool", 2, "takes true or false, not the int 2"),
        ("bool", 1.0, "takes true or false, not the float 1.0"),
        ("float", 10**400, "would become infinite"),
        ("float2", 10**400, "would become infinite"),
        ("half", 1e5, "is a half, in which 100000.0 would become infinite"),
        ("float", None, "takes a number, not None"),
        ("float", "mean", "takes a number, not the str 'mean'"),
        ("int32_t", (1, 2), "takes a number, not the list [the int 1, the int 2]"),
        ("int32_t", tuple(range(9)), "takes a number, not a long list"),
        ("float", tensor(0, 2, 3), "takes a number, not the tensor f32[2, 3]"),
        ("const float*", 0, "is a const float* and takes a tensor, not the int 0"),
        ("int64_t[2]", 3, "takes a list, not the int 3"),
        ("int64_t[2]", (1, 2, 3), "is a int64_t[2], which 3 values do not fit: [1, 2, 3]"),
        (
            "uint8_t[2]",
            (1, 256),
            "an element of parameter 'p' of kernel 'k' is a uint8_t (0 to 255), which 256 does",
        ),
    ],
)
def test_what_is_refused(name, value, message):
    assert message in refusal(name, value)


def test_arrays_are_padded():
    assert packed("int16_t[4]", (1, -2)) == struct.pack("4h", 1, -2, 0, 0)
    assert packed("sizes3", [5], padding=1) == struct.pack("3q", 5, 1, 1)
    assert packed("bool[2]", (True,)) == b"\1\0"
    assert packed("bfloat16[2]", (1.0, -2.0)) == struct.pack("=2H", 0x3F80, 0xC000)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.complex_numbers(max_magnitude=100, width=64), min_size=2, max_size=2))
def test_arrays_of_pairs(values):
    ctype = ABI.type("float2[2]")
    assert ctype.unpack(packed("float2[2]", values)) == tuple(values)


def test_a_null_pointer():
    assert packed("const float*", None) == bytes(8)
    assert ABI.type("const float*").unpack(bytes(8)) is None


@pytest.mark.parametrize("name", ["int16_t", "float", "sizes2", "bfloat16"])
def test_packing_into_memory_gives_the_same_bytes_in_their_place(name):
    ctype = ABI.type(name)
    value = ctype.convert((3, 4) if ctype.kind is Kind.ARRAY else 3, WHAT)
    memory = bytearray(40)
    ctype.pack_into(memoryview(memory), 8, value)
    assert memory == bytes(8) + ctype.pack(value) + bytes(32 - ctype.nbytes)


def test_values_in_messages():
    assert describe(False) == "the bool False"
    assert describe([None, 1]) == "the list [None, the int 1]"
