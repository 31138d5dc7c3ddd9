"""Fusion analysis: the rules one by one, the groups that come of them, and what must hold for every plan."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.config import FUSION_RULES, Config
from kagent_core.device import OpenDevice
from kagent_core.errors import KernelNotFoundError, RegistryError
from kagent_core.extract.fused_call import fused_call
from kagent_core.extract.fusion import FusionChecker, Loops, OperatorClass, class_of, loops_of, neighbours
from kagent_core.extract.fusion.flow import DataFlow
from kagent_core.extract.fusion.groups import Groups
from kagent_core.extract.fusion.lookup import look_up_kernels
from kagent_core.extract.fusion.resources import Estimate, estimate
from kagent_core.extract.fusion.rules import _LOOP_RULES
from kagent_core.extract.packing import CallPacker
from kagent_core.extract.ranges import memory_ranges
from kagent_core.registry import KernelRegistry
from kagent_core.specs import (
    Access,
    DeviceInfo,
    DType,
    FusionDecision,
    FusionGroup,
    FusionPlan,
    KernelDescriptor,
    Parameter,
    TensorSpec,
)
from kagent_core.testing.fake import FakeDeriver, FakeRuntime

from .builders import TOY, call, relu, tensor

INFO = DeviceInfo(TOY, "Toy 3000", max_threads_per_block=256)
RELU, SIGMOID, ADD, MUL, SUM = (
    f"aten::{name}" for name in ("relu", "sigmoid", "add.Tensor", "mul.Tensor", "sum.dim_IntList")
)
SINGLES = (
    RELU,
    SIGMOID,
    ADD,
    MUL,
    SUM,
    "aten::tanh",
    "aten::neg",
    "aten::mm",
    "aten::cat",
    "aten::_softmax",
    "aten::cumsum",
    "aten::copy_",
    "aten::bernoulli",
)


class Generator:
    """A code generator that takes everything, or refuses what the test says."""

    def __init__(self, refuse=lambda calls: None):
        self.refuse = refuse

    def can_generate(self, calls, inner=()):
        return self.refuse(calls)

    def prefers(self, call):
        return False

    def generate(self, calls, group):
        return KernelDescriptor(group.signature, "generated", fuses=tuple(c.signature for c in calls))


def fused(*signatures, name=None, **fields):
    short = "_".join(signature.removeprefix("aten::") for signature in signatures)
    return KernelDescriptor("", name or f"toy_{short}", fuses=signatures, **fields)


def opened(*kernels, printer=None, info=INFO):
    registry = KernelRegistry("toy")
    for signature in SINGLES:
        registry.add(KernelDescriptor(signature, f"toy_{signature}"))
    for kernel in kernels:
        registry.add(kernel)
    registry.freeze()
    return OpenDevice(info, registry, CallPacker(), FakeDeriver(), FakeRuntime(), printer)


def analyze(calls, *kernels, kept=None, config=None, printer=None, info=INFO):
    """Analyze calls of which only the last one's result is read afterwards."""
    kept = {spec.buffer for spec in calls[-1].outputs} if kept is None else kept
    return FusionChecker(config or Config()).analyze(calls, opened(*kernels, printer=printer, info=info), kept)


def groups(plan):
    return [group.calls for group in plan.groups]


def reason(plan, producer, consumer):
    (found,) = [d for d in plan.decisions if (d.producer, d.consumer) == (producer, consumer)]
    return found.fused, found.reason


def unary(number, signature, source, target):
    return call(number, signature, {"self": source}, [target])


def binary(number, signature, left, right, target):
    return call(number, signature, {"self": left, "other": right}, [target])


def total(number, source, target, dim=(1,), keepdim=True):
    return call(number, SUM, {"self": source, "dim": dim, "keepdim": keepdim}, [target])


def chain(*signatures, shape=(4, 6)):
    """Unary calls one after the other: call n reads buffer n and makes buffer n + 1."""
    return [unary(n, s, tensor(n, *shape), tensor(n + 1, *shape)) for n, s in enumerate(signatures)]


# -- operators and their loops


@pytest.mark.parametrize(
    ("signature", "kind"),
    [
        (RELU, OperatorClass.POINTWISE),
        (MUL, OperatorClass.POINTWISE),
        ("aten::_to_copy", OperatorClass.POINTWISE),
        ("aten::clone", OperatorClass.POINTWISE),
        (SUM, OperatorClass.REDUCTION),
        ("aten::amax", OperatorClass.REDUCTION),
        ("aten::cat", OperatorClass.GATHER),
        ("aten::_softmax", OperatorClass.ROWS),
        ("aten::mm", OperatorClass.PARAMETRISED),
        ("aten::cumsum", OperatorClass.OTHER),
    ],
)
def test_operators_are_classed_by_their_exact_signature(signature, kind):
    assert class_of(call(0, signature, {"self": tensor(0, 4)}, [tensor(1, 4)])) is kind


def test_an_operator_that_torch_does_not_know_is_neither():
    one = dataclasses.replace(relu(0, tensor(0, 4), tensor(1, 4)), signature="mylib::fancy", overload=None)
    assert class_of(one) is OperatorClass.OTHER


@pytest.mark.parametrize(("dim", "reduced"), [((-1,), (1,)), ((0, 1), (0, 1)), (0, (0,)), ((), (0, 1)), (None, (0, 1))])
def test_the_loops_of_a_reduction(dim, reduced):
    loops = loops_of(call(0, SUM, {"self": tensor(0, 4, 6), "dim": dim}, [tensor(1, 4)]))
    assert loops == Loops((4, 6), reduced)
    assert loops.kept == tuple(1 if d in reduced else size for d, size in enumerate((4, 6)))


def test_the_loops_of_a_number():
    assert loops_of(call(0, SUM, {"self": tensor(0), "dim": (0,)}, [tensor(1)])) == Loops(())


def test_every_loop_rule_can_be_switched_off():
    assert {rule.name for rule in _LOOP_RULES.values()} < set(FUSION_RULES)


# -- neighbours


def test_the_writer_of_the_bytes_that_are_read_is_the_neighbour():
    first, second = relu(0, tensor(0, 4), tensor(1, 4)), relu(1, tensor(0, 4), tensor(2, 4))
    left = call(2, "aten::copy_", {"self": tensor(1, 2), "src": tensor(2, 2)}, [], written=[tensor(1, 2)])
    reads_left, reads_right = relu(3, tensor(1, 2), tensor(3, 2)), relu(4, tensor(1, 2, offset=2), tensor(4, 2))
    reads_both = relu(5, tensor(1, 4), tensor(5, 4))
    found = list(neighbours([first, second, left, reads_left, reads_right, reads_both]))
    assert found == [(0, 2), (1, 2), (2, 3), (0, 4), (0, 5), (2, 5)]


def test_empty_tensors_have_neighbours_too():
    assert list(neighbours([relu(0, tensor(0, 0), tensor(1, 0)), relu(1, tensor(1, 0), tensor(2, 0))])) == [(0, 1)]


# -- rule 1: pointwise


def test_neighbouring_pointwise_operators_fuse():
    plan = analyze(chain(RELU, SIGMOID), fused(RELU, SIGMOID))
    assert plan.groups == (FusionGroup((0, 1), inner=(1,)),)
    assert reason(plan, 0, 1) == (True, "pointwise: both loop over [4, 6]; kernel 'toy_relu_sigmoid'")


