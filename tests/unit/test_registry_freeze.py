"""What is found out when a registry is frozen: operators that torch does not have, prototypes that do not fit."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kagent_core.errors import PackingError, RegistryError, SignatureError
from kagent_core.layout import CONTIGUOUS
from kagent_core.registry import KernelRegistry
from kagent_core.registry.operators import check_kernel
from kagent_core.specs import Access, KernelDescriptor, Parameter

TORCH = torch.__version__


def frozen(*kernels):
    registry = KernelRegistry("toy")
    for kernel in kernels:
        registry.add(kernel)
    registry.freeze()
    return registry


def problem(signature, **fields):
    """What a registry has against a kernel, and its hint; the other kernels must stay."""
    fields.setdefault("origin", "here")
    registry = frozen(KernelDescriptor("aten::relu", "good"), KernelDescriptor(signature, "bad", **fields))
    assert registry.signatures() == ["aten::relu"]
    [found] = registry.problems
    assert found.kernel.name == "bad"
    return found.reason, found.hint


def prototype(*names, **derived):
    tensors = [Parameter(name, "const float*" if not name.startswith("out") else "float*") for name in names]
    return (*tensors, *(Parameter(name, "int64_t", derived=text) for name, text in derived.items()))


@pytest.mark.parametrize(
    ("signature", "told", "hint"),
    [
        ("aten::addd.Tensor", f"the installed torch ({TORCH}) has no operator 'aten::addd'", "aten::add.Tensor"),
        ("aten::add.Tensr", "there is no overload 'aten::add.Tensr'", "aten::add.Tensor"),
        ("aten::add", "there is no overload 'aten::add'", None),
        ("prims::coss", f"the installed torch ({TORCH}) has no operator 'prims::coss'", "prims::cos"),
        ("relu", "'relu' is not an operator signature", "aten::relu"),
    ],
)
def test_an_operator_that_torch_does_not_have_is_set_aside(signature, told, hint):
    reason, given = problem(signature)
    assert reason == told
    if hint is not None:
        assert given == f"did you mean '{hint}'?"


def test_where_nothing_is_near_the_hint_is_what_a_signature_looks_like():
    reason, hint = problem("@")
    assert reason == "'@' is not an operator signature"
    assert "namespace::name" in hint
    assert problem("zzzzzzzzzzzz::qqqqqqqqqqqqqqq")[1] is None


def test_each_problem_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "kagent"):
        registry = frozen(
            KernelDescriptor("aten::reluu", "one", origin="here"),
            KernelDescriptor("aten::relu", "good"),
            KernelDescriptor("aten::mm", "two", dtypes={"float23"}, origin="there"),
            KernelDescriptor("zzzz::qqqqqq.q", "three", origin="elsewhere"),
        )
        registry.freeze()
    assert caplog.messages == [
        (
            f"'toy': kernel 'one' for aten::reluu (here) cannot be used: the installed torch ({TORCH}) has no operator "
            "'aten::reluu'; did you mean 'aten::relu'?"
        ),
        (
            "'toy': kernel 'two' for aten::mm (there) cannot be used: it takes the dtype 'float23', which torch does "
            "not have; did you mean 'float32'?"
        ),
        (
            f"'toy': kernel 'three' for zzzz::qqqqqq.q (elsewhere) cannot be used: the installed torch ({TORCH}) has "
            "no operator 'zzzz::qqqqqq'"
        ),
    ]
    assert [k.name for k in registry.kernels()] == ["good"]
    assert registry.overlaid([]).problems == registry.problems


def test_a_dtype_like_no_other():
    assert problem("aten::mm", dtypes={"?"}) == ("it takes the dtype '?', which torch does not have", None)


@pytest.mark.parametrize("what", ["layouts", "parameters"])
def test_a_name_that_the_operator_does_not_have_is_set_aside(what):
    if what == "layouts":
        reason, hint = problem("aten::mm", layouts={"mat3": CONTIGUOUS})
        assert reason.startswith("the tensor 'mat3', which it has a layout for, is neither an argument nor a result of")
        assert "a result of aten::mm, which has " in reason
    else:
        reason, hint = problem("aten::mm", parameters=prototype("self", "mat3", "out"))
        assert reason.startswith("its parameter 'mat3' is neither an argument nor a result of aten::mm, which has ")
    assert "mat2, out, self" in reason
    assert hint == "did you mean 'mat2'?"


def test_a_name_like_no_other_has_no_hint():
    assert problem("aten::mm", layouts={"zzzzzzz": CONTIGUOUS})[1] is None


@pytest.mark.parametrize(
    "parameters",
    [
        prototype("self", "mat2", "out"),
        prototype("self", "mat2", "out", n="self.shape[0] * out.shape[1]"),
        prototype("self", "mat2", "out0"),
        (*prototype("self", "mat2", "out"), Parameter("out_numel", "int64_t"), Parameter("self_stride0", "int64_t")),
        (Parameter("result", "Tensor", Access.OUT),),
        (),
    ],
)
def test_prototypes_that_fit(parameters):
    assert frozen(KernelDescriptor("aten::mm", "mm", parameters=parameters)).problems == ()


def test_what_a_derived_parameter_speaks_of_must_be_there():
    reason, hint = problem("aten::mm", parameters=prototype("self", "mat2", "out", n="slef.shape[0]"))
    assert reason.startswith("'slef', from which its parameter 'n' is derived, is neither an argument nor a result of")
    assert hint == "did you mean 'self'?"
    with pytest.raises(PackingError):
        check_kernel(KernelDescriptor("aten::mm", "mm", parameters=prototype("self", "mat2", "out", n="self.(")))


def test_an_argument_that_every_call_gives_must_have_a_parameter():
    reason, _ = problem("aten::mm", parameters=prototype("self", "out"))
    assert reason == "its prototype has no parameter for 'mat2' of aten::mm, which every call gives"
    only_size = prototype("self", "out", n="mat2.shape[1]")
    assert frozen(KernelDescriptor("aten::mm", "mm", parameters=only_size)).problems == ()
    optional = prototype("self", "other", "out")  # alpha has a default
    assert frozen(KernelDescriptor("aten::add.Tensor", "add", parameters=optional)).problems == ()


def fused(*names, fuses=("aten::relu", "aten::sub.Tensor")):
    return KernelDescriptor("", "both", fuses=fuses, parameters=prototype(*names))


def test_fused_kernels_are_checked_operator_by_operator():
    for names in (("self", "other", "out"), ("self", "self1", "out"), ("self", "other1", "out")):
        assert frozen(fused(*names)).problems == ()
    for bad in (fused("self", "another"), fused("self", "self2"), fused("self", fuses=("aten::relu", "aten::subb"))):
        assert len(frozen(bad).problems) == 1
    with pytest.raises(SignatureError, match="aten::subb"):
        check_kernel(fused("self", fuses=("aten::relu", "aten::subb")))


def test_a_default_kernel_names_no_operator():
    kernel = KernelDescriptor("default", "any", parameters=prototype("whatever"))
    assert frozen(kernel).problems == ()
    with pytest.raises(RegistryError, match="float23"):
        check_kernel(KernelDescriptor("default", "any", dtypes={"float23"}))


def test_an_operator_of_a_library_is_known_once_it_is_defined():
    library = torch.library.Library("kagent_freeze_test", "DEF")
    try:
        library.define("twice(Tensor self, *, int times=2) -> Tensor")
        good = KernelDescriptor("kagent_freeze_test::twice", "twice", layouts={"self": CONTIGUOUS})
        assert frozen(good).problems == ()
        reason, hint = problem("kagent_freeze_test::twise")
        assert "no operator 'kagent_freeze_test::twise'" in reason
        assert hint == "did you mean 'kagent_freeze_test::twice'?"
    finally:
        library._destroy()


@pytest.mark.parametrize("kernels", [0, 1])
def test_torch_is_imported_only_when_there_is_a_kernel_to_check(kernels):
    program = f"""
import sys
from kagent_core.registry import KernelRegistry
from kagent_core.specs import KernelDescriptor
registry = KernelRegistry("toy", resolver=lambda call: None)
for number in range({kernels}):
    registry.add(KernelDescriptor("aten::relu", "k"))
assert "torch" not in sys.modules
registry.freeze()
print("torch" in sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert told.stdout.strip() == str(kernels > 0)
