"""The code generator: what it takes and why not, what it hands out, which kernel comes first, many threads at once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from kagent_core.codegen import generator as module
from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.loops import write_loops
from kagent_core.codegen.lowering import NotLoweredError
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.table import RuleTable
from kagent_core.device import OpenDevice
from kagent_core.extract.fused_call import fused_call
from kagent_core.extract.packing import CallPacker
from kagent_core.registry import KernelRegistry
from kagent_core.specs import Access, Device, DeviceInfo, DType, KernelDescriptor, OpCall, Provenance, TensorSpec
from kagent_core.testing.fake import FakeDeriver, FakeRuntime
from kagent_cpu.language import CLanguage

from ..codegen_programs import generator, program, refusal
from .builders import call, relu, tensor

aten = torch.ops.aten

X = torch.empty(6, 8)
STACK = 'File "model.py", line 7, in forward\n    return x * "*/"\n'


def preferring(**options: Any) -> ExpressionGenerator:
    return ExpressionGenerator(CLanguage(), write_loops, generic=GenericKernels(GENERIC, RULES), **options)


def single(function: Callable[..., Any], *args: Any) -> OpCall:
    [made] = program(function, *args).calls
    return made


def mm() -> OpCall:
    return single(aten.mm, torch.empty(3, 4), torch.empty(4, 5))


# -- what it takes


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.relu, (X,)),
        (lambda x: torch.relu(x * 2) + x, (X,)),
        (lambda x: aten._softmax(x.exp(), -1, False), (X,)),
        (aten.mm, (X, X.t())),
        (lambda x, y: torch.relu(aten.mm(x, y)), (X, X.t())),
    ],
    ids=["single", "chain", "rows", "parametrised", "epilogue"],
)
def test_it_takes_what_has_rules(function: Callable[..., Any], args: Sequence[Any]) -> None:
    assert refusal(function, *args) is None


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (aten.nonzero_static, (X,), "there is no lowering rule for aten::nonzero_static"),
        (
            aten.exp,
            (torch.empty(3, dtype=torch.complex64),),
            "exp has a tensor of complex64, which generated kernels do not have",
        ),
        (
            lambda x: (x.exp(), x[:2].sin()),
            (X,),
            "sin makes f32[2, 8], which is neither the size of the loops nor of their rows",
        ),
    ],
    ids=["no rule", "dtype", "loops"],
)
def test_it_says_why_it_refuses(function: Callable[..., Any], args: Sequence[Any], why: str) -> None:
    given: dict[str, Any] = {"size": 4} if function is aten.nonzero_static else {}
    told = refusal(lambda *x: function(*x, **given), *args)
    assert told is not None
    assert why in told


def test_it_refuses_tensors_that_are_lazily_negated() -> None:
    lazy = replace(tensor(0, 4), neg=True)
    told = generator().can_generate([relu(0, lazy, tensor(1, 4))])
    assert told == "op_0 has a tensor that is lazily conjugated or negated"


def test_a_group_of_which_nothing_is_read_outside_is_refused() -> None:
    only = relu(0, tensor(0, 4), tensor(1, 4))
    assert generator().can_generate([only], inner={1}) == "there is nothing that it would have to write"


def test_what_is_refused_cannot_be_generated() -> None:
    lazy = relu(0, replace(tensor(0, 4), conj=True), tensor(1, 4))
    with pytest.raises(NotLoweredError, match="lazily conjugated"):
        generator().generate([lazy], lazy)


def test_of_results_without_elements_there_is_nothing_to_do() -> None:
    empty = relu(0, tensor(0, 0), tensor(1, 0))
    kernel = generator().generate([empty], empty)
    assert kernel.items == 0
    assert kernel.packed == ()
    assert (kernel.source or "").endswith("(void) {\n}\n")
    assert not generator().prefers(empty)  # a library checks the arguments all the same


# -- what it hands out


def chain() -> tuple[OpCall, ...]:
    return program(lambda x, y: torch.relu(x * y).sum(-1), X, torch.empty(8)).calls


def test_a_generated_kernel_comes_with_its_arguments_packed() -> None:
    calls = chain()
    group = fused_call(calls, [spec.buffer for made in calls[:-1] for spec in made.outputs])
    kernel = generator().generate(calls, group)
    assert (kernel.origin, kernel.fuses) == ("generated", tuple(made.signature for made in calls))
    assert kernel.name.startswith("mul_relu_sum_")
    assert f"static void {kernel.name}(" in (kernel.source or "")
    assert kernel.packed is not None
    tensors = [arg for arg in kernel.packed if isinstance(arg.value, TensorSpec)]
    assert [(arg.name, arg.value, arg.access) for arg in tensors] == [
        ("x0", calls[0].inputs[0], Access.IN),
        ("x1", calls[0].inputs[1], Access.IN),
        ("y0", calls[-1].outputs[0], Access.OUT),
    ]
    sizes = kernel.packed[len(tensors) :]
    assert sorted(arg.value for arg in sizes) == [6, 8]
    assert all(arg.data == struct.pack("<q", arg.value) and arg.type == "int64_t" for arg in sizes)


def test_a_single_operator_is_not_said_to_be_fused() -> None:
    only = relu(0, tensor(0, 4), tensor(1, 4))
    assert generator().generate([only], only).fuses == ()


def test_only_what_is_read_outside_is_written() -> None:
    calls = program(lambda x: x.exp().sin(), X).calls
    first, last = (made.outputs[0].buffer for made in calls)
    for stored in ({last}, {first, last}, {first}):
        source = generator().source(calls, stored)
        written = {arg.value.buffer for arg in source.args if arg.access is Access.OUT}
        assert written == stored


def test_names_say_what_is_computed_and_differ_with_the_text() -> None:
    sources = [generator().source(calls, {calls[-1].outputs[0].buffer}) for calls in (chain(), chain())]
    assert sources[0] == sources[1]
    other = program(lambda x, y: torch.relu(x * y).sum(0), X, torch.empty(8)).calls
    named = generator().source(other, {other[-1].outputs[0].buffer}).name
    assert named != sources[0].name
    assert named[:-10] == sources[0].name[:-10]
    many = program(lambda x: x.exp().sin().log1p().sqrt().tanh().sigmoid().reciprocal().floor().ceil().erf().cosh(), X)
    long = generator().source(many.calls, {many.calls[-1].outputs[0].buffer}).name
    assert len(long) <= module.NAME_LENGTH + 11
    assert long.isidentifier()


def test_the_comments_are_those_of_the_program_that_wants_the_kernel() -> None:
    making = generator()
    plain = relu(0, tensor(0, 4), tensor(1, 4))
    placed = replace(relu(3, tensor(5, 4), tensor(8, 4)), provenance=Provenance(STACK))
    assert making.source([plain], {1}).text.startswith("/* aten::relu */\nstatic void")
    # the user's text cannot end the comment
    assert making.source([placed], {8}).text.startswith(
        '/* aten::relu  <- model.py:7: return x * "* /" */\nstatic void'
    )
    assert making.source([plain], {1}).text.startswith("/* aten::relu */\nstatic void")


# -- which kernel comes first


def test_loops_outrank_a_library_and_parametrised_kernels_do_not() -> None:
    assert preferring().prefers(single(aten.relu, X))
    assert not preferring().prefers(mm())
    assert preferring(prefers_all=True).prefers(mm())


def test_a_library_that_is_better_for_a_call_alone_comes_first() -> None:
    def better(made: OpCall) -> bool:
        return made.signature == "aten::relu"

    assert not preferring(library_is_better=better).prefers(single(aten.relu, X))
    assert preferring(library_is_better=better).prefers(single(aten.exp, X))
    assert preferring(library_is_better=better, prefers_all=True).prefers(single(aten.relu, X))


def test_a_call_that_writes_an_argument_is_left_to_a_library() -> None:
    x = tensor(0, 4)
    in_place = call(0, "aten::relu_", {"self": x}, [x], written=[x])
    assert not preferring(prefers_all=True).prefers(in_place)


def test_parametrised_kernels_take_epilogues_only_where_they_may() -> None:
    calls = program(lambda x, y: torch.relu(aten.mm(x, y)), X, X.t()).calls
    assert preferring().can_generate(calls) is None
    assert preferring(fuses_generic=False).can_generate(calls) is not None
    assert preferring(fuses_generic=False).can_generate(calls[:1]) is None


def opened(printer: ExpressionGenerator | None, *registered: str) -> OpenDevice:
    """Return a device whose library has a kernel for everything."""
    registry = KernelRegistry("toy", resolver=lambda made: KernelDescriptor(made.signature, "resolved"))
    for signature in registered:
        registry.add(KernelDescriptor(signature, "registered"))
    registry.freeze()
    info = DeviceInfo(Device("toy", 0), "Toy")
    return OpenDevice(info, registry, CallPacker(), FakeDeriver(), FakeRuntime(), printer)


def test_registered_before_generated_before_resolved() -> None:
    only = single(aten.relu, X)
    assert opened(preferring(), "aten::relu").kernel_for(only).name == "registered"
    assert opened(preferring()).kernel_for(only).origin == "generated"
    assert opened(None).kernel_for(only).name == "resolved"
    assert opened(preferring(prefers_all=True), "aten::relu").kernel_for(only).name == "registered"


def test_resolved_before_generated_where_the_library_is_better() -> None:
    assert opened(preferring()).kernel_for(mm()).name == "resolved"
    assert opened(preferring(prefers_all=True)).kernel_for(mm()).origin == "generated"
    assert opened(preferring(library_is_better=lambda made: True)).kernel_for(single(aten.relu, X)).name == "resolved"


# -- what it remembers


def numbered(number: int, size: int) -> list[OpCall]:
    """Return two calls whose pattern depends on `size` only, on buffers that depend on `number`."""
    x, y, z = (tensor(10 * number + n, size, 8, dtype=DType("float32", 4)) for n in range(3))
    return [call(0, "aten::exp", {"self": x}, [y]), relu(1, y, z)]


def test_many_threads_get_what_one_would() -> None:
    making = generator()
    wanted = [(number, 5 + number % 7) for number in range(200)]

    def make(one: tuple[int, int]) -> Any:
        return making.source(numbered(*one), {10 * one[0] + 2})

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(make, wanted))
    for one, source in zip(wanted, found, strict=True):
        assert source == generator().source(numbered(*one), {10 * one[0] + 2})


def test_what_is_forgotten_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    lowered: list[int] = []
    lowering = module.Lowering

    def counting(calls: Sequence[OpCall], *args: Any, **kwargs: Any) -> Any:
        lowered.append(calls[0].inputs[0].shape[0])
        return lowering(calls, *args, **kwargs)

    monkeypatch.setattr(module, "Lowering", counting)
    making = generator()
    for size in (5, 6, 5, 7, 5, 6):
        making.source(numbered(1, size), {12})
    # 5 was used last when 7 pushed one out
    assert lowered == [5, 6, 7, 6]


def test_a_rule_with_a_bug_costs_a_kernel_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        "kagent_core.codegen.generator.log.warning", lambda text, *args, exc_info: told.append(text % args)
    )
    rules = RuleTable()
    rules.pointwise("aten::relu")(lambda self: self / ()[len(self.dtype)])
    made = program(torch.relu, torch.randn(4))
    refused = ExpressionGenerator(CLanguage(), write_loops, rules=rules).can_generate(made.calls)
    assert refused == "IndexError in lowering aten::relu: tuple index out of range"
    assert told == ["a lowering rule of aten::relu has a bug; no kernel is generated for it"]
