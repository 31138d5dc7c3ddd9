"""A program's own kernels in the place of those of a device's plugin."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import kagent_core
from kagent_core.errors import DeviceError, RegistryError, SignatureError
from kagent_core.kernels import UserKernel, active_kernels, kernel, override
from kagent_core.layout import CONTIGUOUS
from kagent_core.specs import KernelDescriptor
from kagent_core.testing.fake import FakeDevice

CPU = {"device": "cpu"}
X = torch.tensor([-1.0, 2.0])
HERE = str(Path(__file__))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    assert not active_kernels(), "a test left a kernel registered"


@pytest.fixture
def fake():
    plugin = FakeDevice(count=2)
    with kagent_core.use_plugin(plugin):
        yield plugin


def relu(x=X, device="cpu"):
    return kagent_core.run_op("aten::relu", x, device=device).tolist()


def compiled(function, **options):
    return torch.compile(function, backend="kagent", options=CPU | options)


def relu_plus_one(x):
    return torch.relu(x) + 1


def tens(x):
    return x * 10


def fill_with_thousands(x, out):
    torch.mul(x, 1000, out=out)


# -- for the process


def test_a_decorated_function_is_used_until_it_is_unregistered():
    @kernel("aten::relu", device="cpu")
    def my_relu(x):
        return x * 10

    try:
        assert relu() == [-10.0, 20.0]
        assert compiled(relu_plus_one)(X).tolist() == [-9.0, 21.0]
        assert my_relu(3) == 30
        assert my_relu.__name__ == "my_relu"
        line = my_relu.__wrapped__.__code__.co_firstlineno
        assert repr(my_relu) == f"<kernel 'my_relu' for aten::relu on cpu, {HERE}:{line}>"
    finally:
        my_relu.unregister()
    assert relu() == [0.0, 2.0]
    with pytest.raises(RegistryError, match=r"'my_relu' for aten::relu on cpu, .* is not registered for the process"):
        my_relu.unregister()


def test_a_call_registers_what_cannot_be_decorated():
    registered = kagent_core.kernel("aten::relu", torch.abs, device="cpu", name="absolute")
    try:
        assert relu() == [1.0, 2.0]
        assert registered.descriptor.origin.startswith(f"{HERE}:")
    finally:
        registered.unregister()


def test_two_decorators_on_one_function():
    @kernel("aten::relu", device="cpu")
    @kernel("aten::neg", device="cpu")
    def ten_times(x):
        return x * 10

    try:
        assert relu() == [-10.0, 20.0]
        assert kagent_core.run_op("aten::neg", X, device="cpu").tolist() == [-10.0, 20.0]
        assert isinstance(ten_times.decorated, UserKernel)
        assert not isinstance(ten_times.descriptor.function, UserKernel)
    finally:
        ten_times.unregister()
    assert kagent_core.run_op("aten::neg", X, device="cpu").tolist() == [1.0, -2.0]


def test_variants_and_priorities_count_among_the_programs_own():
    doubles = kernel("aten::relu", lambda x: x + 100, device="cpu", name="doubles", dtypes={"float64"})
    low = kernel("aten::relu", lambda x: x + 10, device="cpu", name="low", priority=-5)
    try:
        assert relu() == [9.0, 12.0]
        high = kernel("aten::relu", lambda x: x + 20, device="cpu", name="high", priority=-4)
        try:
            assert relu() == [19.0, 22.0]
            again = kernel("aten::relu", tens, device="cpu")
            try:
                with pytest.raises(
                    RegistryError, match="2 kernels of 'cpu' with priority 0 accept aten::relu: 'doubles'"
                ):
                    relu(X.double())
            finally:
                again.unregister()
        finally:
            high.unregister()
        assert relu(X.double()) == [99.0, 102.0]
    finally:
        doubles.unregister()
        low.unregister()


def test_a_name_that_is_taken_is_refused_with_both_places():
    first = kernel("aten::relu", tens, device="cpu", name="mine")
    try:
        for device in ("cpu", "cpu:0"):
            with pytest.raises(RegistryError) as caught:
                kernel("aten::relu", torch.abs, device=device, name="mine")
            told = f"two kernels named 'mine' for aten::relu on '{device}': one from {HERE}:"
            assert caught.value.message.startswith(told)
            assert f", one from {HERE}:" in caught.value.message
            assert "unregister()" in caught.value.hint
        kernel("aten::relu", torch.abs, device="fake", name="mine").unregister()
        kernel("aten::neg", torch.abs, device="cpu", name="mine").unregister()
    finally:
        first.unregister()


CELL = """
import kagent_core
@kagent_core.kernel("aten::relu", device="cpu"{more})
def cell(x):
    return x * {factor}
