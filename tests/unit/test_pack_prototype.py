"""Packing for kernels that declare their parameters: what they get, byte by byte, and what is refused."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from kagent_core.errors import LaunchConfigError, PackingError
from kagent_core.extract.launch_choice import LaunchChoice, with_local_memory
from kagent_core.extract.pack_prototype import PrototypePacker, check_sizes, has_prototype
from kagent_core.extract.packing import CallPacker
from kagent_core.extract.parameter_buffer import collect_parameters
from kagent_core.prototype import parse_prototype
from kagent_core.prototype.abi import Abi
from kagent_core.specs import (
    Access,
    Device,
    DeviceInfo,
    DType,
    KernelDescriptor,
    LaunchConfig,
    LocalMemory,
    PackedArg,
    Parameter,
)

from .builders import call, task, tensor

X, Y, OUT = (tensor(number, 2, 3) for number in range(3))
RELU = call(0, "aten::relu", {"self": X}, [OUT])
SELF, OTHER, RESULT = (
    Parameter("self", "const float*"),
    Parameter("other", "const float*"),
    Parameter("out", "float*"),
)


def kernel(signature, parameters, **options):
    return KernelDescriptor(signature, "k", parameters=tuple(parameters), **options)


def pack(one, *parameters, **options):
    return PrototypePacker().pack(one, kernel(one.signature, parameters, **options))


def values(one, *parameters):
    """What the kernel gets, by parameter."""
    return {arg.name: arg.value for arg in pack(one, *parameters)}


def refusal(one, *parameters, **options):
    with pytest.raises(PackingError) as caught:
        pack(one, *parameters, **options)
    assert "kernel 'k' for " + one.signature in caught.value.message
    return caught.value


def relu_of(source, target=OUT):
    return call(0, "aten::relu", {"self": source}, [target])


def add(**more):
    return call(0, "aten::add.Tensor", {"self": X, "other": Y, **more}, [OUT])


# -- what a kernel gets


def test_an_addition_from_its_c_text():
    prototype = parse_prototype(
        "void add(const float* self, const float* other, float* out, int64_t numel, float alpha)"
    )
    assert pack(add(alpha=0.1), *prototype) == (
        PackedArg("self", X, Access.IN, type="const float*"),
        PackedArg("other", Y, Access.IN, type="const float*"),
        PackedArg("out", OUT, Access.OUT, type="float*"),
        PackedArg("numel", 6, type="int64_t", data=struct.pack("q", 6)),
        PackedArg("alpha", float(np.float32(0.1)), type="float", data=struct.pack("f", 0.1)),
    )


def test_the_order_is_the_kernels():
    assert [arg.name for arg in pack(add(), RESULT, Parameter("alpha", "int"), OTHER, SELF)] == [
        "out", "alpha", "other", "self",
    ]  # fmt: skip


def test_a_default_comes_from_the_schema():
    assert values(add(), SELF, OTHER, RESULT, Parameter("alpha", "double"))["alpha"] == 1.0
    gelu = call(0, "aten::gelu", {"self": X}, [OUT])
    derived = Parameter("tanh", "bool", derived="approximate == 'tanh'")
    assert values(gelu, SELF, RESULT, derived)["tanh"] is False


def test_properties_of_tensors():
    source = tensor(0, 2, 3, strides=(4, 1))
    named = {
        "numel": 6, "ndim": 2, "sizes": (2, 3, 1), "strides": (3, 1, 0), "size1": 3, "stride0": 3,
        "out_numel": 6, "self_numel": 6, "self_ndim": 2, "self_sizes": (2, 3, 1), "self_strides": (4, 1, 0),
        "self_size0": 2, "self_stride0": 4, "out_size1": 3,
    }  # fmt: skip
    types = {name: "int[3]" if isinstance(value, tuple) else "int" for name, value in named.items()}
    given_ = values(relu_of(source), SELF, RESULT, *(Parameter(name, types[name]) for name in named))
    assert {name: given_[name] for name in named} == named


def test_properties_are_those_of_the_first_result_or_of_what_is_written():
    indices = tensor(3, 5, dtype=DType("int64", 8))
    one = call(0, "aten::max.dim", {"self": X, "dim": 1}, [tensor(2, 4), indices])
    prototype = (SELF, Parameter("dim", "int"), Parameter("values", "float*"), Parameter("indices", "long*"))
    more = [Parameter(name, "int") for name in ("numel", "indices_numel", "out1_size0")]
    assert [arg.value for arg in pack(one, *prototype, *more)[4:]] == [4, 5, 5]
    nothing = call(0, "aten::_foreach_add_.Scalar", {"self": (X, Y), "scalar": 2}, [], written=[X, Y])
    both = (Parameter("self0", "float*"), Parameter("self1", "float*"), Parameter("scalar", "float"))
    assert pack(nothing, *both, Parameter("numel", "int"))[3].value == 6
    in_place = call(0, "aten::copy_", {"self": X, "src": Y}, [X], written=[X])
    assert (
        pack(in_place, Parameter("self", "float*"), Parameter("src", "void"), Parameter("numel", "int"))[1].value == 6
    )
    writes = call(0, "aten::record_stream", {"self": X, "s": 0}, [], written=[X])
    assert pack(writes, Parameter("self", "float*"), Parameter("s", "void"), Parameter("numel", "int"))[1].value == 6
    checks = call(0, "aten::_assert_async", {"self": X}, [])
    assert (
        "'numel' of kernel 'k' for aten::_assert_async is neither"
        in refusal(checks, SELF, Parameter("numel", "int")).message
    )


def test_an_argument_goes_before_a_property_and_a_derived_value_before_both():
    one = call(0, "aten::clamp", {"self": X, "max": 3}, [OUT])
    low = Parameter("min", "float", derived="-inf if min is None else min")
    assert values(one, SELF, RESULT, low, Parameter("max", "float")) == {
        "self": X, "out": OUT, "min": -math.inf, "max": 3.0,
    }  # fmt: skip


def test_derived_values():
    mm = call(0, "aten::mm", {"self": tensor(0, 4, 5), "mat2": tensor(1, 5, 7)}, [tensor(2, 4, 7)])
    derived = {
        "mn": "self_size0 * mat2.shape[1]",
        "k": "self.shape[1]",
        "ld": "mat2.strides[0]",
        "dims": "self.shape",
    }
    text = "void f(const float* self, const float* mat2, float* out, int mn, int k, long ld, sizes3 dims)"
    packed = values(mm, *parse_prototype(text, derived=derived))
    assert [packed[name] for name in derived] == [28, 5, 7, (4, 5, 0)]


def test_lists_of_numbers():
    one = call(0, "aten::sum.dim_IntList", {"self": X, "dim": (0, -1)}, [OUT])
    count = Parameter("count", "int", derived="len(dim)")
    packed = values(one, SELF, RESULT, Parameter("dim", "int8_t[4]"), count)
    assert (packed["dim"], packed["count"]) == ((0, -1, 0, 0), 2)


def test_lists_of_tensors():
    one = call(0, "aten::cat", {"tensors": (X, Y), "dim": 1}, [OUT])
    parts = [Parameter(f"tensors{i}", "const float*", optional=i == 2) for i in range(3)]
    packed = values(one, *parts, RESULT, Parameter("dim", "int"), Parameter("tensors1_size0", "int"))
    assert packed == {
        "tensors0": X, "tensors1": Y, "tensors2": None, "out": OUT, "dim": 1, "tensors1_size0": 2,
    }  # fmt: skip


def test_lists_of_results():
    one = call(0, "aten::split_with_sizes_copy", {"self": X, "split_sizes": (1, 1)}, [tensor(1, 1, 3), OUT])
    sizes = Parameter("split_sizes", "void")
    assert values(one, SELF, sizes, Parameter("out0", "float*"), Parameter("out1", "float*"))["out1"] == OUT
    error = refusal(one, SELF, sizes, *(Parameter(f"out{i}", "float*") for i in range(3)))
    assert "parameter 'out2'" in error.message
    assert "the call has 2 results, and none with the number 2" in error.message


def test_torchs_own_values_become_text_and_numbers():
    one = call(
        0,
        "aten::_to_copy",
        {
            "self": X, "dtype": torch.float32, "layout": torch.strided, "device": torch.device("cpu"),
            "non_blocking": False, "memory_format": torch.channels_last,
        },
        [OUT],
    )  # fmt: skip
    flags = {
        "f32": "dtype == 'float32'", "dense": "layout == 'strided'", "host": "device == 'cpu'",
        "last": "memory_format == 'channels_last'",
    }  # fmt: skip
    packed = values(one, SELF, RESULT, *(Parameter(name, "uint8_t", derived=text) for name, text in flags.items()))
    assert [packed[name] for name in flags] == [1, 1, 1, 1]


def test_symbolic_numbers_become_plain_ones():
    environment, source = ShapeEnv(), ConstantSource("s")
    symbol = environment.create_symbol(3, source, dynamic_dim=DimDynamic.DYNAMIC)
    three = environment.create_symintnode(symbol, hint=3, source=source)
    for symbolic, kind, plain in (
        (three, "int8_t", 3),
        (torch.sym_float(three), "float", 3.0),
        (three > 2, "bool", True),
    ):
        assert not isinstance(symbolic, (int, float))
        value = values(add(alpha=symbolic), SELF, OTHER, RESULT, Parameter("alpha", kind))["alpha"]
        assert (value, type(value)) == (plain, type(plain))


def test_what_describes_the_result_is_not_ignored_by_leaving_it_out():
    one = call(0, "aten::full", {"size": (2, 3), "fill_value": 7, "dtype": torch.float32, "pin_memory": False}, [OUT])
    packed = values(one, RESULT, Parameter("fill_value", "float"), Parameter("size", "void"))
    assert packed == {"out": OUT, "fill_value": 7.0}


def test_in_place():
    one = call(0, "aten::add_.Tensor", {"self": X, "other": Y}, [X], written=[X])
    assert pack(one, Parameter("self", "float*"), OTHER)[0] == PackedArg("self", X, Access.INOUT, type="float*")
    three = pack(one, SELF, OTHER, RESULT)
    assert [(arg.value, arg.access) for arg in three] == [(X, Access.IN), (Y, Access.IN), (X, Access.OUT)]


def test_an_optional_tensor_is_a_null_pointer():
    arguments = {
        "input": X, "weight": Y, "bias": None, "stride": (1,), "padding": (0,), "dilation": (1,),
        "transposed": False, "output_padding": (0,), "groups": 1,
    }  # fmt: skip
    text = "void conv(const float* input, const float* weight, const float* bias, float* out, sizes2 stride)"
    rest = ["padding", "dilation", "output_padding"]
    optional = parse_prototype(text, optional=["bias"], ignore=rest, only={"transposed": False, "groups": 1})
    one = call(0, "aten::convolution", arguments, [OUT])
    assert pack(one, *optional)[2] == PackedArg("bias", None, type="const float*", data=bytes(8))
    with_bias = call(0, "aten::convolution", {**arguments, "bias": tensor(4, 3)}, [OUT])
    assert pack(with_bias, *optional)[2].value == tensor(4, 3)
    grouped = call(0, "aten::convolution", {**arguments, "groups": 2}, [OUT])
    assert "ignores groups=2, and is right only for 1" in refusal(grouped, *optional).message
    without = [parameter for parameter in optional if parameter.name != "bias"]
    assert [arg.name for arg in pack(one, *without)] == ["input", "weight", "out", "stride"]
    assert "ignores bias=f32[3], whose default is None" in refusal(with_bias, *without).message


def test_a_result_that_is_not_computed():
    arguments = {"grad_output": X, "input": Y, "weight": X, "bias_sizes": None, "stride": (1,), "padding": (0,),
                 "dilation": (1,), "transposed": False, "output_padding": (0,), "groups": 1,
                 "output_mask": (True, False, True)}  # fmt: skip
    one = call(0, "aten::convolution_backward", arguments, [OUT, None, tensor(3, 5)])
    skipped = [Parameter(name, "void") for name in arguments if name != "output_mask"]
    results = [Parameter(f"out{i}", "float*", optional=True) for i in range(3)]
    packed = values(one, *results, Parameter("output_mask", "bool[3]"), *skipped)
    assert packed == {"out0": OUT, "out1": None, "out2": tensor(3, 5), "output_mask": (True, False, True)}


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int64", "bool", "complex64"]
)
def test_pointers_to_each_dtype(dtype):
    element = getattr(torch, dtype)
    spelled = {
        "float16": "half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double", "int8": "char",
        "uint8": "uchar", "int64": "long", "bool": "bool", "complex64": "float2",
    }  # fmt: skip
    source = tensor(0, 2, dtype=DType(dtype, element.itemsize))
    target = tensor(1, 2, dtype=source.dtype)
    pointers = Parameter("self", f"const {spelled[dtype]}*"), Parameter("out", f"{spelled[dtype]}*")
    assert [arg.value for arg in pack(relu_of(source, target), *pointers)] == [source, target]
    assert [arg.value for arg in pack(relu_of(source, target), Parameter("self", "void*", Access.IN), pointers[1])]


# -- what is refused


@pytest.mark.parametrize(
    ("alpha", "spelling", "message"),
    [
        (2**31, "int32_t", "is a int32_t (-2147483648 to 2147483647), which 2147483648 does not fit"),
        (-1, "uint8_t", "is a uint8_t (0 to 255), which -1 does not fit"),
        (0.5, "int64_t", "is a int64_t and takes an integer, not the float 0.5"),
        (1j, "float", "is a float and takes a real number, not the complex 1j"),
        (1e39, "float", "is a float, in which 1e+39 would become infinite"),
        (3, "bool", "is a bool and takes true or false, not the int 3"),
        (X, "float", "is a float and takes a number, not the tensor f32[2, 3]"),
        (None, "float", "is a float and takes a number, not None"),
        (None, "sizes2", "is a int64_t[2] and takes a list, not None"),
        ("none", "int", "is a int32_t and takes a number, not 'none'"),
        ((1, 2), "sizes1", "is a int64_t[1], which 2 values do not fit: [1, 2]"),
        (torch.float32, "int", "takes a number, not 'float32'"),
    ],
)
def test_values_that_do_not_fit(alpha, spelling, message):
    error = refusal(add(alpha=alpha), SELF, OTHER, RESULT, Parameter("alpha", spelling))
    assert error.message.startswith("parameter 'alpha' of kernel 'k' for aten::add.Tensor ")
    assert message in error.message


@pytest.mark.parametrize(
    ("dtype", "itemsize", "spelling"),
    [("float64", 8, "float"), ("bool", 1, "float"), ("int32", 4, "uint"), ("float16", 2, "short")],
)
def test_tensors_of_another_dtype(dtype, itemsize, spelling):
    source = tensor(0, 2, 3, dtype=DType(dtype, itemsize))
    error = refusal(relu_of(source), Parameter("self", f"const {spelling}*"), RESULT)
    assert "parameter 'self' of kernel 'k' for aten::relu is a const " in error.message
    assert f"not the {dtype} tensor {source}" in error.message
    assert "dtypes={...}" in error.hint
    error = refusal(relu_of(X, source), SELF, Parameter("out", f"{spelling}*"))
    assert "parameter 'out' of kernel 'k' for aten::relu is a " in error.message


def test_numbers_and_none_for_pointers():
    number = call(0, "aten::add.Tensor", {"self": X, "other": 2.0}, [OUT])
    error = refusal(number, SELF, OTHER, RESULT)
    assert (
        "parameter 'other' of kernel 'k' for aten::add.Tensor is a const float* and takes a tensor, not the float 2.0"
        in error.message
    )
    missing = call(0, "aten::index.Tensor", {"self": X, "indices": (None, Y)}, [OUT])
    error = refusal(missing, SELF, RESULT, Parameter("indices0", "const long*"), Parameter("indices1", "const float*"))
    assert (
        "'indices0' of kernel 'k' for aten::index.Tensor is a const int64_t* and takes a tensor, not None"
        in error.message
    )
    assert "declare it optional" in error.hint


def test_ignored_arguments():
    error = refusal(add(alpha=2), SELF, OTHER, RESULT)
    assert error.message == "kernel 'k' for aten::add.Tensor ignores alpha=2, whose default is 1"
    assert pack(add(alpha=1), SELF, OTHER, RESULT) == pack(add(), SELF, OTHER, RESULT)
    assert pack(add(alpha=2), SELF, OTHER, RESULT, Parameter("alpha", "void")) == pack(add(), SELF, OTHER, RESULT)
    summed = call(0, "aten::sum.dim_IntList", {"self": X, "dim": None, "keepdim": True}, [OUT])
    assert "ignores keepdim=True, whose default is False" in refusal(summed, SELF, RESULT).message
    named = call(0, "aten::gelu", {"self": X, "approximate": "tanh"}, [OUT])
    assert "ignores approximate='tanh', whose default is 'none'" in refusal(named, SELF, RESULT).message


def test_a_nan_is_the_nan_that_the_kernel_is_right_for():
    nan = Parameter("alpha", "void", derived="nan")
    assert len(pack(add(alpha=math.nan), SELF, OTHER, RESULT, nan)) == 3
    assert "ignores alpha=1.0, and is right only for nan" in refusal(add(alpha=1.0), SELF, OTHER, RESULT, nan).message
    assert "ignores alpha=nan, whose default is 1" in refusal(add(alpha=math.nan), SELF, OTHER, RESULT).message


def test_tensors_of_a_list_that_would_be_ignored():
    one = call(0, "aten::cat", {"tensors": (X, Y, X), "dim": 0}, [OUT])
    error = refusal(one, Parameter("tensors0", "const float*"), RESULT)
    assert error.message == "kernel 'k' for aten::cat takes 1 tensors of 'tensors', and would ignore the other 2"
    assert "'tensors2'" in error.hint


def test_results_that_the_kernel_is_not_given():
    one = call(0, "aten::max.dim", {"self": X, "dim": 1}, [OUT, tensor(3, 2)])
    error = refusal(one, SELF, Parameter("dim", "int"), Parameter("out0", "float*"))
    assert "has no parameter for 1 of the 2 tensors that the operator writes: f32[2]" in error.message
    in_place = call(0, "aten::add_.Tensor", {"self": X, "other": Y}, [X], written=[X])
    assert "has no parameter for 1 of the 1 tensors" in refusal(in_place, SELF, OTHER).message


def test_an_argument_without_a_default_that_does_not_come():
    one = call(0, "aten::sum.dim_IntList", {"dim": None}, [OUT])
    error = refusal(one, SELF, RESULT)
    assert "parameter 'self'" in error.message
    assert "the call gives no 'self', and the operator has no default for it" in error.message


def test_a_derived_value_that_has_none():
    error = refusal(RELU, SELF, RESULT, Parameter("n", "int", derived="self.shape[2]"))
    assert "parameter 'n' of kernel 'k' for aten::relu: 'self.shape[2]' has no value here" in error.message


def test_a_prototype_that_does_not_fit_the_operator():
    assert "neither an argument nor a result" in refusal(RELU, SELF, RESULT, Parameter("alpha", "int")).message


def test_a_kernel_with_a_prototype_cannot_allocate():
    assert "register it with allocates=False" in refusal(RELU, SELF, RESULT, allocates=True).hint


# -- kernels without a prototype


def test_kernels_without_a_prototype_take_the_operators_own_arguments():
    names_results = kernel("aten::relu", [Parameter("out", "Tensor", Access.OUT)])
    for one in (KernelDescriptor("aten::relu", "plain"), names_results):
        assert not has_prototype(one)
        assert PrototypePacker().pack(RELU, one) == CallPacker().pack(RELU, one)
    assert has_prototype(kernel("aten::relu", [SELF, RESULT]))
    assert has_prototype(kernel("aten::relu", [Parameter("self", "Tensor", Access.IN)]))


def test_another_packer_can_take_them():
    class Other(CallPacker):
        def pack(self, call, kernel):
            return ()

    assert PrototypePacker(calls=Other()).pack(RELU, KernelDescriptor("aten::relu", "plain")) == ()


def test_a_prototype_is_bound_once(monkeypatch):
    packer, one = PrototypePacker(), kernel("aten::relu", [SELF, RESULT])
    first = packer.pack(RELU, one)
    monkeypatch.setattr("kagent_core.extract.pack_prototype.bind_prototype", None)
    assert packer.pack(RELU, one) == first


def test_the_abi_counts():
    packed = PrototypePacker(Abi(long_nbytes=4)).pack(
        RELU, kernel("aten::relu", [SELF, RESULT, Parameter("numel", "long")])
    )
    assert packed[2].data == struct.pack("=i", 6)


# -- against the compiled kernel

PROTOTYPE = (SELF, RESULT, Parameter("numel", "int"), Parameter("sizes", "sizes8"), Parameter("dim", "void"))


def test_sizes_that_the_driver_tells():
    check_sizes(kernel("aten::relu", PROTOTYPE), PROTOTYPE, [8, 8, 4, 64])
    check_sizes(kernel("aten::relu", PROTOTYPE), PROTOTYPE, [4, 4, 4, 64], Abi(pointer_nbytes=4))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            [8, 8, 8, 64],
            "'numel' of kernel 'k' for aten::relu is declared as int, 4 bytes, but parameter 2 was compiled with 8",
        ),
        ([8, 8, 4], "declares 4 parameters (self, out, numel, sizes), but was compiled with 3"),
    ],
)
def test_sizes_that_differ(sizes, message):
    with pytest.raises(PackingError) as caught:
        check_sizes(kernel("aten::relu", PROTOTYPE), PROTOTYPE, sizes)
    assert message in caught.value.message
    assert caught.value.hint == "declare the parameters as the source does, in its order"


# -- read back on the other side

MANY = torch.library.Library("kagent_packing_test", "DEF")  # keeps the operator alive
MANY.define(
    "many(Tensor self, int i0, int i1, int i2, float f0, float f1, bool b0, int[] l0, float[] l1, Scalar s0) -> Tensor"
)

BITS = {f"{u}int{8 * n}_t": (n, u) for u in ("", "u") for n in (1, 2, 4, 8)}


def _integers(spelling):
    nbytes, unsigned = BITS[spelling]
    return (
        st.integers(0, 2 ** (8 * nbytes) - 1)
        if unsigned
        else st.integers(-(2 ** (8 * nbytes - 1)), 2 ** (8 * nbytes - 1) - 1)
    )


def _field(spelling):
    """The same type in ctypes; halves, which it lacks, as their bits."""
    if "[" in spelling:
        element, _, count = spelling.rstrip("]").partition("[")
        return _field(element) * int(count)
    if spelling in ("half", "float", "double", "bool"):
        return {
            "half": ctypes.c_uint16,
            "float": ctypes.c_float,
            "double": ctypes.c_double,
            "bool": ctypes.c_bool,
        }[spelling]
    return getattr(ctypes, "c_" + spelling.removesuffix("_t"))


def _expected(spelling, value):
    """What ctypes holds for a value, padded."""
    if "[" in spelling:
        element, _, count = spelling.rstrip("]").partition("[")
        return [_expected(element, item) for item in (*value, *[0] * (int(count) - len(value)))]
    if spelling == "half":
        return int(np.float16(value).view(np.uint16))
    return _field(spelling)(value).value


@st.composite
def prototypes(draw):
    """A prototype over some of the operator's arguments, in any order, and values that fit it."""
    chosen, arguments = [], {}
    floats = st.floats(-60000, 60000)
    for name in ("i0", "i1", "i2", "f0", "f1", "b0", "l0", "l1", "s0"):
        kind = name[0]
        if kind == "l":
            element = draw(st.sampled_from(list(BITS) if name == "l0" else ["half", "float", "double"]))
            count = draw(st.integers(1, 9))
            items = _integers(element) if name == "l0" else floats
            spelling, value = f"{element}[{count}]", tuple(draw(st.lists(items, max_size=count)))
        else:
            options = {"i": list(BITS), "f": ["half", "float", "double"], "b": ["bool", *BITS]}
            spelling = draw(st.sampled_from(options.get(kind, [*BITS, "half", "float", "double"])))
            strategy = st.booleans() if kind == "b" else _integers(spelling) if spelling in BITS else floats
            value = draw(strategy)
        arguments[name] = value
        chosen.append(Parameter(name, spelling if draw(st.booleans()) else "void"))
    chosen += [
        Parameter(f"d{i}", draw(st.sampled_from(list(BITS))), derived=f"self.size({i}) * {i + 1}") for i in range(2)
    ]
    return draw(st.permutations([*chosen, SELF, RESULT])), arguments