def test_a_smaller_operand_is_broadcast():
    calls = [relu(0, tensor(0, 6), tensor(1, 6)), binary(1, ADD, tensor(1, 6), tensor(2, 4, 6), tensor(3, 4, 6))]
    plan = analyze(calls, fused(RELU, ADD))
    assert reason(plan, 0, 1)[1].startswith("pointwise: [6] is broadcast into the loop over [4, 6]; ")


@pytest.mark.parametrize("rule", ["pointwise", "prologue", "epilogue"])
def test_a_rule_that_is_switched_off_fuses_nothing(rule):
    pairs = {
        "pointwise": chain(RELU, SIGMOID),
        "prologue": [relu(0, tensor(0, 4, 6), tensor(1, 4, 6)), total(1, tensor(1, 4, 6), tensor(2, 4, 1))],
        "epilogue": [total(0, tensor(0, 4, 6), tensor(1, 4, 1)), relu(1, tensor(1, 4, 1), tensor(2, 4, 1))],
    }
    kernel = fused(*(one.signature for one in pairs[rule]))
    on = tuple(name for name in FUSION_RULES if name != rule)
    plan = analyze(pairs[rule], kernel, config=Config(fusion_rules=on))
    assert groups(plan) == [(0,), (1,)]
    assert reason(plan, 0, 1) == (False, f"rule '{rule}' is switched off by config (fusion_rules)")
    only_this = analyze(pairs[rule], kernel, config=Config(fusion_rules=(rule,)))
    assert groups(only_this) == [(0, 1)]
    assert reason(only_this, 0, 1)[1].startswith(f"{rule}: ")


def test_what_is_neither_pointwise_nor_a_reduction_does_not_fuse():
    scan = call(1, "aten::cumsum", {"self": tensor(1, 4, 4), "dim": 0}, [tensor(2, 4, 4)])
    plan = analyze([relu(0, tensor(0, 4, 4), tensor(1, 4, 4)), scan], printer=Generator())
    assert reason(plan, 0, 1) == (False, "no fusion rule takes aten::cumsum: it is neither pointwise nor a reduction")


def test_nothing_goes_into_a_parametrised_kernel_but_what_follows_it_does():
    given = {"self": tensor(7, 4), "mat1": tensor(1, 4, 4), "mat2": tensor(8, 4, 4)}
    product = call(1, "aten::addmm", given, [tensor(2, 4, 4)])
    calls = [
        relu(0, tensor(0, 4, 4), tensor(1, 4, 4)),
        product,
        relu(2, tensor(2, 4, 4), tensor(3, 4, 4)),
        unary(3, SIGMOID, tensor(3, 4, 4, strides=(1, 4)), tensor(4, 4, 4)),
    ]
    plan = analyze(calls, printer=Generator())
    assert groups(plan) == [(0,), (1, 2, 3)]
    assert reason(plan, 0, 1) == (False, "no fusion rule takes a pointwise operator into a parametrised kernel")
    assert groups(analyze(calls, KernelDescriptor("aten::addmm", "better"), printer=Generator())) == [
        (0,),
        (1,),
        (2, 3),
    ]
    told = "epilogue: it is computed where op_1 stores its result; a generated kernel"
    assert reason(plan, 1, 2) == (True, told)
    calls[2] = relu(2, tensor(2, 4, 4, strides=(1, 4)), tensor(3, 4, 4))
    told = "epilogue: op_2 does not compute one element from each of op_1"
    assert reason(analyze(calls, printer=Generator()), 1, 2) == (False, told)


# -- gathers and operators on rows


def cat(number, one, other, target, dim=0):
    return call(number, "aten::cat", {"tensors": (one, other), "dim": dim}, [target])


def test_what_a_gather_reads_is_computed_where_it_reads_it():
    calls = [
        relu(0, tensor(0, 4, 6), tensor(1, 4, 6)),
        cat(1, tensor(1, 4, 6), tensor(7, 4, 6), tensor(2, 8, 6)),
        relu(2, tensor(2, 8, 6), tensor(3, 8, 6)),
    ]
    plan = analyze(calls, printer=Generator())
    assert groups(plan) == [(0, 1, 2)]
    told = "pointwise: each element is made where the loop over [8, 6] needs it; a generated kernel"
    assert reason(plan, 0, 1) == (True, told)
    calls[1] = cat(1, tensor(1, 4, 6), tensor(7, 8, 6), tensor(2, 12, 6))
    told = "pointwise: op_1 would compute the 24 elements of f32[4, 6] 72 times"
    assert reason(analyze(calls[:2], printer=Generator()), 0, 1) == (False, told)


@pytest.mark.parametrize(
    ("signature", "arguments", "made", "reads"),
    [
        ("aten::max_pool2d", {"kernel_size": (2, 2)}, (1, 4, 3, 3), 36),
        ("aten::max_pool2d", {"kernel_size": (2,), "stride": (1, 1), "padding": (1, 1)}, (1, 4, 7, 7), 784),
        ("aten::avg_pool2d", {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1)}, (1, 4, 6, 6), 1296),
        ("aten::_adaptive_avg_pool2d", {"output_size": (1, 1)}, (1, 4, 1, 1), 144),
        ("aten::_adaptive_avg_pool2d", {"output_size": (5, 5)}, (1, 4, 5, 5), 400),
        ("aten::_adaptive_avg_pool2d", {"output_size": (0, 3)}, (1, 4, 0, 3), 0),
    ],
)
def test_a_window_that_is_read_again_and_again_is_not_computed_each_time(signature, arguments, made, reads):
    image, positive = tensor(0, 1, 4, 6, 6), tensor(1, 1, 4, 6, 6)
    calls = [relu(0, image, positive), call(1, signature, {"self": positive, **arguments}, [tensor(2, *made)])]
    fused, told = reason(analyze(calls, printer=Generator()), 0, 1)
    assert fused == (reads <= 2 * image.numel), told
    assert fused or told == f"pointwise: op_1 would compute the 144 elements of f32[1, 4, 6, 6] {reads} times"


def rows_of(number, source, target):
    return call(number, "aten::_softmax", {"self": source, "dim": -1, "half_to_float": False}, [target])


def test_pointwise_operators_go_before_and_after_an_operator_on_rows():
    calls = [
        relu(0, tensor(0, 4, 6), tensor(1, 4, 6)),
        rows_of(1, tensor(1, 4, 6), tensor(2, 4, 6)),
        relu(2, tensor(2, 4, 6), tensor(3, 4, 6)),
    ]
    plan = analyze(calls, printer=Generator())
    assert groups(plan) == [(0, 1, 2)]
    assert reason(plan, 0, 1)[1].startswith(
        "prologue: each element is made where the loop over [4, 6] along 1 needs it"
    )
    assert reason(plan, 1, 2)[1].startswith("epilogue: both loop over [4, 6] along 1")


def test_an_operator_on_rows_is_not_computed_at_other_places_than_its_rows():
    calls = [rows_of(0, tensor(0, 4, 6), tensor(1, 4, 6)), relu(1, tensor(1, 2, 6), tensor(2, 2, 6))]
    told = "epilogue: op_1 reads 12 of the 24 elements of f32[4, 6]"
    assert reason(analyze(calls, printer=Generator()), 0, 1) == (False, told)
    calls = [rows_of(0, tensor(0, 4, 6), tensor(1, 4, 6)), rows_of(1, tensor(1, 4, 6), tensor(2, 4, 6))]
    told = "no fusion rule takes an operator on rows into an operator on rows"
    assert reason(analyze(calls, printer=Generator()), 0, 1) == (False, told)
    calls = [rows_of(0, tensor(0, 4, 6), tensor(1, 4, 6)), cat(1, tensor(1, 4, 6), tensor(7, 4, 6), tensor(2, 8, 6))]
    told = "no fusion rule takes an operator on rows into a gather"
    assert reason(analyze(calls, printer=Generator()), 0, 1) == (False, told)


