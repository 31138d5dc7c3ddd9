"""The error of a missing kernel, and the stub in it: pasted, with one line filled in, it runs."""

import re

import pytest
import torch

import kagent_core
from kagent_core.capture.schemas import resolve_overload
from kagent_core.errors import KernelExecutionError, KernelNotFoundError
from kagent_core.kernels import UserKernel
from kagent_core.layout import CONTIGUOUS
from kagent_core.registry import KernelRegistry, kernel_stub
from kagent_core.single import run_overload
from kagent_core.specs import DType, KernelDescriptor, OpCall, TensorSpec
from kagent_core.testing.fake import FakeDevice

F32, I64 = DType("float32", 4), DType("int64", 8)


def spec(dtype=F32, shape=(2, 3), strides=(3, 1), buffer=0):
    return TensorSpec(dtype, shape, strides, 0, buffer)


def call_of(signature="aten::relu", source=None, **arguments):
    source, result = source or spec(), spec(buffer=9)
    return OpCall(0, "call", signature, {"self": source} | arguments, (source,), (result,), (result,))


def registry_of(*kernels, **changes):
    registry = KernelRegistry("toy", **changes)
    for each in kernels:
        registry.add(each)
    registry.freeze()
    return registry


def kernel(name="plain", signature="aten::relu", **changes):
    return KernelDescriptor(signature, name, **changes)


def error_of(registry, call):
    with pytest.raises(KernelNotFoundError) as caught:
        registry.find(call)
    return caught.value


# -- the message


def test_it_says_what_came_and_every_refusal():
    registry = registry_of(
        kernel("ints", dtypes={"int64"}), kernel("rows", layout=CONTIGUOUS), kernel("no", "aten::neg")
    )
    call = call_of(source=spec(strides=(1, 2)))
    error = error_of(registry, call)
    assert error.message == (
        "no kernel for aten::relu on 'toy' takes what came: f32[2, 3] strides (1, 2) as self, "
        "f32[2, 3] strides (3, 1) as out; 'ints' takes int64, not float32; "
        "'rows' takes contiguous tensors, not f32[2, 3] with strides (1, 2)"
    )
    assert registry.refusals(call) == error.message.split("; ")[1:]
    assert registry.refusals(call_of("aten::sin")) == []
    assert error.hint.startswith('register a kernel for it, or set missing_kernel = "fallback". A kernel to begin')


@pytest.mark.parametrize(
    ("there", "told", "hint"),
    [
        (
            ["aten::sub.Tensor", "aten::add.Scalar"],
            "; aten::add.Tensor is missing, aten::add.Scalar is there",
            "the nearest registered signature is 'aten::add.Scalar'; ",
        ),
        (
            ["aten::add.out", "aten::add.Scalar", "aten::addmm"],
            "; aten::add.Tensor is missing, aten::add.Scalar and aten::add.out are there",
            "the nearest registered signatures are 'aten::add.Scalar', 'aten::add.out'; ",
        ),
        (["aten::addr", "aten::mm"], "", "the nearest registered signature is 'aten::addr'; "),
        (["prims::add"], "", "the nearest registered signature is 'prims::add'; "),
        (["aten::mm"], "", ""),
        ([], "", ""),
    ],
)
def test_a_missing_signature_says_what_is_near_and_takes_nothing_in_its_place(there, told, hint):
    registry = registry_of(*(kernel(f"k{i}", signature) for i, signature in enumerate(there)))
    error = error_of(registry, call_of("aten::add.Tensor"))
    assert error.message.endswith(f"f32[2, 3] strides (3, 1) as out{told}")
    assert error.hint.startswith(f'{hint}register a kernel for it, or set missing_kernel = "fallback". ')


def test_fused_kernels_are_not_near():
    registry = registry_of(KernelDescriptor("", "both", fuses=("aten::relu6", "aten::neg")))
    assert "nearest" not in error_of(registry, call_of()).hint


def test_an_operator_without_tensors():
    error = error_of(registry_of(), OpCall(0, "sync", "aten::_assert_async", {}, (), (), ()))
    assert error.message == "no kernel for aten::_assert_async on 'toy' takes what came: no tensors"
    assert "def my_assert_async():\n    # no arguments\n" in error.hint


def test_a_device_can_write_stubs_in_its_own_language():
    registry = registry_of(stub=lambda call: f"__kernel void {call.name}();")
    assert error_of(registry, call_of()).hint.endswith("A kernel to begin with:\n\n__kernel void call();")
    assert error_of(registry.overlaid([kernel("x", "aten::neg")]), call_of()).hint.endswith("call();")


# -- the stub


def test_the_stub_names_arguments_and_results_in_order():
    one, two = spec(buffer=1), spec(I64, buffer=2)
    call = OpCall(
        0, "c", "aten::max.dim", {"self": spec(), "dim": 1, "from": (spec(), 2)}, (spec(),), (one, two), (one, two)
    )
    assert kernel_stub(call, "toy").splitlines()[3:] == [
        '@kagent_core.kernel("aten::max.dim", device="toy", dtypes={"float32", "int64"})',
        "def my_max_dim(self, dim, from_, out0, out1):",
        (
            "    # self: f32[2, 3] strides (3, 1); dim: 1; from_: [f32[2, 3] strides (3, 1), 2]; "
            "out0: f32[2, 3] strides (3, 1); out1: i64[2, 3] strides (3, 1)"
        ),
        '    raise NotImplementedError("write aten::max.dim into out0 and out1")',
    ]


