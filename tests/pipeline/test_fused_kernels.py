"""Fused kernels from end to end: hand-written ones on the fake device and on the CPU, and those of a code generator."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kagent_core
from kagent_core import hookimpl
from kagent_core.capture.schemas import schema_of
from kagent_core.config import FUSION_RULES
from kagent_core.kernels import override
from kagent_core.specs import Access, FusionGroup, FusionPlan, KernelDescriptor, Parameter, TensorSpec
from kagent_core.testing.fake import FakeDevice, FakeRuntime

from .traced import FAKE, compiled, same, session, traced

RELU, SIGMOID, ADD, MUL, SUM = (
    f"aten::{name}" for name in ("relu", "sigmoid", "add.Tensor", "mul.Tensor", "sum.dim_IntList")
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


# -- kernels, as an author would write them


def fill(function):
    """A kernel that computes what an operator does into its last argument."""

    def kernel(*args, **options):
        args[-1].copy_(function(*args[:-1], **options))

    return kernel


def relu_sigmoid(x, out):
    torch.sigmoid(torch.clamp(x, min=0), out=out)


def mul_sum(x, y, out, *, dim, keepdim=False):
    torch.sum(x * y, dim, keepdim, out=out)


SINGLES = tuple(
    KernelDescriptor(signature, f"one_{function.__name__}", fill(function))
    for signature, function in {
        SIGMOID: torch.sigmoid,
        "aten::tanh": torch.tanh,
        "aten::neg": torch.neg,
        "aten::sub.Tensor": torch.sub,
        SUM: torch.sum,
    }.items()
)
RELU_SIGMOID = KernelDescriptor("", "relu_sigmoid", relu_sigmoid, fuses=(RELU, SIGMOID))
MUL_SUM = KernelDescriptor("", "mul_sum", mul_sum, fuses=(MUL, SUM))


class Keep:
    """Keeps every context that was extracted."""

    def __init__(self):
        self.contexts = []

    @hookimpl(wrapper=True)
    def kagent_assemble(self, ctx):
        tasks = yield
        self.contexts.append(ctx)
        return tasks

    def reasons(self):
        """Signatures of each pair, whether it was fused, and why."""
        return [
            (ctx.request.calls[d.producer].signature, ctx.request.calls[d.consumer].signature, d.fused, d.reason)
            for ctx in self.contexts
            for d in ctx.fusion.decisions
        ]


def run(function, *inputs, kernels=(RELU_SIGMOID, MUL_SUM), plugin=None, **options):
    """Run on the fake device twice, compare with eager, and return what was launched and why."""
    fake, keep = plugin or FakeDevice(kernels=(*SINGLES, *kernels)), Keep()
    expected = function(*inputs)
    with kagent_core.use_plugin(fake), kagent_core.use_plugin(keep):
        compiled_function = compiled(function, **FAKE, **options)
        for _ in range(2):
            same(compiled_function(*inputs), expected)
    launches = fake.runtime.launches
    assert launches[: len(launches) // 2] * 2 == launches
    return launches[: len(launches) // 2], keep


def both(x):
    return torch.sigmoid(torch.relu(x))


# -- by hand, on the fake device


def test_relu_and_sigmoid_are_one_kernel():
    launches, keep = run(both, torch.randn(5, 7))
    assert launches == ["relu_sigmoid"]
    assert keep.reasons() == [(RELU, SIGMOID, True, "pointwise: both loop over [5, 7]; kernel 'relu_sigmoid'")]


def test_the_log_says_what_was_fused_and_what_not(caplog):
    with caplog.at_level(logging.DEBUG, "kagent.extract"):
        run(lambda x: torch.neg(both(x)), torch.randn(5, 7))
    told = [record.getMessage() for record in caplog.records if record.name == "kagent.extract"]
    assert "relu, sigmoid: fused: pointwise: both loop over [5, 7]; kernel 'relu_sigmoid'" in told
    assert "sigmoid, neg: not fused: sigmoid is in kernel 'relu_sigmoid', which ends there" in told
    assert f"relu+sigmoid: looked up {RELU}+{SIGMOID} on fake:0, found 'relu_sigmoid'" in told
    assert "relu+sigmoid: packed self=f32[5, 7], out=f32[5, 7]" in told


def test_mul_and_sum_are_one_kernel():
    launches, keep = run(lambda x, y: (x * y).sum(1), torch.randn(5, 7), torch.randn(5, 7))
    assert launches == ["mul_sum"]
    assert keep.reasons()[0][2:] == (
        True,
        "prologue: each element is made where the loop over [5, 7] along 1 needs it; kernel 'mul_sum'",
    )


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("shapes", [((4, 6), (6,)), ((4, 1), (1, 6)), ((0, 6), (6,)), ((4, 0), (4, 0))])
def test_mul_and_sum_broadcast_and_of_nothing(shapes, keepdim):
    x, y = (torch.randn(shape) for shape in shapes)
    launches, _ = run(lambda x, y: (x * y).sum(1, keepdim), x, y)
    assert launches == ([] if shapes[0][0] == 0 else ["mul_sum"])


def test_a_pair_is_found_inside_a_longer_program():
    launches, _ = run(lambda x: torch.neg(both(torch.neg(x))) * 2.0, torch.randn(4))
    assert launches == ["one_neg", "relu_sigmoid", "one_neg", "fake__mul"]


def test_the_inner_value_has_no_memory():
    def function(x):
        return torch.neg(both(torch.neg(x)))

    x = torch.randn(1000)
    fake = FakeDevice(kernels=(*SINGLES, RELU_SIGMOID))
    with kagent_core.use_plugin(fake):
        graph = traced(lambda x: (function(x),), x, **FAKE)
        same(graph([x]), [function(x)])
        (plan,) = graph.plans()
        fused = plan.tasks[1]
        assert [call.signature for call in fused.calls] == [RELU, SIGMOID]
        assert {span.buffer for span in (*fused.reads, *fused.writes)} == {
            spec.buffer for arg in fused.args for spec in [arg.value]
        }
        (segment,) = [step.segment for step in plan.steps if hasattr(step, "segment")]
        assert fused.calls[0].results[0].buffer not in segment.offsets
        assert len(segment.offsets) == 3  # the two around it, and the result


@pytest.mark.parametrize(
    "function",
    [
        lambda r: (torch.sigmoid(r), r),
        lambda r: torch.sigmoid(r) @ r,
    ],
    ids=["returned", "read by another kernel"],
)
def test_an_inner_value_that_is_needed_outside_is_written(function):
    launches, keep = run(lambda x: function(torch.relu(x)), torch.randn(4, 4))
    assert "fake__relu" in launches
    refused = [
        reason for first, then, fused, reason in keep.reasons() if (first, then) == (RELU, SIGMOID) and not fused
    ]
    assert refused == ["recompute: computing relu again moves 64 bytes, storing its result 64"]


def test_what_two_kernels_need_is_computed_twice_where_that_moves_less():
    relu_tanh = KernelDescriptor("", "relu_tanh", fill(lambda x: torch.tanh(torch.relu(x))), fuses=(RELU, "aten::tanh"))

    def function(x):
        r = torch.relu(x)
        return torch.sigmoid(r), torch.tanh(r)

    launches, keep = run(function, torch.randn(6), kernels=(RELU_SIGMOID, relu_tanh))
    assert launches == ["relu_sigmoid", "relu_tanh"]
    (ctx,) = keep.contexts
    assert [group.recomputed for group in ctx.fusion.groups] == [(), (0,)]
    launches, _ = run(function, torch.randn(6), kernels=(RELU_SIGMOID, relu_tanh), fusion_rules="pointwise")
    assert launches == ["fake__relu", "one_sigmoid", "one_tanh"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fusion_fuel": 0}, "out of fuel: 1 pairs would fuse, config allows 0 (fusion_fuel)"),
        ({"fusion": False}, "fusion is switched off by config (fusion = false)"),
        ({"fusion_rules": ["prologue", "views"]}, "rule 'pointwise' is switched off by config (fusion_rules)"),
    ],
)
def test_config_switches_fusion_off(options, reason):
    launches, keep = run(both, torch.randn(4), **options)
    assert launches == ["fake__relu", "one_sigmoid"]
    assert keep.reasons() == [(RELU, SIGMOID, False, reason)]


def test_fuel_ends_after_so_many_pairs():
    def function(x):
        return both(torch.neg(both(torch.neg(both(x)))))

    for fuel in range(4):
        torch._dynamo.reset()
        launches, _ = run(function, torch.randn(4), fusion_fuel=fuel)
        assert launches.count("relu_sigmoid") == fuel


def test_a_dtype_that_the_fused_kernel_does_not_take_runs_as_single_operators():
    only_f32 = KernelDescriptor("", "relu_sigmoid", relu_sigmoid, fuses=(RELU, SIGMOID), dtypes={"float32"})
    assert run(both, torch.randn(4), kernels=[only_f32])[0] == ["relu_sigmoid"]
    torch._dynamo.reset()
    launches, keep = run(both, torch.randn(4, dtype=torch.float64), kernels=[only_f32])
    assert launches == ["fake__relu", "one_sigmoid"]
    assert keep.reasons()[0][2:] == (False, "kernel 'relu_sigmoid' takes float32, not float64")


def test_a_view_between_the_two_keeps_them_apart():
    launches, keep = run(lambda x: torch.sigmoid(torch.relu(x).t()), torch.randn(4, 6))
    assert launches == ["fake__relu", "one_sigmoid"]
    assert (
        "as a view, f32[6, 4] with strides (1, 6), of which kernel 'relu_sigmoid' knows nothing" in keep.reasons()[0][3]
    )


def test_a_written_input_is_read_before_it_is_written():
    def function(x):
        y = both(x)
        x.mul_(2.0)
        return y + x

    x, mine, keep = torch.randn(6), torch.randn(6), Keep()
    mine.copy_(x)
    fake = FakeDevice(kernels=(*SINGLES, RELU_SIGMOID))
    with kagent_core.use_plugin(fake), kagent_core.use_plugin(keep):
        got = compiled(function, **FAKE)(mine)
    same(got, function(x))
    same(mine, x)
    assert "relu_sigmoid" in fake.runtime.launches


def test_streams_and_delays_leave_fused_results_right():
    def function(x, y):
        a, b = both(x), both(y)
        return (a * b).sum(1), both(a) * b

    for seed in range(5):
        torch._dynamo.reset()
        plugin = FakeDevice(
            kernels=(*SINGLES, RELU_SIGMOID, MUL_SUM), runtime=FakeRuntime(streams=3, delay_ms=2, seed=seed)
        )
        run(function, torch.randn(5, 7), torch.randn(5, 7), plugin=plugin)


# -- which argument is which


SUB = "aten::sub.Tensor"


def named(*names):
    return (*(Parameter(name, "const float*", Access.IN) for name in names), Parameter("out", "float*", Access.OUT))


def test_a_prototype_tells_which_side_comes_from_inside():
    """``relu(x) - y`` and ``y - relu(x)`` are two kernels with the same operators."""
    left = KernelDescriptor(
        "", "left", fill(lambda x, y: torch.relu(x) - y), fuses=(RELU, SUB), parameters=named("self", "other")
    )
    right = KernelDescriptor(
        "", "right", fill(lambda x, y: y - torch.relu(x)), fuses=(RELU, SUB), parameters=named("self", "self1")
    )
    x, y = torch.randn(6), torch.randn(6)
    assert run(lambda x, y: torch.relu(x) - y, x, y, kernels=(left, right))[0] == ["left"]
    assert run(lambda x, y: y - torch.relu(x), x, y, kernels=(left, right))[0] == ["right"]


def test_a_kernel_without_a_prototype_takes_results_as_first_arguments():
    kernel = KernelDescriptor("", "left", fill(lambda x, y: torch.relu(x) - y), fuses=(RELU, SUB))
    x, y = torch.randn(6), torch.randn(6)
    assert run(lambda x, y: torch.relu(x) - y, x, y, kernels=[kernel])[0] == ["left"]
    launches, keep = run(lambda x, y: y - torch.relu(x), x, y, kernels=[kernel])
    assert launches == ["fake__relu", "one_sub"]
    assert "takes each result as the first argument of the next operator" in keep.reasons()[0][3]


def test_scalars_of_two_operators_are_told_apart_by_position():
    """alpha of the first, alpha1 of the second, as C parameters."""
    seen = []

    def kernel(x, y, z, first, then, out):
        seen.append((first, then))
        out.copy_(x + first * y + then * z)

    parameters = (
        *named("self", "other", "other1")[:3],
        Parameter("alpha", "float"),
        Parameter("alpha1", "double"),
        *named()[-1:],
    )
    fused = KernelDescriptor("", "add_add", kernel, fuses=(ADD, ADD), parameters=parameters)
    inputs = [torch.randn(6) for _ in range(3)]
    function = lambda x, y, z: torch.add(torch.add(x, y, alpha=2), z, alpha=3)
    assert run(function, *inputs, kernels=[fused])[0] == ["add_add"]
    assert seen == [(2.0, 3.0)] * 2


# -- by override, on the CPU


@pytest.mark.parametrize("dynamic", [False, None])
def test_an_override_fuses_on_the_cpu(dynamic):
    called = []

    def fused(x, out):
        called.append(tuple(x.shape))
        relu_sigmoid(x, out)

    x = torch.randn(5, 7)
    function = compiled(lambda x: torch.neg(both(torch.neg(x))), device="cpu", dynamic=dynamic)
    same(function(x), torch.neg(both(torch.neg(x))))
    assert called == []
    with override([RELU, SIGMOID], fused, device="cpu"):
        for _ in range(2):
            same(function(x), torch.neg(both(torch.neg(x))))
    assert called == [(5, 7)] * 2
    same(function(x), torch.neg(both(torch.neg(x))))
    assert called == [(5, 7)] * 2


def test_an_override_may_return_its_result():
    called = []

    def fused(x, y, dim, keepdim=False):
        called.append((dim, keepdim))
        return torch.sum(x * y, dim, keepdim)

    x, y = torch.randn(5, 7), torch.randn(5, 7)
    with override([MUL, SUM], fused, device="cpu"):
        same(compiled(lambda x, y: (x * y).sum(1) + 1, device="cpu")(x, y), (x * y).sum(1) + 1)
    assert called == [([1], False)]


def test_a_fused_kernel_that_fails_names_all_its_operators():
    def broken(x, out):
        raise ValueError("no luck")

    with override([RELU, SIGMOID], broken, device="cpu"), pytest.raises(ValueError, match="no luck") as caught:
        compiled(both, device="cpu")(torch.randn(3))
    assert "relu" in str(caught.value)


def test_a_lone_operator_is_not_fused_and_a_process_kernel_is():
    mine = kagent_core.kernel([RELU, SIGMOID], lambda x: torch.sigmoid(torch.relu(x)) + 1, device="cpu")
    try:
        x = torch.randn(4)
        same(kagent_core.run_op(RELU, x, device="cpu"), torch.relu(x))
        same(compiled(both, device="cpu")(x), both(x) + 1)
    finally:
        mine.unregister()


# -- a plugin's own analysis


def test_a_plugins_group_that_no_kernel_takes_falls_apart(caplog):
    class All:
        """Wants everything in one kernel."""

        @hookimpl
        def kagent_analyze_fusion(self, ctx):
            made = {spec.buffer for call in ctx.request.calls[:-1] for spec in call.outputs}
            group = FusionGroup(tuple(call.id for call in ctx.request.calls), inner=tuple(made))
            return FusionPlan((group,), ())

    x = torch.randn(4)
    with kagent_core.use_plugin(All()), caplog.at_level(logging.DEBUG, "kagent.extract"):
        launches, _ = run(lambda x: torch.neg(both(x)), x)
    assert launches == ["fake__relu", "one_sigmoid", "one_neg"]
    with kagent_core.use_plugin(All()):
        assert run(both, x)[0] == ["relu_sigmoid"]


# -- a code generator


class Composer:
    """Makes kernels that compute each call by ATen's own operator, on tensors that never leave the kernel."""

    def __init__(self):
        self.made = []

    def can_generate(self, calls, inner=()):
        return "it knows no tanh" if any(call.signature == "aten::tanh" for call in calls) else None

    def generate(self, calls, group):
        self.made.append(group.signature)
        by_name = {argument.name for argument in schema_of(group.overload).arguments if argument.keyword_only}
        given = [value for name, value in group.arguments.items() if name not in by_name]

        def kernel(*args, **options):
            known = {spec: arg for spec, arg in zip(given, args, strict=False) if isinstance(spec, TensorSpec)}
            made = {}

            def value(v):
                if not isinstance(v, TensorSpec):
                    return v
                if v not in known:
                    base, tensor = made[v.buffer]
                    known[v] = tensor.as_strided(v.shape, v.strides, v.storage_offset - base.storage_offset)
                return known[v]

            for call in calls:
                (spec,) = call.results
                result = call.overload(*(value(v) for v in call.arguments.values()))
                laid_out = torch.empty_strided(spec.shape, spec.strides, dtype=result.dtype).copy_(result)
                known[spec], made[spec.buffer] = laid_out, (spec, laid_out)
            for spec, out in zip(group.results, args[len(given) :], strict=True):
                out.copy_(known[spec])

        return KernelDescriptor(group.signature, f"generated_{len(calls)}", kernel)