# -- rule 2: reductions


def test_a_pointwise_operator_goes_into_a_reduction():
    calls = [
        binary(0, MUL, tensor(0, 4, 6), tensor(1, 4, 6), tensor(2, 4, 6)),
        total(1, tensor(2, 4, 6), tensor(3, 4, 1)),
    ]
    plan = analyze(calls, fused(MUL, SUM))
    assert groups(plan) == [(0, 1)]
    told = "prologue: each element is made where the loop over [4, 6] along 1 needs it"
    assert reason(plan, 0, 1) == (True, f"{told}; kernel 'toy_mul.Tensor_sum.dim_IntList'")


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (relu(1, tensor(1, 4, 1), tensor(2, 4, 1)), "it works on what the loop over [4, 6] along 1 leaves"),
        (
            binary(1, ADD, tensor(0, 4, 6), tensor(1, 4, 1), tensor(2, 4, 6)),
            "it goes over the rows of the loop over [4, 6] along 1 again",
        ),
    ],
)
def test_a_reduction_has_a_pointwise_epilogue(after, told):
    plan = analyze([total(0, tensor(0, 4, 6), tensor(1, 4, 1)), after], printer=Generator())
    assert groups(plan) == [(0, 1)]
    assert reason(plan, 0, 1)[1].startswith(f"epilogue: {told}")


@pytest.mark.parametrize("shape", [(3, 4, 6), (4, 3)])
def test_an_epilogue_in_another_loop_is_refused(shape):
    calls = [
        total(0, tensor(0, 4, 6), tensor(1, 4, 1)),
        binary(1, ADD, tensor(2, *shape), tensor(1, 4, 1), tensor(3, *shape)),
    ]
    plan = analyze(calls, printer=Generator())
    assert reason(plan, 0, 1) == (
        False,
        f"epilogue: the loop over [4, 6] along 1 and the one over {list(shape)} do not agree",
    )


def test_a_sum_along_rows_is_not_spread_along_columns():
    sums = tensor(1, 6)
    calls = [total(0, tensor(0, 6, 6), sums, keepdim=False), binary(1, ADD, tensor(0, 6, 6), sums, tensor(2, 6, 6))]
    assert not reason(analyze(calls, printer=Generator()), 0, 1)[0]


def test_a_reduction_does_not_go_into_a_reduction():
    calls = [total(0, tensor(0, 4, 6), tensor(1, 4, 1)), total(1, tensor(1, 4, 1), tensor(2, 1, 1), dim=(0,))]
    assert reason(analyze(calls, printer=Generator()), 0, 1) == (
        False,
        "no fusion rule takes a reduction into a reduction",
    )


def softmax():
    """As ATen's decomposition has it, on the rows of a 4 x 6 matrix."""
    full, rows = (lambda b: tensor(b, 4, 6)), (lambda b: tensor(b, 4, 1))
    return [
        call(0, "aten::amax", {"self": full(0), "dim": (-1,), "keepdim": True}, [rows(1)]),
        binary(1, "aten::sub.Tensor", full(0), rows(1), full(2)),
        unary(2, "aten::exp", full(2), full(3)),
        total(3, full(3), rows(4)),
        binary(4, "aten::div.Tensor", full(3), rows(4), full(5)),
    ]


def test_softmax_becomes_one_generated_kernel():
    plan = analyze(softmax(), printer=Generator())
    assert plan.groups == (FusionGroup((0, 1, 2, 3, 4), inner=(1, 2, 3, 4)),)
    assert [d.fused for d in plan.decisions] == [True] * 5


def test_reductions_along_other_dimensions_stay_apart():
    calls = softmax()
    calls[3] = total(3, tensor(3, 4, 6), tensor(4, 1, 6), dim=(0,))
    calls[4] = binary(4, "aten::div.Tensor", tensor(3, 4, 6), tensor(4, 1, 6), tensor(5, 4, 6))
    plan = analyze(calls, printer=Generator())
    told = "the loop of op_0 over [4, 6] along 1 and that of op_3 over [4, 6] along 0 do not agree"
    assert reason(plan, 2, 3) == (False, told)
    assert groups(plan) == [(0, 1, 2), (3, 4)]


# -- rule 3: resources


def test_a_kernel_that_needs_too_many_parameters_is_not_made():
    calls = [relu(0, tensor(0, 4), tensor(1, 4))]
    calls += [binary(n, ADD, tensor(2 * n - 1, 4), tensor(2 * n, 4), tensor(2 * n + 1, 4)) for n in range(1, 6)]
    plan = analyze(calls, printer=Generator(), info=dataclasses.replace(INFO, max_parameters=5))
    assert groups(plan) == [(0, 1, 2, 3), (4, 5)]
    assert reason(plan, 3, 4) == (False, "resources: one kernel would need 6 parameters, toy:0 has 5")
    unchecked = Config(fusion_rules=("pointwise",))
    without = analyze(calls, printer=Generator(), info=dataclasses.replace(INFO, max_parameters=5), config=unchecked)
    assert len(without.groups) == 1


def test_registers_and_shared_memory_are_estimated():
    few = dataclasses.replace(INFO, max_registers=10)
    plan = analyze(chain(RELU, SIGMOID), printer=Generator(), info=few)
    assert reason(plan, 0, 1) == (False, "resources: one kernel would need 22 registers, toy:0 has 10")
    calls = [relu(0, tensor(0, 4, 6), tensor(1, 4, 6)), total(1, tensor(1, 4, 6), tensor(2, 4, 1))]
    plan = analyze(calls, printer=Generator(), info=dataclasses.replace(INFO, shared_nbytes=512))
    assert reason(plan, 0, 1) == (False, "resources: one kernel would need 2048 bytes of shared memory, toy:0 has 512")


def test_estimates_count_what_is_alive_at_once():
    double = DType("float64", 8)
    x, y, z = (tensor(b, 4, dtype=double) for b in range(3))
    calls = [relu(0, x, y), binary(1, ADD, y, x, z)]
    assert estimate(calls, inner={1}, info=INFO) == Estimate(parameters=2, registers=16 + 2 * 2 + 6, shared_nbytes=0)
    assert estimate(calls, inner=(), info=INFO).parameters == 3


def test_a_limit_of_a_registered_kernel_is_its_number_of_arguments():
    calls = [relu(0, tensor(0, 4), tensor(1, 4)), binary(1, ADD, tensor(1, 4), tensor(2, 4), tensor(3, 4))]
    small = dataclasses.replace(INFO, max_parameters=2, max_registers=1)
    plan = analyze(calls, fused(RELU, ADD), info=small)
    assert reason(plan, 0, 1) == (False, "resources: one kernel would need 3 parameters, toy:0 has 2")
    assert groups(analyze(calls, fused(RELU, ADD), info=small, config=Config(fusion_rules=("pointwise",)))) == [(0, 1)]


# -- rule 4: views