"""


def test_a_function_that_is_defined_anew_replaces_the_old_one(caplog):
    names = {"__name__": "__main__"}
    exec(compile(CELL.format(factor=2, more=""), "cell1", "exec"), names)
    old = names["cell"]
    with caplog.at_level(logging.INFO, "kagent"):
        exec(compile(CELL.format(factor=3, more=""), "cell2", "exec"), names)
    try:
        assert "'cell' for aten::relu on cpu, cell2:3> replaces the one from cell1:3" in caplog.text
        assert relu() == [-3.0, 6.0]
        with pytest.raises(RegistryError, match="is not registered"):
            old.unregister()
        for more in (', dtypes={"int64"}', ", layout=LAYOUT"):
            with pytest.raises(RegistryError, match="two kernels named 'cell'"):
                exec(CELL.format(factor=4, more=more), names | {"LAYOUT": CONTIGUOUS})
        with pytest.raises(RegistryError, match="two kernels named 'cell'"):
            exec(CELL.format(factor=4, more=""), {"__name__": "another_module"})
    finally:
        names["cell"].unregister()


# -- scoped


def test_a_block_is_nested_and_restored():
    kept = kernel("aten::relu", lambda x: x * 0, device="cpu")
    try:
        with override("aten::relu", tens, device="cpu", priority=-100) as outer:
            assert relu() == [-10.0, 20.0]
            with override("aten::relu", fill_with_thousands, device="cpu"):
                assert relu() == [-1000.0, 2000.0]
            with override("aten::relu", torch.abs, device="cpu", dtypes={"float64"}):
                assert relu() == [-10.0, 20.0]
                assert relu(X.double()) == [1.0, 2.0]
            with pytest.raises(RegistryError, match="is not registered for the process"):
                outer.unregister()
        assert relu() == [0.0, 0.0]
    finally:
        kept.unregister()
    with pytest.raises(ZeroDivisionError), override("aten::relu", tens, device="cpu"):
        raise ZeroDivisionError
    assert relu() == [0.0, 2.0]


def test_what_is_registered_inside_a_block_is_seen_there():
    with override("aten::neg", torch.abs, device="cpu"):
        assert relu() == [0.0, 2.0]
        registered = kernel("aten::relu", tens, device="cpu")
        try:
            assert relu() == [-10.0, 20.0]
        finally:
            registered.unregister()
        assert relu() == [0.0, 2.0]


def test_a_block_belongs_to_its_thread():
    seen, compiled_before = {}, compiled(relu_plus_one)
    compiled_before(X)

    def elsewhere():
        seen["run"] = relu()
        seen["compiled"] = compiled_before(X).tolist()
        with override("aten::relu", lambda x: x * 2, device="cpu"):
            seen["own"] = relu()

    with override("aten::relu", tens, device="cpu"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert relu() == [-10.0, 20.0]
    assert seen == {"run": [0.0, 2.0], "compiled": [1.0, 3.0], "own": [-2.0, 4.0]}


def test_many_threads_with_blocks_of_their_own():
    run = compiled(relu_plus_one)
    run(X)
    wrong = []

    def work(factor):
        for _ in range(20):
            with override("aten::relu", lambda x: x * factor, device="cpu"):
                result = run(X).tolist()
            if result != [1.0 - factor, 1.0 + 2 * factor] or run(X).tolist() != [1.0, 3.0]:
                wrong.append((factor, result))

    threads = [threading.Thread(target=work, args=(factor,)) for factor in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- what torch.compile keeps


def test_a_program_runs_with_the_kernels_that_are_active_where_it_is_called():
    run = compiled(relu_plus_one)
    assert run(X).tolist() == [1.0, 3.0]
    with override("aten::relu", tens, device="cpu"):
        assert run(X).tolist() == [-9.0, 21.0]
        assert compiled(relu_plus_one)(X).tolist() == [-9.0, 21.0]
        assert kagent_core.compile(relu_plus_one, device="cpu")(X).tolist() == [-9.0, 21.0]
    assert run(X).tolist() == [1.0, 3.0]
    assert compiled(relu_plus_one)(X).tolist() == [1.0, 3.0]
    assert counters["stats"]["unique_graphs"] == 1, "Dynamo captured it again"


def test_a_program_that_was_captured_inside_runs_without_afterwards():
    with override("aten::relu", tens, device="cpu"):
        run = compiled(relu_plus_one)
        assert run(X).tolist() == [-9.0, 21.0]
    assert run(X).tolist() == [1.0, 3.0]


def test_new_shapes_are_planned_with_the_active_kernels():
    run = torch.compile(relu_plus_one, backend="kagent", options=CPU, dynamic=True)
    for size in (3, 4, 5):
        x = -torch.arange(1.0, size)
        assert run(x).tolist() == [1.0] * (size - 1)
        with override("aten::relu", tens, device="cpu"):
            assert torch.equal(run(x), x * 10 + 1)


def test_forward_and_backward():
    def loss(x):
        return torch.relu(x).sum()

    run = compiled(loss)

    def gradient():
        x = X.clone().requires_grad_()
        value = run(x)
        value.backward()
        return value.item(), x.grad.tolist()

    assert gradient() == (2.0, [0.0, 1.0])
    with override("aten::relu", tens, device="cpu"):
        assert gradient()[0] == 10.0
    with override("aten::where.self", lambda condition, x, y: torch.full(condition.shape, 7.0), device="cpu"):
        assert gradient() == (2.0, [7.0, 7.0])
    assert gradient() == (2.0, [0.0, 1.0])


def test_a_program_that_has_no_plan_follows_too():
    def positive(x):
        return torch.relu(x)[x > 0]

    run = compiled(positive)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert run(X).tolist() == [2.0]
        with override("aten::relu", tens, device="cpu"):
            assert run(X).tolist() == [20.0]
        assert run(X).tolist() == [2.0]


# -- what stays as it was


def test_sessions_share_all_but_the_registry(tmp_path):
    config = kagent_core.load_config(CPU | {"profile": True, "cache_dir": str(tmp_path)})
    base = kagent_core.session_for(config)
    plain = base.open(base.target.device)
    with override("aten::relu", tens, device="cpu"):
        variant = kagent_core.session_for(config)
        opened = variant.open(base.target.device)
        assert variant is not base
        assert (variant.base, base.base) == (base, base)
        assert kagent_core.session_for(config) is variant
        assert base.with_kernels(active_kernels()) is variant.with_kernels(active_kernels()) is variant
        assert opened is variant.open(base.target.device)
        assert (opened.runtime, opened.packer, opened.deriver) == (plain.runtime, plain.packer, plain.deriver)
        assert variant.profiler is base.profiler
        assert variant.executor_for(base.target.device) is base.executor_for(base.target.device)
        assert [k.name for k in opened.registry.kernels()] == ["tens"]
        kagent_core.run_op("aten::relu", X, device="cpu")
    assert kagent_core.session_for(config) is base
    assert base.open(base.target.device) is plain
    assert plain.registry.kernels() == ()


def test_closing_a_variant_closes_the_session(fake):
    config = kagent_core.load_config({"device": "fake"})
    session = kagent_core.Session(config, [("fake", FakeDevice())])
    with override("aten::relu", fill_with_thousands, device="fake"):
        variant = session.with_kernels(active_kernels())
        runtime = variant.open(variant.target.device).runtime
        variant.close()
    assert session.open(session.target.device).runtime is runtime  # opened again: a plugin's one runtime object


def test_with_the_block_its_plans_go(fake):
    run = compiled(relu_plus_one, device="fake")
    run(X)
    live = fake.runtime.live
    for function in (fill_with_thousands, lambda x, out: torch.mul(x, 1000, out=out)):
        with override("aten::relu", function, device="fake"):
            assert run(X).tolist() == [-999.0, 2001.0]
            assert fake.runtime.live > live
    gc.collect()
    session = kagent_core.session_for(kagent_core.load_config({"device": "fake"}))
    assert len(session._variants) == 0
    session.close_abandoned()
    assert fake.runtime.live == live


# -- devices


def test_a_kernel_for_one_device_of_a_type(fake):
    with override("aten::relu", fill_with_thousands, device="fake:1"):
        assert relu(device="fake:1") == [-1000.0, 2000.0]
        assert relu(device="fake:0") == [0.0, 2.0]
        assert relu() == [0.0, 2.0]
    with override("aten::relu", fill_with_thousands, device="fake"):
        assert relu(device="fake:1") == [-1000.0, 2000.0]
        assert relu(device="fake:0") == [-1000.0, 2000.0]
    with override("aten::relu", tens, device="cpu:0"):
        assert relu() == [-10.0, 20.0]


def test_a_kernel_outranks_the_plugins_whatever_its_priority():
    strong = KernelDescriptor("aten::relu", "strong", function=fill_with_thousands, priority=1000)
    with kagent_core.use_plugin(FakeDevice(kernels=[strong])):
        assert relu(device="fake") == [-1000.0, 2000.0]
        with override("aten::relu", lambda x, out: out.copy_(-x), device="fake", priority=-1):
            assert relu(device="fake") == [1.0, -2.0]


def test_a_kernel_brings_an_operator_to_a_device_that_lacks_it(fake):
    session = lambda: kagent_core.session_for(kagent_core.load_config({"device": "fake"}))
    run = compiled(lambda x: torch.sin(x), device="fake")
    run(X)
    assert [f.signature for f in session().reports[-1].fallbacks] == ["aten::sin"]
    with override("aten::sin", fill_with_thousands, device="fake"):
        assert run(X).tolist() == [-1000.0, 2000.0]
        assert session().reports[-1].fallbacks == ()


def test_a_kernel_on_the_fallback_device(fake):
    with override("aten::sin", tens, device="cpu"):
        assert compiled(torch.sin, device="fake")(X).tolist() == [-10.0, 20.0]


def test_a_default_kernel_is_told_the_operator(fake, caplog):
    def by_torch(overload, *args):
        *given, out = args
        out.copy_(overload(*given))

    with override("default", by_torch, device="fake", allocates=False), caplog.at_level(logging.WARNING, "kagent"):
        assert compiled(lambda x: torch.relu(torch.cos(x)), device="fake")(X).tolist() == X.cos().relu().tolist()
    [told] = [record.message for record in caplog.records if "default kernel" in record.message]
    assert told.startswith("aten::cos runs with the default kernel 'by_torch' of 'fake'")


# -- how a function is called on the CPU


def split_in_two(x, dim=0):
    return x.amin(dim), x.amax(dim)


def fill_two(x, dim, keepdim=False, *, out0, out1):
    out0.copy_(x.amin(dim))
    out1.fill_(5)


@pytest.mark.parametrize(("function", "allocates"), [(split_in_two, True), (fill_two, False)])
def test_several_results(function, allocates):
    with override("aten::aminmax", function, device="cpu") as registered:
        assert registered.descriptor.allocates == allocates
    x = torch.tensor([[1.0, 4.0], [3.0, 2.0]])
    with override("aten::max.dim", lambda self, dim: (self.amin(dim), self.argmin(dim)), device="cpu"):
        values, indices = kagent_core.run_op("aten::max.dim", x, 0, device="cpu")
        assert (values.tolist(), indices.tolist()) == ([1.0, 2.0], [0, 1])
    with override("aten::max.dim", fill_two, device="cpu"):
        values, indices = kagent_core.run_op("aten::max.dim", x, 0, device="cpu")
        assert (values.tolist(), indices.tolist()) == ([1.0, 2.0], [5, 5])


def test_arguments_are_the_operators_own():
    seen = []

    def add(self, other, *, alpha=1):
        seen.append((type(self), tuple(self.stride()), other.tolist(), alpha))
        return self + alpha * other

    x = torch.arange(6.0).reshape(2, 3).t()
    with override("aten::add.Tensor", add, device="cpu"):
        result = kagent_core.run_op("aten::add.Tensor", x, torch.ones(2), alpha=3, device="cpu")
    assert torch.equal(result, x + 3)
    assert seen == [(torch.Tensor, (1, 3), [1.0, 1.0], 3)]


def test_a_layout_that_a_kernel_does_not_take_leaves_the_call_to_the_plugin():
    x = torch.arange(-3.0, 3.0).reshape(2, 3)
    with override("aten::relu", tens, device="cpu", layout=CONTIGUOUS):
        assert torch.equal(kagent_core.run_op("aten::relu", x, device="cpu"), x * 10)
        assert torch.equal(kagent_core.run_op("aten::relu", x.t(), device="cpu"), x.t().relu())


def test_in_place_operators_have_nothing_to_return():
    def fives(self):
        self.fill_(5)

    x = X.clone()
    with override("aten::relu_", fives, device="cpu") as registered:
        assert not registered.descriptor.allocates
        kagent_core.run_op("aten::relu_", x, device="cpu")
    assert x.tolist() == [5.0, 5.0]


def test_a_function_without_a_signature_returns_its_result():
    with override("aten::relu", torch.neg, device="cpu") as registered:
        assert registered.descriptor.allocates
        assert relu() == [1.0, -2.0]


# -- mistakes


def test_a_source_is_no_function():
    registered = kernel("aten::relu", device="toy", source="kernel void r();", name="r")
    try:
        assert registered.descriptor.source == "kernel void r();"
        assert not registered.descriptor.allocates
        with pytest.raises(TypeError, match=r"'r' for aten::relu on toy, .* is source text"):
            registered()
    finally:
        registered.unregister()


def test_a_prototype_that_names_results_fills_them():
    from kagent_core.specs import Access, Parameter

    for result in (Parameter("out", "float*"), Parameter("y", "Tensor", Access.OUT)):
        parameters = (Parameter("self", "const float*"), result)
        with override("aten::relu", lambda *args: None, device="fake", parameters=parameters) as registered:
            assert not registered.descriptor.allocates


def test_fused_kernels_have_several_signatures():
    both = ("aten::relu", "aten::sigmoid")
    with override(both, lambda x: x, device="cpu") as registered:
        assert registered.descriptor.fuses == both
        assert registered.descriptor.signature == "aten::relu+aten::sigmoid"
        assert registered.descriptor.allocates
        assert relu() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("signature", "fields", "error", "told"),
    [
        ("aten::reluu", {}, SignatureError, "has no operator 'aten::reluu'\n  hint: did you mean 'aten::relu'?"),
        ("aten::add", {}, SignatureError, "there is no overload 'aten::add'"),
        ("aten::relu", {"layouts": {"slef": CONTIGUOUS}}, RegistryError, "the tensor 'slef'"),
        ("aten::relu", {"dtypes": {"float23"}}, RegistryError, "it takes the dtype 'float23'"),
        ("aten::relu", {"device": "CPU!"}, DeviceError, "'CPU!' is not a device name"),
        ("aten::relu", {"function": None}, RegistryError, "the kernel for aten::relu on 'cpu' has neither"),
    ],
)
def test_mistakes_are_told_at_once(signature, fields, error, told):
    given = {"device": "cpu", "function": tens} | fields
    with pytest.raises(error) as caught, override(signature, **given):
        pass
    assert told in str(caught.value)
    if given["function"] is not None:
        with pytest.raises(error):
            kernel(signature, **given)