class GeneratingDevice(FakeDevice):
    """A fake device with a code generator."""

    def __init__(self, **options):
        super().__init__(**options)
        self.composer = Composer()

    @hookimpl
    def kagent_code_printer(self, info, config):
        return self.composer if info.device.type == "fake" else None


def generating(*kernels, **options):
    return GeneratingDevice(kernels=(*SINGLES, *kernels), **options)


def test_a_chain_becomes_one_generated_kernel():
    launches, _ = run(lambda x: torch.neg(both(torch.neg(x))) * 2.0, torch.randn(4, 6), plugin=generating())
    assert launches == ["generated_5"]


def test_a_generated_kernel_writes_what_the_caller_reads():
    def function(x):
        r = torch.relu(x)
        return torch.sigmoid(r), r

    assert run(function, torch.randn(4, 6), plugin=generating())[0] == ["generated_2"]


def test_a_generated_kernel_reads_through_views():
    def function(x):
        return torch.sigmoid(torch.relu(x).t()) + torch.neg(x.t())

    launches, keep = run(function, torch.randn(4, 6), plugin=generating())
    assert launches == ["generated_4"]
    assert any("which is index arithmetic" in reason for *_, reason in keep.reasons())
    torch._dynamo.reset()
    without = [rule for rule in FUSION_RULES if rule != "views"]
    assert len(run(function, torch.randn(4, 6), plugin=generating(), fusion_rules=without)[0]) == 2