def transposed():
    return [
        relu(0, tensor(0, 4, 6), tensor(1, 4, 6)),
        unary(1, SIGMOID, tensor(1, 6, 4, strides=(1, 6)), tensor(2, 6, 4)),
    ]


def test_a_view_is_index_arithmetic_in_a_generated_kernel():
    plan = analyze(transposed(), printer=Generator())
    assert groups(plan) == [(0, 1)]
    told = "op_1 reads f32[4, 6] as a view, f32[6, 4] with strides (1, 6), which is index arithmetic"
    assert reason(plan, 0, 1) == (True, f"pointwise: both loop over [6, 4]; {told}; a generated kernel")


def test_a_registered_kernel_knows_nothing_of_a_view():
    plan = analyze(transposed(), fused(RELU, SIGMOID))
    assert groups(plan) == [(0,), (1,)]
    told = "op_1 reads f32[4, 6] as a view, f32[6, 4] with strides (1, 6), of which kernel"
    assert reason(plan, 0, 1) == (False, f"{told} 'toy_relu_sigmoid' knows nothing")


def test_views_can_be_switched_off():
    plan = analyze(transposed(), printer=Generator(), config=Config(fusion_rules=("pointwise",)))
    assert groups(plan) == [(0,), (1,)]
    assert reason(plan, 0, 1)[1].endswith("and rule 'views' is switched off by config (fusion_rules)")


def test_only_what_a_slice_reads_is_computed():
    calls = [relu(0, tensor(0, 4, 6), tensor(1, 4, 6)), unary(1, SIGMOID, tensor(1, 2, 6, offset=6), tensor(2, 2, 6))]
    plan = analyze(calls, printer=Generator())
    told = "pointwise: op_1 reads 12 of the 24 elements of f32[4, 6]; op_1 reads f32[4, 6] as a view, f32[2, 6] with "
    assert reason(plan, 0, 1) == (True, f"{told}strides (6, 1), which is index arithmetic; a generated kernel")
    told = "op_1, whose result is read outside, does not make one element per step of [4, 6]"
    assert reason(analyze(calls, printer=Generator(), kept={1, 2}), 0, 1) == (False, told)


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (tensor(1, 8, dtype=DType("int16", 2)), "op_1 reads the bytes of f32[4] as int16"),
        (tensor(1, 4, conj=True), "op_1 reads f32[4] lazily conjugated or negated"),
    ],
)
def test_reading_the_bytes_otherwise_is_no_index_arithmetic(read, told):
    calls = [relu(0, tensor(0, 4), tensor(1, 4)), unary(1, SIGMOID, read, tensor(2, *read.shape, dtype=read.dtype))]
    assert reason(analyze(calls, printer=Generator()), 0, 1) == (False, told)


# -- rule 5: values with many readers


def two_readers(first=SIGMOID, then="aten::tanh", dtype=None):
    source = tensor(0, 4, 6, dtype=dtype or DType("float32", 4))
    return [
        relu(0, source, tensor(1, 4, 6)),
        unary(1, first, tensor(1, 4, 6), tensor(2, 4, 6)),
        unary(2, then, tensor(1, 4, 6), tensor(3, 4, 6)),
    ]


def test_a_value_is_recomputed_where_all_its_readers_can_and_that_moves_fewer_bytes():
    plan = analyze(two_readers(), fused(RELU, SIGMOID), fused(RELU, "aten::tanh"), kept={2, 3})
    assert plan.groups == (FusionGroup((0, 1), inner=(1,)), FusionGroup((2,), recomputed=(0,), inner=(1,)))
    told = "recompute: computing op_0 again moves 192 bytes, storing its result 384"
    assert reason(plan, 0, 1) == (True, f"pointwise: both loop over [4, 6]; kernel 'toy_relu_sigmoid'; {told}")
    assert reason(plan, 0, 2) == (True, f"pointwise: both loop over [4, 6]; kernel 'toy_relu_tanh'; {told}")


def test_a_value_that_is_in_memory_anyway_is_not_recomputed_for_the_same_bytes():
    plan = analyze(two_readers(), fused(RELU, SIGMOID), kept={2, 3})
    assert groups(plan) == [(0,), (1,), (2,)]
    assert reason(plan, 0, 1) == (False, "recompute: computing op_0 again moves 96 bytes, storing its result 96")


def test_a_value_that_is_in_memory_anyway_is_recomputed_from_something_smaller():
    plan = analyze(two_readers(dtype=DType("float16", 2)), fused(RELU, SIGMOID), kept={2, 3})
    assert plan.groups == (FusionGroup((0,)), FusionGroup((1,), recomputed=(0,), inner=(1,)), FusionGroup((2,)))
    told = "recompute: computing op_0 again moves 48 bytes, storing its result 96"
    assert reason(plan, 0, 1)[1].endswith(told)


def test_recomputing_can_be_switched_off():
    config = Config(fusion_rules=tuple(rule for rule in FUSION_RULES if rule != "recompute"))
    plan = analyze(two_readers(), fused(RELU, SIGMOID), fused(RELU, "aten::tanh"), kept={2, 3}, config=config)
    assert groups(plan) == [(0,), (1,), (2,)]
    assert reason(plan, 0, 1) == (False, "rule 'recompute' is switched off by config (fusion_rules)")


def test_what_is_overwritten_is_not_read_again():
    calls = two_readers()
    write = call(3, "aten::copy_", {"self": tensor(0, 4, 6), "src": tensor(2, 4, 6)}, [], written=[tensor(0, 4, 6)])
    plan = analyze([*calls, write], fused(RELU, SIGMOID), fused(RELU, "aten::tanh"), kept={2, 3})
    assert groups(plan) == [(0,), (1,), (2,), (3,)]
    assert reason(plan, 0, 1) == (False, "op_0 cannot be computed again: op_3 overwrites what it reads")


def test_a_generated_kernel_writes_what_others_read():
    plan = analyze(chain(RELU, SIGMOID), printer=Generator(), kept={1, 2})
    assert plan.groups == (FusionGroup((0, 1)),)
    assert reason(plan, 0, 1)[1].endswith("a generated kernel, which also writes what others read")


def test_a_registered_kernel_does_not_write_what_the_caller_reads():
    plan = analyze(chain(RELU, SIGMOID), fused(RELU, SIGMOID), kept={1, 2})
    assert groups(plan) == [(0,), (1,)]
    assert reason(plan, 0, 1) == (False, "recompute: computing op_0 again moves 96 bytes, storing its result 96")


def test_a_registered_kernel_does_not_write_what_another_call_reads():
    calls = [
        *chain(RELU, SIGMOID),
        call(2, "aten::mm", {"self": tensor(1, 4, 6), "mat2": tensor(3, 6, 4)}, [tensor(4, 4, 4)]),
    ]
    plan = analyze(calls, fused(RELU, SIGMOID, "aten::neg"), kept={2, 4})
    assert reason(plan, 0, 1) == (
        False,
        "no kernel of toy:0 fuses aten::relu with aten::sigmoid and just what is around the two",
    )
    calls[1:1] = []
    longer = [*calls, unary(3, "aten::neg", tensor(2, 4, 6), tensor(5, 4, 6))]
    plan = analyze(longer, fused(RELU, SIGMOID, "aten::neg"), kept={4, 5})
    assert not plan.decisions[0].fused
    assert len(plan.groups) == 4


