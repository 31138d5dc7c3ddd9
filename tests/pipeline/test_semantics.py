"""What a caller sees is what eager PyTorch would have given: values, dtypes, shapes, strides, mutated arguments."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional

import kagent_core
from kagent_core import use_plugin
from kagent_core.backend import decompositions
from kagent_core.capture.lazy_bits import with_bits
from kagent_core.errors import CaptureError, KernelExecutionError
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.compare import check_against_eager
from kagent_core.testing.conformance.database import everything_captured
from kagent_core.testing.fake import FakeDevice

torch.manual_seed(0)
COMPLEX = torch.randn(4, 3, dtype=torch.complex64)
FLOATS = torch.randn(4, 4)


def views_of_an_intermediate(x):
    y = x + 1
    return y, y.t(), y[1:], y.view(2, -1)


def largest_and_where(x):
    values, indices = x.max(1)
    return values, indices.float() + 1, x.sort()[1] * 2


def write_then_read(x):
    x[1:3] = 0.0
    return x * 2


CASES = {
    "0-dim": (lambda x: (x * 2, x.sum(), x + torch.tensor(3)), torch.tensor(1.5)),
    "empty": (lambda x: (x * 2, x.sum(), x.t() @ x, x.softmax(-1)), torch.empty(0, 3)),
    "offset": (lambda x: (x * 2, x.t() + 1, x.view(-1)[3:]), torch.randn(40)[7:31].view(4, 6)),
    "strided": (lambda x: (x.relu(), x @ x.t(), x.contiguous(), x[1:]), torch.randn(8, 10)[::2, 1::3]),
    "expanded": (lambda x: (x + 1, x.clone(), x.sum(0)), torch.randn(1, 4).expand(5, 4)),
    "channels last": (
        lambda x: (functional.conv2d(x, torch.ones(2, 3, 3, 3)), x.relu(), functional.max_pool2d(x, 2)),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "integers": (lambda x: (x // 3, x % 3, x << 1, x.sum(), x / 2, x.float()), torch.arange(-5, 6)),
    "bool": (lambda x: (x & True, ~x, x.sum(), x.any(), x * 2), torch.tensor([True, False, True])),
    "float16": (lambda x: (x * 2.5, x.softmax(-1), functional.gelu(x), x @ x.t()), torch.randn(4, 6).half()),
    "bfloat16": (lambda x: (x * 2.5, x.softmax(-1), functional.layer_norm(x, (6,))), torch.randn(4, 6).bfloat16()),
    "float64": (lambda x: (x.exp(), x.cumsum(0)), torch.randn(4, 6).double()),
    "float8": (lambda x: x.to(torch.float8_e4m3fn).float(), torch.randn(3)),
    "uint16": (lambda x: x.to(torch.uint16), torch.arange(3)),
    "promotion": (lambda x, y: torch.cat([x, y.to(x.dtype)]) * y.sum(), torch.randn(2, 3), torch.ones(2, 3).long()),
    "complex": (lambda x: (x * 2, x.abs(), x.real, x.imag, x.conj(), x @ x.mH, x.angle()), COMPLEX),
    "complex views": (lambda x: torch.view_as_complex(torch.view_as_real(x) * 2), COMPLEX),
    "lazily conjugated input": (lambda x: (x * 2, x.conj(), x.imag, x.sum(), x @ x.mT), COMPLEX.conj()),
    "lazily negated input": (lambda x: (x * 2, x.sum(), x), COMPLEX.conj().imag),
    "as_strided": (lambda x: (x.as_strided((2, 2), (1, 2), 1) + 1, x.as_strided((2,), (3,))), torch.randn(20)[2:10]),
    "view as another dtype": (lambda x: (x.view(torch.int32) + 1, x.view(torch.uint8), x.view(torch.float64)), FLOATS),
    "unfold": (lambda x: x.unfold(0, 3, 1).sum(-1), torch.randn(10)),
    "diagonal": (lambda x: (x.diagonal().add(1), torch.diag(x)), FLOATS),
    "split": (lambda x: [t * 2 for t in x.split(2)] + list(x.chunk(2, 1)) + list(x.unbind(0)), torch.randn(5, 4)),
    "views of an input": (lambda x: (x.t(), x.view(-1), x[0], x, x.detach()), FLOATS),
    "views of an intermediate": (views_of_an_intermediate, FLOATS),
    "sizes among the results": (lambda x: (x.shape[0], x.numel() * 2, x * x.shape[1], None), torch.randn(3, 4)),
    "infinities and nan": (lambda x: (x.masked_fill(x > 0, float("-inf")), x * float("nan"), x.amax(0)), FLOATS),
    "ties and nan": (
        lambda x: (x.sort(), x.topk(2), x.argmax(), x.median()),
        torch.tensor([3.0, 2.0, 2.0, float("nan")]),
    ),
    "one result kept, one used": (largest_and_where, torch.randn(4, 5)),
    "index": (
        lambda x, i: (x[i], x.index_select(0, i), x.index_put((i,), torch.ones(2, 3))),
        torch.randn(5, 3),
        torch.tensor([1, 3]),
    ),
    "boolean mask": (lambda x: x[x > 0] * 2, torch.randn(5, 3)),
    "item": (lambda x: x.sum().item() * 2, torch.randn(5)),
    "fft": (lambda x: torch.fft.rfft(x), torch.randn(8)),
    "linear algebra": (lambda x: (torch.linalg.inv(x @ x.t() + torch.eye(4)), x.norm(), torch.var_mean(x, 0)), FLOATS),
    "random numbers": (
        lambda x: (torch.rand(3) + x, functional.dropout(x, 0.5), torch.randn_like(x), torch.bernoulli(x.sigmoid())),
        torch.randn(3),
    ),
    "more random numbers": (
        lambda x: (
            torch.randperm(5),
            torch.randint(0, 9, (3,)),
            torch.multinomial(x.sigmoid(), 2),
            functional.rrelu(x, training=True),
        ),
        torch.randn(3),
    ),
    "write an input": (lambda x: x.add_(1), FLOATS),
    "write a strided input": (lambda x: x.add_(1).sum(), torch.randn(4, 6)[:, ::2]),
    "write a view of an input": (lambda x: x[1:].mul_(2).sum(), FLOATS),
    "write two inputs": (lambda x, y: (x.copy_(y), y.add_(x)), torch.randn(4), torch.randn(4)),
    "write with broadcasting": (lambda x, y: x.mul_(y), torch.randn(3, 4), torch.randn(4)),
    "transpose in place": (lambda x: x.t_().mul_(2), torch.randn(3, 4)),
    "write then read": (write_then_read, torch.randn(5)),
    "chain in place": (lambda x: x.mul_(2).add_(1).t().relu_(), torch.randn(3, 4)),
    "write an intermediate": (lambda x, y: (x + y).add_(1), torch.randn(3), torch.randn(3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grad_mode", [False, True], ids=["no_grad", "grad"])
def test_equals_eager(name, grad_mode):
    function, *args = CASES[name]
    with torch.set_grad_enabled(grad_mode):
        check_against_eager(function, *args)


@pytest.mark.parametrize("name", ["strided", "views of an intermediate", "sizes among the results", "write an input"])
def test_equals_eager_with_symbolic_sizes(name):
    function, *args = CASES[name]
    check_against_eager(function, *args, dynamic=True)


def test_gradients_equal_eager():
    x = torch.randn(4, 6, requires_grad=True)
    w = torch.randn(6, 6)[:, ::2].requires_grad_()

    def function(x, w):
        return (functional.layer_norm(x, (6,)) @ w).t().softmax(0).square().sum()

    compiled = torch.compile(function, backend="kagent", options={"device": "cpu"})
    mine = torch.autograd.grad(compiled(x, w), (x, w))
    theirs = torch.autograd.grad(function(x, w), (x, w))
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_second_order_is_refused_or_right():
    """AOTAutograd does not differentiate twice; what must not happen is a wrong number."""
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: (x**3).sum(), backend="kagent", options={"device": "cpu"})
    (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), x)


def test_inference_mode_and_normal_mode_share_a_plan():
    function = torch.compile(lambda x: (x * 2 + 1).softmax(-1).t() * 3, backend="kagent", options={"device": "cpu"})
    x = torch.randn(3, 3)
    want = (x * 2 + 1).softmax(-1).t() * 3
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(function(x), want)


def test_autocast():
    def function(a):
        return a @ a + 1

    a = torch.randn(3, 3)
    compiled = torch.compile(function, backend="kagent", options={"device": "cpu"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = compiled(a), function(a)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_results_do_not_share_memory_between_calls():
    compiled = torch.compile(lambda x: (x + 1) * 2, backend="kagent", options={"device": "cpu"})
    first = compiled(torch.zeros(4))
    kept = first.clone()
    second = compiled(torch.ones(4))
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


def test_written_input_moves_its_version():
    compiled = torch.compile(lambda x: x.add_(1), backend="kagent", options={"device": "cpu"})
    x = torch.zeros(3)
    before = x._version
    with torch.no_grad():
        compiled(x)
    assert x._version > before


def test_storage_offset_of_an_input_may_change():
    def absolute(x):
        return x.as_strided((3,), (1,), 4) * 2

    def relative(x):
        return x[2:] * 2

    for function in (absolute, relative):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="kagent", options={"device": "cpu"})
        for offset in (0, 2, 5, 0):
            x = torch.randn(20)[offset : offset + 6]
            torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("kernels", ["auto", "all"])
@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (0, 0)])
def test_pooling_into_nothing(sizes, kernels):
    function = lambda x: functional.adaptive_avg_pool2d(torch.relu(x) + 1, sizes)
    check_against_eager(function, torch.randn(2, 3, 6, 5), device="cpu", generated_kernels=kernels)


@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1.0, 1e25])
def test_standard_deviations_whose_squares_are_beyond_float32(scale):
    def function(x):
        return x.std(), x.std(-1, correction=0), torch.std_mean(x, 0), x.std(1, keepdim=True) + 1

    check_against_eager(function, torch.randn(8, 100) * scale, device="cpu")


@pytest.mark.parametrize("name", ["_local_scalar_dense", "item", "is_nonzero"])
def test_numbers_are_those_of_the_tensor_that_is_given(name):
    run = functools.partial(kagent_core.run_op, f"aten::{name}", device="cpu")
    for values in ([1, 2, 0], [1.5, float("inf"), 0.0], [True, False]):
        scalars = torch.tensor(values)
        assert [run(scalar) for scalar in scalars] == [getattr(torch.ops.aten, name)(scalar) for scalar in scalars]


def test_numbers_that_need_no_element():
    x = torch.arange(40.0).view(5, 8)
    for y in (x, x[1:], x[2:, 3:], x.t()[1:], x[:, ::2]):
        for name, *rest in (("sym_size", 1), ("sym_stride", 0), ("sym_numel",), ("sym_storage_offset",)):
            got = kagent_core.run_op(f"aten::{name}{'.int' if rest else ''}", y, *rest, device="cpu")
            assert got == getattr(torch.ops.aten, name)(y, *rest), name
    assert kagent_core.run_op("aten::is_same_size", x, x + 1, device="cpu") is True


def test_numbers_are_those_of_each_call_where_sizes_depend_on_data():
    def function(x, places):
        return torch.tensor_split(x, places), x[: places[1].item()]

    with everything_captured():
        compiled = torch.compile(function, backend="kagent", options={"device": "cpu"})
        for places in ([1, 2, 3], [0, 4, 4], [2, 3, 5]):
            x, given = torch.randn(5, 3), torch.tensor(places)
            torch.testing.assert_close(compiled(x, given), function(x, given))


def test_run_op_says_what_an_operator_does_not_take(capfd):
    for signature, args in {
        "aten::mm": (torch.ones(2, 3), torch.ones(2, 3)),
        "aten::full": ([2], 2**70),
        "aten::add.Tensor": (torch.ones(2), "x"),
    }.items():
        with pytest.raises(CaptureError, match=rf"{signature} does not take .*\n  hint: its schema is {signature}"):
            kagent_core.run_op(signature, *args, device="cpu")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "tangent",
    [
        lambda y: torch.arange(24).view(4, 6) * (1 + 2j),
        lambda y: (torch.arange(24).view(4, 6) * (1 + 2j)).conj(),
        lambda y: (torch.arange(24).view(6, 4) * (1 + 2j)).conj().t(),
    ],
    ids=["plain", "lazily conjugated", "lazily conjugated and transposed"],
)
@pytest.mark.parametrize("function", [torch.fft.ifft, torch.fft.fft, lambda x: x.conj() * 2, torch.resolve_conj])
def test_gradients_that_come_back_lazily_conjugated(function, tangent):
    x = torch.randn(4, 6, dtype=torch.complex64, requires_grad=True)
    compiled = torch.compile(lambda x: function(x), backend="kagent", options={"device": "cpu"})
    (got,) = torch.autograd.grad(y := compiled(x), x, tangent(y).to(y.dtype))
    (want,) = torch.autograd.grad(y := function(x), x, tangent(y).to(y.dtype))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z * 1j,
        lambda z: z / (2 + 1j),
        lambda z: (2 - 1j) / z,
        lambda z: torch.exp(1j * z),
        lambda z: torch.sub(z * z, z, alpha=2j),
        lambda z: (1j * z).conj() * z,
    ],
    ids=["times", "divided", "divides", "exponential", "alpha", "conjugated"],
)
def test_gradients_of_products_with_complex_numbers(function):
    """They have a number where a view's tensor would be: ``aten::_conj(1j)``."""
    z = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    tangent = torch.randn(4, 3, dtype=torch.complex64)
    with use_plugin(FakeDevice()):
        for device in "cpu", "fake:0":
            torch._dynamo.reset()
            compiled = torch.compile(lambda z: function(z), backend="kagent", options={"device": device})
            (got,) = torch.autograd.grad(compiled(z), z, tangent)
            (want,) = torch.autograd.grad(function(z), z, tangent)
            torch.testing.assert_close(got, want)
            assert got.is_conj() == want.is_conj()