def test_the_stub_of_an_operator_in_place_has_nothing_to_fill():
    x = spec()
    call = OpCall(0, "c", "aten::relu_", {"self": x}, (x,), (x,), (x,))
    stub = kernel_stub(call, "toy")
    assert "def my_relu(self):" in stub
    assert 'NotImplementedError("write aten::relu_ into self")' in stub
    effect = OpCall(0, "c", "aten::_print", {"s": "x"}, (), (), ())
    assert 'NotImplementedError("write aten::_print")' in kernel_stub(effect, "toy")


@pytest.fixture
def fake():
    torch._dynamo.reset()
    with kagent_core.use_plugin(FakeDevice()):
        yield


def run(signature, *args, device="fake", **kwargs):
    config = kagent_core.load_config({"device": device, "missing_kernel": "error"})
    return run_overload(kagent_core.session_for(config), resolve_overload(signature), args, kwargs)


def paste(text, line):
    """Run a stub as if it stood in a module, with its one open line filled in."""
    text, filled = re.subn(r"raise NotImplementedError\(.*\)", line, text)
    assert filled == 1
    names = {"__name__": "pasted"}
    exec(compile(text, "pasted.py", "exec"), names)
    [kernel] = [value for value in names.values() if isinstance(value, UserKernel)]
    return kernel


X, Y = torch.tensor([[-1.0, 2.0], [0.5, -3.0]]), torch.tensor([3.0, 4.0])
CASES = [
    ("aten::sub.Tensor", (X, Y), {}, "out.copy_(self - other)"),
    ("aten::sub.Tensor", (X.double(), Y.double()), {"alpha": 2}, "out.copy_(self - alpha * other)"),
    ("aten::sum.dim_IntList", (X, [1]), {"keepdim": True}, "out.copy_(self.sum(dim, keepdim))"),
    ("aten::cat", ([X, X.t()], 1), {}, "out[:, :2], out[:, 2:] = tensors"),
    ("aten::max.dim", (X, 1), {}, "for o, v in zip((out0, out1), self.max(dim)): o.copy_(v)"),
    ("aten::arange.start", (2, 5), {}, "[out.__setitem__(i, start + i) for i in range(end - start)]"),
]


def check_stub(signature, args, kwargs, line, expected, device):
    with pytest.raises(KernelNotFoundError) as caught:
        run(signature, *args, device=device, **kwargs)
    kernel = paste(caught.value.hint.partition("A kernel to begin with:\n\n")[2], line)
    try:
        torch.testing.assert_close(run(signature, *args, device=device, **kwargs), expected)
    finally:
        kernel.unregister()
    with pytest.raises(KernelNotFoundError):
        run(signature, *args, device=device, **kwargs)


@pytest.mark.parametrize(("signature", "args", "kwargs", "line"), CASES, ids=[case[0] for case in CASES])
def test_the_stub_of_the_error_runs_on_the_device_that_lacks_the_kernel(fake, signature, args, kwargs, line):
    check_stub(signature, args, kwargs, line, resolve_overload(signature)(*args, **kwargs), "fake")


def test_a_stub_that_nobody_filled_in_says_what_to_write(fake):
    with pytest.raises(KernelNotFoundError) as caught:
        run("aten::sub.Tensor", X, Y)
    names = {"__name__": "pasted"}
    exec(caught.value.hint.partition("A kernel to begin with:\n\n")[2], names)
    try:
        with pytest.raises(KernelExecutionError, match=r"NotImplementedError: write aten::sub\.Tensor"):
            run("aten::sub.Tensor", X, Y)
    finally:
        names["my_sub_Tensor"].unregister()


@pytest.fixture(scope="module")
def library():
    """Operators that capture knows, and for which nobody has a kernel."""
    library = torch.library.Library("kagent_stub_test", "DEF")
    library.define("scaled(Tensor self, *, Scalar factor) -> Tensor")
    library.define("minmax(Tensor self, int dim=0) -> (Tensor, Tensor)")
    library.define("fill(Tensor(a!) self, Scalar value) -> ()")
    library.impl("scaled", lambda self, *, factor: torch.empty_like(self), "Meta")
    library.impl("minmax", lambda self, dim=0: (self.new_empty(self.shape[1]), self.new_empty(self.shape[1])), "Meta")
    library.impl("fill", lambda self, value: None, "Meta")
    yield
    library._destroy()


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_stub_of_the_error_runs_for_an_operator_of_a_library(fake, library, device):
    check_stub("kagent_stub_test::scaled", (X,), {"factor": 3}, "out.copy_(self * factor)", X * 3, device)
    line = "out0.copy_(self.amin(0)), out1.copy_(self.amax(0))"
    check_stub("kagent_stub_test::minmax", (X,), {}, line, (X.amin(0), X.amax(0)), device)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_stub_for_an_operator_in_place_runs(fake, library, device):
    x = X.clone()
    with pytest.raises(KernelNotFoundError) as caught:
        run("kagent_stub_test::fill", x, 7, device=device)
    kernel = paste(caught.value.hint.partition("A kernel to begin with:\n\n")[2], "self.fill_(value)")
    try:
        run("kagent_stub_test::fill", x, 7, device=device)
    finally:
        kernel.unregister()
    assert torch.equal(x, torch.full_like(X, 7))