def test_when_it_is_not_known_what_is_read_later_everything_may_be():
    plan = FusionChecker(Config()).analyze(chain(RELU, SIGMOID), opened(fused(RELU, SIGMOID)))
    assert groups(plan) == [(0,), (1,)]


def test_a_broadcast_value_that_others_read_is_not_made_again_for_every_row():
    calls = [relu(0, tensor(0, 6), tensor(1, 6)), binary(1, ADD, tensor(1, 6), tensor(2, 4, 6), tensor(3, 4, 6))]
    assert groups(analyze(calls, printer=Generator())) == [(0, 1)]
    plan = analyze(calls, printer=Generator(), kept={1, 3})
    told = "op_0, whose result is read outside, does not make one element per step of [4, 6]"
    assert reason(plan, 0, 1) == (False, told)


# -- what keeps results right


def test_random_numbers_keep_their_order():
    draw = call(0, "aten::bernoulli", {"self": tensor(0, 4)}, [tensor(1, 4)], random=True)
    plan = analyze([draw, relu(1, tensor(1, 4), tensor(2, 4))], printer=Generator())
    assert reason(plan, 0, 1) == (False, "op_0 draws random numbers, whose order must stay")


def test_effects_and_writes_in_place_do_not_fuse():
    made = relu(0, tensor(0, 4), tensor(1, 4))
    check = call(1, "aten::_assert_async", {"self": tensor(1, 4)})
    write = call(2, "aten::copy_", {"self": tensor(0, 4), "src": tensor(1, 4)}, [], written=[tensor(0, 4)])
    plan = analyze([made, check, write], printer=Generator())
    assert reason(plan, 0, 1) == (False, "op_1 has an effect on the world outside and no result")
    assert reason(plan, 0, 2) == (False, "op_2 writes an argument in place")


def test_a_write_between_two_calls_keeps_them_apart():
    part = tensor(1, 2)
    write = call(1, "aten::copy_", {"self": part, "src": tensor(0, 2)}, [part], written=[part])
    calls = [relu(0, tensor(0, 4), tensor(1, 4)), write, unary(2, SIGMOID, tensor(1, 4), tensor(2, 4))]
    plan = analyze(calls, printer=Generator())
    assert reason(plan, 0, 2) == (False, "op_2 reads what op_1 wrote, too")
    assert groups(plan) == [(0,), (1,), (2,)]


def detour():
    """0 makes b1; 1, which no rule takes, makes b2 of it; 2 takes both."""
    scan = call(1, "aten::cumsum", {"self": tensor(1, 4, 4), "dim": 0}, [tensor(2, 4, 4)])
    return [
        relu(0, tensor(0, 4, 4), tensor(1, 4, 4)),
        scan,
        binary(2, ADD, tensor(1, 4, 4), tensor(2, 4, 4), tensor(3, 4, 4)),
    ]


def test_no_way_leads_out_of_a_group_and_back_in():
    plan = analyze(detour(), printer=Generator())
    assert reason(plan, 0, 2) == (False, "op_1 comes between them")
    assert groups(plan) == [(0,), (1,), (2,)]
    assert groups(analyze(detour(), fused(RELU, ADD))) == [(0,), (1,), (2,)]


def test_a_write_to_what_a_member_reads_may_lie_on_the_way_back():
    """1 overwrites what 0 reads, and 2 needs what 1 wrote: 0 and 2 in one kernel would be before and after 1."""
    x = tensor(0, 4)
    write = call(1, "aten::copy_", {"self": x, "src": tensor(9, 4)}, [x], written=[x])
    calls = [relu(0, x, tensor(1, 4)), write, binary(2, ADD, tensor(1, 4), x, tensor(2, 4))]
    for kwargs in ({"printer": Generator()}, {}):
        plan = analyze(calls, *([] if kwargs else [fused(RELU, ADD)]), **kwargs)
        assert reason(plan, 0, 2) == (False, "op_1 comes between them")


def test_groups_do_not_wait_for_each_other():
    """0-3 and 1-2 may each be a group, but not both: each would need the other's first call and give to its second."""
    calls = [
        relu(0, tensor(0, 4, 4), tensor(1, 4, 4)),
        relu(1, tensor(0, 4, 4), tensor(2, 4, 4)),
        call(2, "aten::mm", {"self": tensor(1, 4, 4), "mat2": tensor(2, 4, 4)}, [tensor(3, 4, 4)]),
        binary(3, ADD, tensor(1, 4, 4), tensor(3, 4, 4), tensor(4, 4, 4)),
    ]
    flow = DataFlow(calls, kept={4})
    made = Groups(flow)
    assert made.way_back((0, 3)) == 2
    assert made.way_back((0, 1)) is None
    made.merge((0, 1))
    assert made.way_back((1, 3)) == 2
    assert list(made.in_order()) == [(0, 1), (2,), (3,)]
    copied = made.copy()
    copied.merge((2, 3))
    assert list(made.in_order()) == [(0, 1), (2,), (3,)]
    assert list(copied.in_order()) == [(0, 1), (2, 3)]


# -- registered kernels


def test_a_registered_pair_is_found_inside_a_longer_chain():
    calls = chain("aten::neg", RELU, SIGMOID, "aten::neg")
    plan = analyze(calls, fused(RELU, SIGMOID))
    assert groups(plan) == [(0,), (1, 2), (3,)]
    assert reason(plan, 0, 1) == (False, "op_1 is in kernel 'toy_relu_sigmoid', which ends there")
    assert reason(plan, 2, 3) == (False, "op_2 is in kernel 'toy_relu_sigmoid', which ends there")


def test_the_longest_registered_kernel_wins():
    kernels = fused(RELU, SIGMOID), fused(SIGMOID, "aten::neg"), fused(RELU, SIGMOID, "aten::neg")
    assert groups(analyze(chain(RELU, SIGMOID, "aten::neg"), *kernels)) == [(0, 1, 2)]


def test_without_any_kernel_the_reason_says_so():
    plan = analyze(chain(RELU, SIGMOID))
    told = "no kernel of toy:0 fuses aten::relu with aten::sigmoid, and toy:0 has no code generator to make one"
    assert reason(plan, 0, 1) == (False, told)


def test_a_dtype_that_the_fused_kernel_does_not_take_leaves_single_operators():
    plan = analyze(chain(RELU, SIGMOID), fused(RELU, SIGMOID, dtypes={"float64"}))
    assert groups(plan) == [(0,), (1,)]
    assert reason(plan, 0, 1) == (False, "kernel 'toy_relu_sigmoid' takes float64, not float32")


def test_a_group_of_two_branches_that_is_refused_is_looked_at_once():
    calls = [
        relu(0, tensor(0, 4), tensor(2, 4)),
        unary(1, SIGMOID, tensor(1, 4), tensor(3, 4)),
        binary(2, ADD, tensor(2, 4), tensor(3, 4), tensor(4, 4)),
    ]
    plan = analyze(calls, fused(RELU, SIGMOID, ADD, dtypes={"float64"}))
    assert {d.reason for d in plan.decisions} == {"kernel 'toy_relu_sigmoid_add.Tensor' takes float64, not float32"}


def test_operators_come_in_the_programs_order():
    calls = [
        relu(0, tensor(0, 4), tensor(2, 4)),
        unary(1, SIGMOID, tensor(1, 4), tensor(3, 4)),
        binary(2, ADD, tensor(2, 4), tensor(3, 4), tensor(4, 4)),
    ]
    by_name = [Parameter(name, "const float*", Access.IN) for name in ("self", "self1")]
    parameters = (*by_name, Parameter("out", "float*", Access.OUT))
    assert groups(analyze(calls, fused(RELU, SIGMOID, ADD, parameters=parameters))) == [(0, 1, 2)]
    assert groups(analyze(calls, fused(SIGMOID, RELU, ADD, parameters=parameters))) == [(0,), (1,), (2,)]


