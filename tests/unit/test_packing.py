"""Packing the operator's own arguments for callable kernels."""

from __future__ import annotations

import pytest

from kagent_core.errors import PackingError
from kagent_core.extract.packing import CallPacker
from kagent_core.specs import Access, KernelDescriptor, PackedArg, Parameter

from .builders import call, tensor

X, Y, Z, OUT = (tensor(number, 2, 3) for number in range(4))
PLAIN = KernelDescriptor("any", "plain")
ALLOCATES = KernelDescriptor("any", "functional", allocates=True)


def pack(one, kernel=PLAIN):
    return CallPacker().pack(one, kernel)


def arguments(packed):
    """Name, value and whether by name, without the results."""
    return [(arg.name, arg.value, arg.keyword) for arg in packed if arg.access is not Access.OUT]


def test_arguments_come_in_the_schemas_order_not_the_calls():
    one = call(0, "aten::addmm", {"mat2": Z, "self": X, "mat1": Y}, [OUT])
    assert arguments(pack(one)) == [("self", X, False), ("mat1", Y, False), ("mat2", Z, False)]


def test_keyword_only_arguments_go_by_name():
    one = call(0, "aten::add.Tensor", {"self": X, "other": Y, "alpha": 3}, [OUT])
    assert arguments(pack(one)) == [("self", X, False), ("other", Y, False), ("alpha", 3, True)]


def test_after_a_gap_everything_goes_by_name():
    """clamp(self, min=None, max=None) without its min: the max must not slip into its place."""
    one = call(0, "aten::clamp", {"self": X, "max": 1.0}, [OUT])
    assert arguments(pack(one)) == [("self", X, False), ("max", 1.0, True)]


def test_an_explicit_none_is_a_value_not_a_gap():
    one = call(0, "aten::clamp", {"self": X, "min": None, "max": 1.0}, [OUT])
    packed = pack(one)
    assert arguments(packed) == [("self", X, False), ("min", None, False), ("max", 1.0, False)]
    assert packed[1].access is None


def test_lists_are_one_argument():
    one = call(0, "aten::cat", {"tensors": (X, Y), "dim": 1}, [OUT])
    tensors, dim, _ = pack(one)
    assert tensors == PackedArg("tensors", (X, Y), Access.IN)
    assert dim == PackedArg("dim", 1)


def test_a_list_with_missing_tensors_is_read_and_one_without_tensors_is_not():
    indexed = call(0, "aten::index.Tensor", {"self": X, "indices": (None, Y)}, [OUT])
    assert [arg.access for arg in pack(indexed)] == [Access.IN, Access.IN, Access.OUT]
    empty = call(0, "aten::index.Tensor", {"self": X, "indices": (None, None)}, [OUT])
    assert [arg.access for arg in pack(empty)] == [Access.IN, None, Access.OUT]
    summed = call(0, "aten::sum.dim_IntList", {"self": X, "dim": (0, 1)}, [OUT])
    assert [arg.access for arg in pack(summed)] == [Access.IN, None, Access.OUT]


def test_an_argument_written_in_place_is_both_and_makes_no_result():
    one = call(0, "aten::copy_", {"self": X, "src": Y}, [X], written=[X])
    assert pack(one) == (PackedArg("self", X, Access.INOUT), PackedArg("src", Y, Access.IN))


def test_one_result_is_called_out():
    one = call(0, "aten::relu", {"self": X}, [OUT])
    assert pack(one)[-1] == PackedArg("out", OUT, Access.OUT, keyword=True)


def test_several_results_are_numbered():
    indices = tensor(4, 2)
    one = call(0, "aten::max.dim", {"self": X, "dim": 1}, [OUT, indices])
    assert [(a.name, a.value) for a in pack(one)[2:]] == [("out0", OUT), ("out1", indices)]


def test_the_prototype_names_the_results():
    indices = tensor(4, 2)
    prototype = (
        Parameter("max_values", "int64_t*", Access.OUT),
        Parameter("self", "float*", Access.IN),
        Parameter("max", "float*", Access.OUT),
    )
    kernel = KernelDescriptor("aten::max.dim", "named", parameters=prototype)
    one = call(0, "aten::max.dim", {"self": X, "dim": 1}, [OUT, indices])
    assert [(a.name, a.value) for a in pack(one, kernel)[2:]] == [("max_values", OUT), ("max", indices)]


@pytest.mark.parametrize("declared", [1, 3])
def test_a_prototype_with_another_number_of_results_is_an_error(declared):
    prototype = tuple(Parameter(f"result{n}", "float*", Access.OUT) for n in range(declared))
    kernel = KernelDescriptor("aten::max.dim", "wrong", parameters=prototype)
    one = call(0, "aten::max.dim", {"self": X, "dim": 1}, [OUT, tensor(4, 2)])
    with pytest.raises(PackingError) as caught:
        pack(one, kernel)
    names = ", ".join(parameter.name for parameter in prototype)
    assert f"kernel 'wrong' declares {declared} results ({names}), but aten::max.dim has 2" in str(caught.value)
    assert caught.value.hint == "declare one OUT parameter per tensor that the operator returns"


def test_a_kernel_that_allocates_gets_no_results():
    one = call(0, "aten::relu", {"self": X}, [OUT])
    assert pack(one, ALLOCATES) == (PackedArg("self", X, Access.IN),)


def test_fresh_results_leave_out_what_is_missing_or_aliases_an_argument():
    view = tensor(X.buffer, 6)
    one = call(0, "aten::max.dim", {"self": X, "dim": 1}, [OUT, None, view])
    assert one.fresh_results == (OUT,)


def test_no_arguments_at_all():
    one = call(0, "aten::empty.memory_format", {"size": ()}, [OUT])
    assert pack(one) == (PackedArg("size", ()), PackedArg("out", OUT, Access.OUT, keyword=True))