@settings(max_examples=400, deadline=None)
@given(prototypes())
def test_random_prototypes_read_back_byte_exactly(drawn):
    parameters, arguments = drawn
    shape = (3, 5)
    source, target = tensor(0, *shape), tensor(1, *shape)
    signature = "kagent_packing_test::many"
    one = call(0, signature, {"self": source, **arguments}, [target])
    packed = PrototypePacker().pack(one, kernel(signature, parameters))
    taken = [parameter for parameter in parameters if parameter.type != "void"]
    assert [arg.name for arg in packed] == [parameter.name for parameter in taken]

    numbers = [parameter for parameter in taken if "*" not in parameter.type]
    layout = type("Layout", (ctypes.Structure,), {"_fields_": [(p.name, _field(p.type)) for p in numbers]})
    buffer, [slots] = collect_parameters([task_with(packed)])
    there = layout.from_buffer_copy(bytes(buffer.memory).ljust(ctypes.sizeof(layout), b"\0"))
    every = {**arguments, "d0": 3, "d1": 10}
    for parameter in numbers:
        value = getattr(there, parameter.name)
        assert (list(value) if "[" in parameter.type else value) == _expected(parameter.type, every[parameter.name])
    placed = [slot.offset for slot in slots if slot is not None]
    assert placed == [getattr(layout, parameter.name).offset for parameter in numbers]
    assert [arg.value for arg in packed if arg.access is Access.IN] == [source]