def test_kernels_that_tie_are_an_error():
    with pytest.raises(RegistryError, match="2 kernels of 'toy' with priority 0 accept"):
        analyze(chain(RELU, SIGMOID), fused(RELU, SIGMOID, name="a"), fused(RELU, SIGMOID, name="b"))


def test_an_inner_value_that_meets_itself_again_stays_inside():
    """x * sigmoid(x) of a relu: the relu has two readers, and both are inside."""
    calls = [
        relu(0, tensor(0, 4), tensor(1, 4)),
        unary(1, SIGMOID, tensor(1, 4), tensor(2, 4)),
        binary(2, MUL, tensor(1, 4), tensor(2, 4), tensor(3, 4)),
    ]
    by_name = (Parameter("self", "const float*", Access.IN), Parameter("out", "float*", Access.OUT))
    plan = analyze(calls, fused(RELU, SIGMOID, MUL, parameters=by_name))
    assert plan.groups == (FusionGroup((0, 1, 2), inner=(1, 2)),)


@pytest.mark.parametrize("sides", [("self", "other"), ("other", "self")])
def test_a_kernel_without_parameters_takes_results_as_first_arguments_only(sides):
    made, given = sides
    arguments = {made: tensor(1, 4), given: tensor(2, 4)}
    ordered = {name: arguments[name] for name in ("self", "other")}
    calls = [relu(0, tensor(0, 4), tensor(1, 4)), call(1, "aten::sub.Tensor", ordered, [tensor(3, 4)])]
    plan = analyze(calls, fused(RELU, "aten::sub.Tensor"))
    assert plan.decisions[0].fused is (made == "self")
    if made == "other":
        assert (
            "takes each result as the first argument of the next operator, and nowhere else" in plan.decisions[0].reason
        )


def test_a_kernel_without_parameters_takes_a_result_once():
    calls = [relu(0, tensor(0, 4), tensor(1, 4)), binary(1, ADD, tensor(1, 4), tensor(1, 4), tensor(2, 4))]
    assert not analyze(calls, fused(RELU, ADD)).decisions[0].fused


def test_a_pair_that_no_rule_takes_keeps_the_whole_match_apart():
    """0 and 1 may fuse, 1 and 2 may, but 2 reads a slice of 0."""
    calls = [
        relu(0, tensor(0, 4, 6), tensor(1, 4, 6)),
        total(1, tensor(1, 4, 6), tensor(2, 4, 1)),
        binary(2, ADD, tensor(1, 2, 6), tensor(2, 2, 1), tensor(3, 2, 6)),
    ]
    plan = analyze(calls, fused(RELU, SUM, ADD), printer=Generator())
    assert not reason(plan, 0, 2)[0]
    assert groups(plan) == [(0, 1), (2,)]


def test_a_match_with_a_pair_that_no_rule_takes_is_refused():
    """2 reads all of 1, but one row of 0: the registered kernel would have to know."""
    calls = [
        relu(0, tensor(0, 4, 4), tensor(1, 4, 4)),
        unary(1, SIGMOID, tensor(1, 4, 4), tensor(2, 4, 4)),
        binary(2, ADD, tensor(2, 4, 4), tensor(1, 1, 4), tensor(3, 4, 4)),
    ]
    plan = analyze(calls, fused(RELU, SIGMOID, ADD))
    assert groups(plan) == [(0,), (1,), (2,)]
    assert "of which kernel 'toy_relu_sigmoid_add.Tensor' knows nothing" in reason(plan, 1, 2)[1]


def test_a_kernel_that_recomputes_must_not_wait_for_itself():
    """4 reads what 3 wrote over what 2 read: 2 and 4 in one kernel would be before and after 3."""
    y = tensor(9, 4, 6)
    calls = [
        *two_readers("aten::tanh", "aten::neg")[:2],
        binary(2, ADD, tensor(1, 4, 6), y, tensor(3, 4, 6)),
        call(3, "aten::copy_", {"self": y, "src": tensor(8, 4, 6)}, [y], written=[y]),
        binary(4, MUL, tensor(3, 4, 6), y, tensor(4, 4, 6)),
    ]
    plan = analyze(calls, fused(RELU, "aten::tanh"), fused(RELU, ADD, MUL), kept={2, 4})
    assert groups(plan) == [(0,), (1,), (2,), (3,), (4,)]
    assert reason(plan, 0, 1) == (False, "op_3 comes between them")


# -- the code generator


def test_a_registered_kernel_outranks_a_generated_one():
    plan = analyze(chain("aten::neg", RELU, SIGMOID), fused(RELU, SIGMOID), printer=Generator())
    assert groups(plan) == [(0,), (1, 2)]


def test_the_code_generator_may_refuse():
    plan = analyze(chain(RELU, SIGMOID), printer=Generator(lambda calls: f"not {len(calls)} at once"))
    assert groups(plan) == [(0,), (1,)]
    assert reason(plan, 0, 1) == (False, "the code generator of toy:0 refuses: not 2 at once")


def test_a_pair_that_is_refused_keeps_its_calls_out_of_one_generated_kernel():
    calls = [
        relu(0, tensor(0, 4), tensor(1, 4)),
        unary(1, SIGMOID, tensor(1, 4), tensor(2, 4)),
        binary(2, ADD, tensor(1, 4), tensor(2, 4, conj=True), tensor(3, 4)),
    ]
    plan = analyze(calls, printer=Generator(), kept={3})
    assert groups(plan) == [(0, 1), (2,)]


def test_a_group_joins_only_where_every_pair_may():
    """2 may read 1, but not 0: joining 1's group would bring the two together."""
    calls = [
        relu(0, tensor(0, 4, 4), tensor(1, 4, 4)),
        unary(1, SIGMOID, tensor(1, 4, 4), tensor(2, 4, 4)),
        binary(2, ADD, tensor(2, 4, 4), tensor(1, 4, 4, conj=True), tensor(3, 4, 4)),
    ]
    plan = analyze(calls, printer=Generator(), kept={3})
    assert groups(plan) == [(0, 1), (2,)]
    assert reason(plan, 1, 2)[1] == "op_0 would be in it, but op_2 reads f32[4, 4] lazily conjugated or negated"


def test_a_loop_that_is_no_part_of_the_reductions_is_refused():
    calls = [
        total(0, tensor(0, 4, 6), tensor(1, 4, 1)),
        relu(1, tensor(1, 4, 1), tensor(2, 4, 1)),
        binary(2, ADD, tensor(2, 4, 1), tensor(3, 3, 4, 5), tensor(4, 3, 4, 5)),
    ]
    plan = analyze(calls, printer=Generator())
    told = "op_2, whose result is read outside, does not make one element per step of [4, 6] along 1"
    assert reason(plan, 1, 2) == (False, told)
    calls[2] = binary(2, ADD, tensor(2, 4, 1), tensor(3, 4, 5), tensor(4, 4, 5))
    assert not reason(analyze(calls, printer=Generator()), 1, 2)[0]


# -- fuel


