"""Exact signatures and what operators' schemas say."""

from __future__ import annotations

import pytest
import torch

from kagent_core.capture.schemas import (
    ArgumentSchema,
    dtype_of,
    is_operator,
    resolve_overload,
    schema_of,
    signature_of,
    torch_dtype,
)
from kagent_core.errors import SignatureError
from kagent_core.specs import DType

SIGNATURES = [
    (torch.ops.aten.relu.default, "aten::relu"),
    (torch.ops.aten.add.Tensor, "aten::add.Tensor"),
    (torch.ops.aten.add.out, "aten::add.out"),
    (torch.ops.prims.convert_element_type.default, "prims::convert_element_type"),
]


@pytest.mark.parametrize(("overload", "signature"), SIGNATURES)
def test_there_and_back(overload, signature):
    assert signature_of(overload) == signature
    assert schema_of(overload).signature == signature
    assert resolve_overload(signature) is overload


def test_an_operator_defined_later_is_found():
    with torch.library._scoped_library("kagent_test_schemas", "DEF") as library:
        library.define("scale(Tensor x, *, float by=2.0) -> Tensor")
        library.define("scale.inplace(Tensor(a!) x) -> Tensor(a!)")
        overload = resolve_overload("kagent_test_schemas::scale")
        assert schema_of(overload).arguments == (
            ArgumentSchema("x", keyword_only=False, writes=False),
            ArgumentSchema("by", keyword_only=True, writes=False),
        )
        assert schema_of(resolve_overload("kagent_test_schemas::scale.inplace")).writes


@pytest.mark.parametrize(
    ("signature", "message", "hint"),
    [
        ("relu", "'relu' is not an operator signature", "write namespace::name"),
        ("aten::", "'aten::' is not an operator signature", "write namespace::name"),
        ("::relu", "'::relu' is not an operator signature", "write namespace::name"),
        ("", "'' is not an operator signature", "write namespace::name"),
        ("aten::reluu", "has no operator 'aten::reluu'", "did you mean 'aten::relu'?"),
        ("aten::add", "there is no overload 'aten::add'", "aten::add.Tensor"),
        ("aten::add.Tensr", "there is no overload 'aten::add.Tensr'", "aten::add.Tensor"),
        ("aten::relu.default", "there is no overload 'aten::relu.default'", "the overloads are aten::relu"),
        ("nowhere::relu", "has no operator 'nowhere::relu'", None),
    ],
)
def test_what_is_not_there(signature, message, hint):
    with pytest.raises(SignatureError) as caught:
        resolve_overload(signature)
    assert message in caught.value.message
    assert (hint is None and caught.value.hint is None) or hint in caught.value.hint


def test_a_signature_is_not_loosened():
    """TorchScript has an aten::add of two numbers, which is no operator on tensors."""
    with pytest.raises(SignatureError) as caught:
        resolve_overload("aten::add")
    overloads = caught.value.hint.removeprefix("the overloads are ").split(", ")
    assert overloads == sorted(overloads)
    assert {"aten::add.Tensor", "aten::add.Scalar", "aten::add.out"} <= set(overloads)


def test_arguments_in_order_with_what_they_are():
    schema = schema_of(torch.ops.aten.add.out)
    assert schema.arguments == (
        ArgumentSchema("self", keyword_only=False, writes=False),
        ArgumentSchema("other", keyword_only=False, writes=False),
        ArgumentSchema("alpha", keyword_only=True, writes=False),
        ArgumentSchema("out", keyword_only=True, writes=True),
    )
    assert schema.writes
    assert not schema_of(torch.ops.aten.add.Tensor).writes


@pytest.mark.parametrize(
    ("overload", "writes"),
    [
        (torch.ops.aten.copy_.default, ["self"]),
        (torch.ops.aten._foreach_add_.Scalar, ["self"]),  # a list written in place
        (torch.ops.aten.max.dim_max, ["max", "max_values"]),
        (torch.ops.aten.view.default, []),  # its alias is not written
    ],
)
def test_what_is_written(overload, writes):
    assert [argument.name for argument in schema_of(overload).arguments if argument.writes] == writes


@pytest.mark.parametrize(
    ("overload", "random"),
    [
        (torch.ops.aten.rand.default, True),
        (torch.ops.aten.bernoulli.default, True),
        (torch.ops.aten.native_dropout.default, True),
        (torch.ops.aten.add.Tensor, False),
        (torch.ops.aten.empty.memory_format, False),
    ],
)
def test_what_draws_random_numbers(overload, random):
    assert schema_of(overload).random is random


@pytest.mark.parametrize(
    ("dtype", "name", "itemsize"),
    [
        (torch.float32, "float32", 4),
        (torch.bool, "bool", 1),
        (torch.bfloat16, "bfloat16", 2),
        (torch.complex128, "complex128", 16),
        (torch.int64, "int64", 8),
        (torch.float8_e4m3fn, "float8_e4m3fn", 1),
    ],
)
def test_dtypes_there_and_back(dtype, name, itemsize):
    assert dtype_of(dtype) == DType(name, itemsize)
    assert torch_dtype(DType(name, itemsize)) is dtype


def test_operators_and_other_functions():
    assert is_operator(torch.ops.aten.relu.default)
    assert not is_operator(torch.ops.aten.relu)  # a name with overloads, not one of them
    assert not is_operator(torch.relu)
    assert not is_operator(lambda x: x)