def task_with(packed):
    return dataclasses.replace(task(0), args=packed)


KERNEL = """
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
typedef struct { int64_t data[8]; } sizes8;
typedef struct { int16_t data[3]; } small;
typedef struct {
  const float* self; int8_t i0; bool b0; double f1; small l0; uint16_t i1; sizes8 self_sizes; float f0; unsigned long n;
} seen_t;
void kernel(const float* restrict self, int8_t i0, bool b0, double f1, small l0, uint16_t i1, sizes8 self_sizes,
            float f0, unsigned long n, float* restrict out) {
  seen_t seen;
  memset(&seen, 0, sizeof seen);
  seen.self = self; seen.i0 = i0; seen.b0 = b0; seen.f1 = f1; seen.l0 = l0; seen.i1 = i1; seen.self_sizes = self_sizes;
  seen.f0 = f0; seen.n = n;
  memcpy(out, &seen, sizeof seen);
}
void launch(void** at) {
  kernel(*(float**)at[0], *(int8_t*)at[1], *(bool*)at[2], *(double*)at[3], *(small*)at[4], *(uint16_t*)at[5],
         *(sizes8*)at[6], *(float*)at[7], *(unsigned long*)at[8], *(float**)at[9]);
}
"""


def test_a_compiled_kernel_sees_what_was_packed(tmp_path):
    """Through addresses of the parameters, as a driver takes them."""
    (tmp_path / "kernel.c").write_text(KERNEL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "kernel.so", tmp_path / "kernel.c"], check=True)
    library = ctypes.CDLL(tmp_path / "kernel.so")
    arguments = {
        "i0": -7,
        "i1": 65535,
        "i2": 0,
        "f0": 0.1,
        "f1": 1e300,
        "b0": True,
        "l0": (-1, 2),
        "l1": (),
        "s0": 1,
    }
    one = call(0, "kagent_packing_test::many", {"self": X, **arguments}, [OUT])
    prototype = parse_prototype(KERNEL, "kernel", derived={"n": "self.numel() * 2 ** 40"}, ignore=["i2", "l1", "s0"])
    packed = PrototypePacker().pack(one, kernel(one.signature, prototype))
    buffer, [slots] = collect_parameters([task_with(packed)])

    class Seen(ctypes.Structure):
        _fields_ = (
            ("self", ctypes.c_void_p), ("i0", ctypes.c_int8), ("b0", ctypes.c_bool), ("f1", ctypes.c_double),
            ("l0", ctypes.c_int16 * 3), ("i1", ctypes.c_uint16), ("self_sizes", ctypes.c_int64 * 8),
            ("f0", ctypes.c_float), ("n", ctypes.c_uint64),
        )  # fmt: skip

    seen = Seen()
    pointers = {"self": ctypes.c_void_p(4096), "out": ctypes.c_void_p(ctypes.addressof(seen))}
    addresses = [
        ctypes.addressof(pointers[arg.name]) if slot is None else buffer.address(slot)
        for arg, slot in zip(packed, slots, strict=True)
    ]
    library.launch((ctypes.c_void_p * len(addresses))(*addresses))
    assert (seen.self, seen.i0, seen.b0, seen.f1, list(seen.l0)) == (4096, -7, True, 1e300, [-1, 2, 0])
    assert (seen.i1, list(seen.self_sizes)) == (65535, [2, 3, 1, 1, 1, 1, 1, 1])
    assert (seen.f0, seen.n) == (ctypes.c_float(0.1).value, 6 * 2**40)