def test_lazy_bits_are_written_out_right():
    base = torch.randn(4, 6, dtype=torch.complex64)
    for tensor in (base, base.conj(), base.t().conj(), base[:, ::2].conj()):
        for conj in (False, True):
            got = with_bits(tensor, conj, False)
            assert got.is_conj() == conj
            torch.testing.assert_close(got, tensor)
            assert got.stride() == tensor.stride()
    lazy = base.conj().imag
    for neg in (False, True):
        got = with_bits(lazy, False, neg)
        assert got.is_neg() == neg
        torch.testing.assert_close(got, lazy)


@pytest.mark.parametrize(
    "function", [torch.exp, torch.neg, lambda x: x + 1, lambda x: x.softmax(0), lambda x: x * x.sum()]
)
@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_strides_of_dimensions_of_size_one(function, order):
    """ATen's kernels lay them out as eager does; generated ones as torch's meta kernels say."""
    x = torch.randn(2, 2, 2)[::2].permute(order)
    check_against_eager(function, x, generated_kernels="off")
    check_against_eager(function, x, every_stride=False)


class HandsBackItsInput:
    """A user's kernel that forgets to copy."""

    @kagent_core.hookimpl(wrapper=True)
    def kagent_lookup_kernels(self, ctx):
        kernels = yield
        careless = KernelDescriptor("aten::relu", "careless", function=lambda x: x, allocates=True)
        return [careless if kernel.signature == "aten::relu" else kernel for kernel in kernels]