def test_registered_kernels_come_before_generated_ones():
    launches, _ = run(lambda x: torch.neg(both(x)), torch.randn(4), plugin=generating(RELU_SIGMOID))
    assert launches == ["relu_sigmoid", "one_neg"]


def test_what_the_generator_refuses_is_left_out():
    launches, keep = run(lambda x: torch.tanh(torch.neg(both(x))), torch.randn(4), plugin=generating())
    assert launches == ["generated_3", "one_tanh"]
    assert keep.reasons()[-1][3] == "the code generator of fake:0 refuses: it knows no tanh"


def test_a_reduction_with_prologue_and_epilogue_is_one_generated_kernel():
    def normalized(x):
        return x * (x * x).sum(1, keepdim=True)

    assert run(normalized, torch.randn(4, 6), plugin=generating())[0] == ["generated_3"]


CHAINS = [
    *(
        ["relu", "sigmoid"],
        ["neg", "relu", "sigmoid"],
        ["add", "mul"],
        ["mul", "sub"],
        ["mul", "sum"],
        ["relu", "tanh"],
    ),
    *([name] for name in ("relu", "sigmoid", "tanh", "neg", "add", "mul", "sub", "sum", "transpose")),
]


@st.composite
def expressions(draw):
    """Steps of a function of two tensors: each an operator and which of the values so far it takes."""
    steps = []
    for chain in draw(st.lists(st.sampled_from(CHAINS), min_size=1, max_size=4)):
        for number, name in enumerate(chain):
            made = 2 + len(steps)
            source = draw(st.integers(max(0, made - 3), made - 1)) if number == 0 else made - 1
            steps.append((name, source, draw(st.integers(0, made - 1))))
    return steps, draw(st.sets(st.integers(2, 1 + len(steps)), max_size=2))