# -- local memory


def local(elements, ctype="local float*"):
    return Parameter("scratch", ctype, derived=elements)


def test_local_memory_has_as_many_elements_as_are_derived():
    packed = pack(RELU, SELF, RESULT, local("self.shape[1] * 10"), Parameter("four", "local float4*", derived="2"))
    assert packed[2:] == (
        PackedArg("scratch", LocalMemory("local float*", 120), type="local float*"),
        PackedArg("four", LocalMemory("local float4*", 32), type="local float4*"),
    )


@pytest.mark.parametrize("elements", ["0", "-3", "2.5", "self.dtype", "self.shape[0] == 2"])
def test_local_memory_of_no_length(elements):
    error = refusal(RELU, SELF, RESULT, local(elements))
    assert "expected a whole number of at least 1" in error.message
    assert "not bytes" in error.hint


def test_local_memory_says_how_much_it_is():
    error = refusal(RELU, SELF, RESULT, local(None))
    assert "nothing says how many elements it has" in error.message
    assert "derived={'scratch': '256'}" in error.hint
    error = refusal(RELU, SELF, RESULT, Parameter("scratch", "local float*", derived="4", optional=True))
    assert "'scratch'" in error.message


def test_local_memory_is_no_parameter_of_which_drivers_tell_the_size():
    one = kernel("aten::relu", (SELF, RESULT, local("4")))
    check_sizes(one, one.parameters, [8, 8])


def test_local_memory_counts_in_the_launch_config():
    one = kernel("aten::relu", (SELF, RESULT, local("4")))
    args = PrototypePacker().pack(RELU, one)
    toy = DeviceInfo(Device("toy", 0), "Toy", max_threads_per_block=64, shared_nbytes=20)
    for own, wanted in ((0, 16), (8, 16), (20, 20)):
        choice = LaunchChoice(LaunchConfig((2, 1, 1), (3, 1, 1), own), "derived")
        made = with_local_memory(choice, args, one, toy)
        assert made.config == LaunchConfig((2, 1, 1), (3, 1, 1), wanted)
    assert with_local_memory(LaunchChoice(None, "derived"), args, one, toy).config is None
    with pytest.raises(
        LaunchConfigError, match="'k' asks for local memory by its prototype: 16 bytes of shared memory"
    ):
        with_local_memory(
            LaunchChoice(LaunchConfig(), "derived"), args, one, dataclasses.replace(toy, shared_nbytes=15)
        )