def test_a_users_kernel_that_hands_back_its_input():
    with kagent_core.use_plugin(HandsBackItsInput()):
        x = torch.ones(3)
        y = kagent_core.run_op("aten::relu", x, device="cpu")
        x.zero_()
    assert torch.equal(y, torch.ones(3))


def test_a_users_kernel_that_returns_another_dtype_is_refused():
    class Wrong:
        @kagent_core.hookimpl(wrapper=True)
        def kagent_lookup_kernels(self, ctx):
            yield
            return [KernelDescriptor("aten::relu", "wrong", function=lambda x: x.double(), allocates=True)]

    with (
        kagent_core.use_plugin(Wrong()),
        pytest.raises(KernelExecutionError, match=r"returned f64\[3\], expected f32\[3\]"),
    ):
        kagent_core.run_op("aten::relu", torch.ones(3), device="cpu")


def _composed(x):
    return functional.interpolate(torch.ops.kagent_composed.linear(x, x[0]), scale_factor=2)


def test_operators_that_are_calls_of_others_are_taken_apart():
    """Dispatch does that, for PyTorch's own and for any library's: the table of decompositions has none of them."""
    library = torch.library.Library("kagent_composed", "DEF")
    library.define("linear(Tensor x, Tensor weight) -> Tensor")
    library.impl("linear", lambda x, weight: functional.linear(x, weight), "CompositeImplicitAutograd")
    assert torch.ops.aten.linear.default not in decompositions()
    x, called = torch.randn(2, 4, 4), []
    with kagent_core.use_plugin(Calls(called)):
        compiled = torch.compile(_composed, backend="kagent", options={"device": "cpu"}, fullgraph=True)
        torch.testing.assert_close(compiled(x), _composed(x))
    assert called
    assert not {"kagent_composed::linear", "aten::linear", "aten::upsample_nearest1d"} & set(called)


class Calls:
    """A plugin that keeps which operators ran."""

    def __init__(self, called):
        self.called = called

    @kagent_core.hookimpl
    def kagent_task_finished(self, event):
        self.called.extend(call.signature for call in event.task.calls)