def test_fuel_fuses_the_first_pairs_only():
    calls = chain(RELU, SIGMOID, "aten::neg", RELU, SIGMOID)
    for fuel, expected in ((0, 5), (1, 4), (2, 3), (4, 1), (9, 1)):
        plan = analyze(calls, printer=Generator(), config=Config(fusion_fuel=fuel))
        assert len(plan.groups) == expected
        assert sum(d.fused for d in plan.decisions) == min(fuel, 4)
        assert [d.fused for d in plan.decisions] == [n < fuel for n in range(4)]
    plan = analyze(calls, printer=Generator(), config=Config(fusion_fuel=2))
    assert reason(plan, 2, 3) == (False, "out of fuel: 4 pairs would fuse, config allows 2 (fusion_fuel)")


def test_fuel_counts_only_pairs_that_would_fuse():
    calls = chain("aten::neg", RELU, SIGMOID, RELU, SIGMOID)
    plan = analyze(calls, fused(RELU, SIGMOID), config=Config(fusion_fuel=1))
    assert groups(plan) == [(0,), (1, 2), (3,), (4,)]
    told = "not without the limit of fusion_fuel either: op_1 is in kernel 'toy_relu_sigmoid', which ends there"
    assert reason(plan, 0, 1)[1] == told
    assert reason(plan, 3, 4)[1].startswith("out of fuel")


def test_nothing_takes_the_place_of_what_fuel_forbids():
    """With fuel for one pair, relu+sigmoid+neg cannot be made; sigmoid+neg, which was not fused before, must not be."""
    kernels = fused(RELU, SIGMOID, "aten::neg"), fused("aten::neg", "aten::tanh")
    calls = chain(RELU, SIGMOID, "aten::neg", "aten::tanh")
    assert groups(analyze(calls, *kernels)) == [(0, 1, 2), (3,)]
    assert groups(analyze(calls, *kernels, config=Config(fusion_fuel=1))) == [(0,), (1,), (2,), (3,)]


def test_fusion_can_be_switched_off():
    plan = analyze(chain(RELU, SIGMOID), fused(RELU, SIGMOID), printer=Generator(), config=Config(fusion=False))
    assert reason(plan, 0, 1) == (False, "fusion is switched off by config (fusion = false)")


# -- lookup


def plan_of(*groups_, decisions=()):
    return FusionPlan(tuple(groups_), tuple(decisions))


def test_each_group_has_its_kernel():
    calls = chain(RELU, SIGMOID, "aten::neg")
    device = opened(fused(RELU, SIGMOID))
    plan = plan_of(FusionGroup((0, 1), inner=(1,)), FusionGroup((2,)))
    assert look_up_kernels(plan, calls, device)[0] == plan
    assert [k.name for k in look_up_kernels(plan, calls, device)[1]] == ["toy_relu_sigmoid", "toy_aten::neg"]


def test_the_code_generator_makes_what_is_not_registered():
    calls = chain(RELU, SIGMOID)
    plan = plan_of(FusionGroup((0, 1), inner=(1,)))
    _, [kernel] = look_up_kernels(plan, calls, opened(printer=Generator()))
    assert (kernel.name, kernel.signature) == ("generated", "aten::relu+aten::sigmoid")


@pytest.mark.parametrize("printer", [None, Generator(lambda calls: "no")])
def test_a_group_without_a_kernel_falls_apart(printer):
    calls = chain(RELU, SIGMOID, "aten::neg")
    decisions = [FusionDecision(0, 1, True, "a plugin wants it"), FusionDecision(1, 2, False, "no")]
    plan = plan_of(FusionGroup((0, 1), inner=(1,)), FusionGroup((2,)), decisions=decisions)
    apart, kernels = look_up_kernels(plan, calls, opened(printer=printer))
    assert groups(apart) == [(0,), (1,), (2,)]
    assert [kernel.signature for kernel in kernels] == [RELU, SIGMOID, "aten::neg"]
    assert apart.decisions[0] == FusionDecision(0, 1, False, "no kernel computes aten::relu+aten::sigmoid in one")
    assert apart.decisions[1] == decisions[1]


def test_a_group_that_recomputes_cannot_fall_apart():
    plan = plan_of(FusionGroup((0, 1), inner=(1,)), FusionGroup((2,), recomputed=(0,), inner=(1,)))
    with pytest.raises(KernelNotFoundError, match=r"no kernel on toy:0 computes aten::relu\+aten::tanh in one"):
        look_up_kernels(plan, two_readers(), opened(fused(RELU, SIGMOID)))


# -- a group as one call


def test_a_groups_arguments_are_its_tensors_from_outside_and_then_the_rest():
    x, y, a, b, out = (tensor(n, 4) for n in range(5))
    add = call(0, ADD, {"self": x, "other": y, "alpha": 2}, [a])
    scale = binary(1, MUL, a, 3.0, b)
    again = call(2, ADD, {"self": b, "other": y, "alpha": 5}, [out])
    group = fused_call([add, scale, again], inner={2, 3})
    assert group.arguments == {"self": x, "other": y, "other1": 3.0, "other2": y, "alpha": 2, "alpha2": 5}
    assert list(group.arguments)[:4] == ["self", "other", "other1", "other2"]
    assert group.signature == f"{ADD}+{MUL}+{ADD}"
    assert group.name == "op_0+op_1+op_2"
    assert (group.inputs, group.outputs, group.results) == ((x, y, y), (out,), (out,))


def test_a_group_is_packed_as_a_call_is():
    calls = [
        binary(0, MUL, tensor(0, 4, 6), tensor(1, 4, 6), tensor(2, 4, 6)),
        total(1, tensor(2, 4, 6), tensor(3, 4, 1)),
    ]
    kernel = fused(MUL, SUM)
    packed = CallPacker().pack_group(calls, fused_call(calls, inner={2}), kernel)
    assert [(arg.name, arg.access, arg.keyword) for arg in packed] == [
        ("self", Access.IN, False),
        ("other", Access.IN, False),
        ("dim", None, True),
        ("keepdim", None, True),
        ("out", Access.OUT, True),
    ]


def test_a_group_with_several_results_has_them_all():
    calls = chain(RELU, SIGMOID)
    group = fused_call(calls)
    assert group.results == (tensor(1, 4, 6), tensor(2, 4, 6))
    packed = CallPacker().pack_group(calls, group, fused(RELU, SIGMOID))
    assert [arg.name for arg in packed] == ["self", "out0", "out1"]


def test_the_same_pattern_is_the_same_overload():
    """Packers keep what they find out about an overload."""
    first, second = fused_call(chain(RELU, SIGMOID)), fused_call(chain(RELU, SIGMOID, shape=(9,)))
    assert first.overload is second.overload
    assert first.overload is not fused_call(chain(RELU, SIGMOID), inner={1}).overload


def test_what_stays_inside_is_neither_read_nor_written():
    calls = chain(RELU, SIGMOID)
    reads, writes = memory_ranges(calls, inner={1})
    assert (reads, writes) == ((tensor(0, 4, 6).range,), (tensor(2, 4, 6).range,))


# -- what must hold for every plan

UNARY = (RELU, SIGMOID, "aten::neg", "aten::tanh")
BINARY = (ADD, MUL)