def evaluate(steps, kept, x, y):
    values = [x, y]
    for name, source, other in steps:
        a, b = values[source], values[other]
        if name in ("add", "mul", "sub"):
            values.append(getattr(torch, name)(a, b))
        elif name == "sum":
            values.append(a.sum(1, keepdim=True).expand(a.shape))
        elif name == "transpose":
            values.append(a.t())
        else:
            values.append(getattr(torch, name)(a))
    return tuple(values[position] for position in sorted({*kept, len(values) - 1}))


FUSED_BY_HAND = tuple(
    KernelDescriptor("", f"hand_{number}", fill(function), fuses=signatures, parameters=parameters)
    for number, (signatures, function, parameters) in enumerate(
        [
            ((RELU, SIGMOID), lambda x: torch.sigmoid(torch.relu(x)), ()),
            (("aten::neg", RELU, SIGMOID), lambda x: torch.sigmoid(torch.relu(-x)), ()),
            ((ADD, MUL), lambda x, y, z: (x + y) * z, ()),
            ((MUL, SUB), lambda x, y, z: z - x * y, named("self", "other", "self1")),
            ((MUL, SUM), lambda x, y, dim, keepdim=False: torch.sum(x * y, dim, keepdim), ()),
            ((RELU, "aten::tanh"), lambda x: torch.tanh(torch.relu(x)), ()),
        ]
    )
)