@st.composite
def programs(draw):
    """Calls on two inputs, b0 and b1: pointwise and not, reductions, views, writes in place, random draws."""
    values = [tensor(0, 4, 4), tensor(1, 4, 4)]
    calls = []
    fresh = itertools.count(2)
    for number in range(draw(st.integers(2, 12))):
        kind = draw(st.sampled_from([*["unary"] * 6, *["binary"] * 4, "sum", "sum", "mm", "write", "draw"]))
        # a lean towards what was made last, so that chains come up
        source = values[draw(st.integers(max(0, len(values) - 4), len(values) - 1))]
        other = values[draw(st.integers(0, len(values) - 1))]
        if draw(st.integers(0, 7)) == 0:
            source = dataclasses.replace(source, strides=tuple(reversed(source.strides)))
        if kind == "write":
            target = values[draw(st.integers(0, 1))]
            calls.append(call(number, "aten::copy_", {"self": target, "src": source}, [target], written=[target]))
            continue
        made = tensor(next(fresh), 4, 4)
        if kind == "unary":
            calls.append(unary(number, draw(st.sampled_from(UNARY)), source, made))
        elif kind == "draw":
            calls.append(call(number, "aten::bernoulli", {"self": source}, [made], random=True))
        elif kind == "sum":
            made = tensor(made.buffer, 4, 1)
            calls.append(total(number, source, made))
            made = TensorSpec(made.dtype, (4, 4), (1, 0), 0, made.buffer)  # expanded, so that all shapes stay equal
        elif kind == "binary":
            calls.append(binary(number, draw(st.sampled_from(BINARY)), source, other, made))
        else:
            calls.append(call(number, "aten::mm", {"self": source, "mat2": other}, [made]))
        values.append(made)
    unread = {v.buffer for v in values} - {spec.buffer for one in calls for spec in one.inputs}
    kept = unread | draw(st.sets(st.sampled_from([v.buffer for v in values]), max_size=2))
    return calls, kept, draw_kernels(draw, calls)


def draw_kernels(draw, calls):
    """Fused kernels for some of the groups that a program has."""
    flow = DataFlow(calls)
    kernels = {}
    for name in range(draw(st.integers(0, 4))):
        members = {draw(st.integers(0, len(calls) - 1))}
        for _ in range(draw(st.integers(1, 3))):
            around = sorted({producer for member in members for producer in flow.producers[member]} - members)
            if around:
                members.add(draw(st.sampled_from(around)))
        group = [calls[position] for position in sorted(members)]
        signatures = tuple(one.signature for one in group)
        if len(group) > 1 and set(signatures) <= {*UNARY, *BINARY, SUM}:
            inputs = [name for name, value in fused_call(group).arguments.items() if isinstance(value, TensorSpec)]
            by_name = [Parameter(name, "const float*", Access.IN) for name in inputs]
            parameters = (*by_name, Parameter("out", "float*", Access.OUT)) if draw(st.booleans()) else ()
            kernels[signatures] = fused(*signatures, name=f"kernel_{name}", parameters=parameters)
    return list(kernels.values())


def execute(calls, plan_groups):
    """Run groups on symbolic memory: each buffer holds what was computed into it, as an expression."""
    by_id = {one.id: one for one in calls}
    memory = {0: "input 0", 1: "input 1"}
    state = 0
    for group in plan_groups:
        local = {}
        for number in group.members:
            one = by_id[number]

            def value(spec, local=local):
                held = local[spec.buffer] if spec.buffer in local else memory[spec.buffer]
                return (held, spec.shape, spec.strides)

            arguments = [value(v) if isinstance(v, TensorSpec) else v for v in one.arguments.values()]
            expression = (one.signature, *arguments)
            if one.random:
                expression, state = (*expression, state), state + 1
            for spec in one.outputs:
                local[spec.buffer] = expression
        for number in group.calls:
            for spec in by_id[number].outputs:
                if spec.buffer not in group.inner:
                    memory[spec.buffer] = local[spec.buffer]
    return memory


@settings(max_examples=400, deadline=None)
@given(programs(), st.booleans(), st.none() | st.integers(0, 6), st.sets(st.sampled_from(FUSION_RULES), min_size=1))
def test_every_plan_computes_what_the_program_does(program, generator, fuel, rules):
    calls, kept, kernels = program
    config = Config(fusion_fuel=fuel, fusion_rules=sorted(rules))
    plan = analyze(calls, *kernels, kept=kept, config=config, printer=Generator() if generator else None)
    # every call is in exactly one group
    assert sorted(number for group in plan.groups for number in group.calls) == [one.id for one in calls]
    # every pair is decided, with a reason, and as the groups are
    assert sorted((d.producer, d.consumer) for d in plan.decisions) == sorted(neighbours(calls))
    home = {number: group for group in plan.groups for number in group.calls}
    for decision in plan.decisions:
        assert decision.reason
        assert decision.fused == (decision.producer in home[decision.consumer].members)
    assert fuel is None or sum(d.fused for d in plan.decisions) <= fuel
    # the order is valid, and so no group waits for itself: each is convex
    place = {number: position for position, group in enumerate(plan.groups) for number in group.calls}
    for position, following in enumerate(DataFlow(calls, kept).followers):
        assert all(place[position] <= place[later] for later in following)
    # memory holds in the end what it would without any fusion
    single = execute(calls, [FusionGroup((one.id,)) for one in calls])
    together = execute(calls, plan.groups)
    assert all(together[buffer] == single[buffer] for buffer in kept | {0, 1})
    # every group has a kernel, and every argument its place
    found, descriptors = look_up_kernels(plan, calls, opened(*kernels, printer=Generator() if generator else None))
    assert found == plan
    for group, kernel in zip(plan.groups, descriptors, strict=True):
        members = [calls[number] for number in group.members]
        if len(members) > 1:
            packed = CallPacker().pack_group(members, fused_call(members, group.inner), kernel)
            written = {arg.value.buffer for arg in packed if arg.access is Access.OUT}
            assert written == {s.buffer for c in members for s in c.fresh_results} - set(group.inner)


@settings(max_examples=60, deadline=None)
@given(programs(), st.booleans())
def test_fuel_adds_one_pair_at_a_time(program, generator):
    calls, kept, kernels = program
    options = {"kept": kept, "printer": Generator() if generator else None}
    full = analyze(calls, *kernels, **options)
    most = [(d.producer, d.consumer) for d in full.decisions if d.fused]
    for fuel in range(len(most) + 1):
        plan = analyze(calls, *kernels, config=Config(fusion_fuel=fuel), **options)
        assert {(d.producer, d.consumer) for d in plan.decisions if d.fused} <= set(most[:fuel])
    assert analyze(calls, *kernels, config=Config(fusion_fuel=len(most)), **options) == full


def test_a_generated_kernel_has_at_most_so_many_operators():
    calls = chain(*[RELU] * 100, shape=(4,))
    plan = analyze(calls, printer=Generator())
    assert [len(group.calls) for group in plan.groups] == [64, 36]
    assert reason(plan, 63, 64) == (False, "resources: one kernel would compute 65 operators, more than 64")
    without = analyze(calls, printer=Generator(), config=Config(fusion_rules=("pointwise",)))
    assert len(without.groups) == 1


def test_a_group_of_calls_looks_only_at_what_lies_around_it():
    """With thousands of calls, the code generator is asked about none that a registered kernel computes."""
    calls = chain(*[RELU, SIGMOID] * 5000, shape=(4,))
    asked = []
    plan = analyze(calls, fused(RELU, SIGMOID), printer=Generator(lambda members: asked.append(len(members))))
    assert len(plan.groups) == 5000
    assert asked == []