@settings(max_examples=60, deadline=None)
@given(
    expressions(),
    st.booleans(),
    st.sets(st.sampled_from(FUSED_BY_HAND), max_size=2),
    st.none() | st.integers(0, 4),
    st.integers(1, 3),
)
def test_any_program_gives_what_eager_gives(expression, generate, left_out, fuel, streams):
    steps, kept = expression
    x, y = torch.randn(5, 5), torch.randn(5, 5)
    by_hand = [kernel for kernel in FUSED_BY_HAND if kernel not in left_out]
    runtime = FakeRuntime(streams=streams, delay_ms=0.2)
    device = GeneratingDevice if generate else FakeDevice
    plugin = device(kernels=(*SINGLES, *by_hand), runtime=runtime)
    with kagent_core.use_plugin(plugin):
        graph = traced(lambda x, y: evaluate(steps, kept, x, y), x, y, device="fake:0", fusion_fuel=fuel)
        for _ in range(2):
            for got, want in zip(graph([x, y]), evaluate(steps, kept, x, y), strict=True):
                torch.testing.assert_close(got, want, check_stride=True)
        (plan,) = graph.plans()
        plan.close()
        assert runtime.live == 0
        assert session(device="fake:0", fusion_fuel=fuel).reports[-1].fallbacks == ()
