"""Level 1: scalars of every type, tensors of every layout, and the memory around them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance.case import CannotRunError, Case, Ran, Target
from kagent_core.testing.conformance.checks import Checks
from kagent_core.testing.conformance.compared import both_refuse, compare_call, same, same_op
from kagent_core.testing.conformance.layouts import LAYOUTS, OVERLAPPING, PROGRAMS, SCALARS, WRITES, base
from kagent_core.testing.conformance.opened import opened

checks = Checks(1)


def cases(target: Target) -> Iterator[Case]:
    """Yield the level's cases."""
    return checks.cases(target)


# -- scalars


@checks.add("scalars", dtype=tuple(SCALARS))
def a_scalar_that_is_stored(device: str, dtype: str) -> Ran:
    with opened(device) as opening:
        for value in SCALARS[dtype]:
            x = torch.ones(5, dtype=getattr(torch, dtype))
            same_op(opening, "aten::fill.Scalar", x, value)
            condition = torch.tensor([True, False, True, False, False])
            same_op(opening, "aten::masked_fill.Scalar", x, condition, value)
        return opening.ran()


@checks.add("scalars", dtype=tuple(SCALARS))
def a_scalar_that_is_computed_with(device: str, dtype: str) -> Ran:
    with opened(device) as opening:
        for value in SCALARS[dtype]:
            x = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, dtype))
            for signature in ("aten::add.Tensor", "aten::mul.Tensor", "aten::eq.Scalar"):
                same_op(opening, signature, x, value)
        return opening.ran()


@checks.add("scalars")
def a_scalar_that_promotes(device: str) -> Ran:
    """The result's type follows from the scalar's: int with a float, bool with an int."""
    with opened(device) as opening:
        for x in (torch.tensor([1, 2, 3]), torch.tensor([True, False]), torch.tensor(3, dtype=torch.uint8)):
            for value in (2, 2.5, True):
                same_op(opening, "aten::add.Tensor", x, value)
                same_op(opening, "aten::mul.Tensor", x, value)
        return opening.ran()


@checks.add("scalars")
def a_scalar_that_goes_by_name(device: str) -> Ran:
    x, y = torch.randn(4), torch.randn(4)
    with opened(device) as opening:
        for alpha in (1, 2, -0.5, 0.1):
            same_op(opening, "aten::add.Tensor", x, y, alpha=alpha)
        return opening.ran()


@checks.add("scalars")
def scalars_that_change_between_calls(device: str) -> Ran:
    """The same operator on tensors of the same shapes: nothing of an earlier call's values may stay."""
    import kagent_core

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    with opened(device) as opening:
        for alpha in (2, 3.5, 2, -1, 3.5):
            got = kagent_core.run_op("aten::add.Tensor", x, y, alpha=alpha, device=device)
            assert_same(got, torch.add(x, y, alpha=alpha), f"with alpha={alpha}")
            got = kagent_core.run_op("aten::mul.Tensor", x, alpha, device=device)
            assert_same(got, x * alpha, f"times {alpha}")
        return opening.ran()


@checks.add("scalars")
def scalars_of_many_launches(device: str) -> Ran:
    """Each launch of a program sees its own, whenever the device reads them."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for value in range(40):
            x = x * 0.5 + value if value % 3 else x - value
        return x

    return same(device, chain, torch.randn(7), fusion=False)


@checks.add("scalars")
def numbers_that_are_arguments_of_the_program(device: str) -> Ran:
    """Python numbers that differ from call to call, as a compiled function gets them."""
    with opened(device) as opening:
        compiled = torch.compile(scaled, backend="kagent", options={"device": device}, dynamic=True)
        x = torch.randn(4)
        for count, factor in ((2, 0.5), (3, 0.25), (3, -1.5), (7, math.inf), (2, 0.5)):
            compare_call(scaled, compiled, (x, count, factor), f"with {count} and {factor}")
        return opening.ran()


@checks.add("scalars")
def lists_and_missing_arguments(device: str) -> Ran:
    """Lists of integers, booleans, dtypes, strings, and what may be left out."""
    x = torch.arange(24.0).reshape(2, 3, 4)
    with opened(device) as opening:
        same_op(opening, "aten::sum.dim_IntList", x, [0, 2], True)
        same_op(opening, "aten::sum.dim_IntList", x, [-1], False, dtype=torch.float64)
        same_op(opening, "aten::clamp", x, 3)
        same_op(opening, "aten::clamp", x, None, 20)
        same_op(opening, "aten::div.Tensor_mode", x, torch.tensor(7.0), rounding_mode="floor")
        same_op(opening, "aten::permute", x, [2, 0, 1])
        return opening.ran()


@checks.add("errors")
def a_scalar_that_does_not_fit_is_refused(device: str) -> str:
    """Never wrapped around."""
    return both_refuse(device, lambda x: x.fill_(300), torch.zeros(3, dtype=torch.int8))


@checks.add("errors")
def an_argument_of_the_wrong_kind_is_refused(device: str) -> str:
    """By capture, before any kernel sees it; the error names the operator."""
    import kagent_core
    from kagent_core.errors import KagentError

    with opened(device):
        try:
            given = kagent_core.run_op(
                "aten::add.Tensor", torch.ones(2, dtype=torch.int32), 1, alpha=0.5, device=device
            )
        except KagentError as error:
            assert "aten::add.Tensor" in str(error), f"the error does not name the operator: {error}"
            return str(error).splitlines()[0]
    raise AssertionError(f"alpha=0.5 with integers gave {given}, which eager PyTorch refuses")


# -- layouts


TOGETHER = "everything"
"""Stands for all programs in one."""

DTYPES = ("float32",)
MORE_DTYPES = ("float64", "float16", "bfloat16", "int64", "uint8", "bool")


@checks.add(
    "layouts",
    full={"program": tuple(PROGRAMS), "dtype": MORE_DTYPES},
    layout=tuple(LAYOUTS),
    program=(TOGETHER,),
    dtype=DTYPES,
)
def a_tensor(device: str, layout: str, program: str, dtype: str) -> Ran:
    def everything(x: torch.Tensor) -> tuple[Any, ...]:
        return tuple(one(x) for one in PROGRAMS.values())

    return same(device, PROGRAMS.get(program, everything), LAYOUTS[layout](dtype))


@checks.add("layouts", dtype=(*DTYPES, *MORE_DTYPES))
def every_dtype_through_a_copy(device: str, dtype: str) -> Ran:
    """Bit by bit: nothing is computed, so that nothing may change."""
    return same(device, lambda x: (x.clone(), x[::2].clone(), torch.cat([x, x])), base((12,), dtype))


@checks.add("layouts", full={"layout": ("8 dimensions", "channels last")}, layout=("transposed", "sliced with steps"))
def two_tensors_of_different_layouts(device: str, layout: str) -> Ran:
    """Broadcast against each other, in both orders."""
    x = LAYOUTS[layout]("float32")
    y = base((x.shape[-1], 3), "float32")[:, 1]
    return same(device, lambda a, b: (a - b, b - a, torch.maximum(a, b)), x, y)


@checks.add("layouts")
def products_of_views(device: str) -> Ran:
    x, y = base((9, 8), "float32")[1::2, 1:6], base((7, 5), "float32").t()
    return same(device, lambda a, b: (a @ b, (a @ b).t(), b.t() @ a.t()), x, y)


@checks.add("layouts")
def offsets_that_change_between_calls(device: str) -> Ran:
    """Tensors of the same shape and strides, elsewhere in their storage."""
    with opened(device) as opening:
        compiled = torch.compile(lambda x: x * 2 + 1, backend="kagent", options={"device": device}, dynamic=False)
        whole = base((20, 3), "float32")
        for start in (0, 4, 11, 1, 16):
            compare_call(lambda x: x * 2 + 1, compiled, (whole[start : start + 4],), f"with offset {start}")
        return opening.ran()


# -- memory that is written


@checks.add(
    "canaries",
    full={"write": tuple(WRITES)[2:], "dtype": MORE_DTYPES[:-1]},
    layout=tuple(name for name in LAYOUTS if name not in OVERLAPPING),
    write=tuple(WRITES)[:2],
    dtype=DTYPES,
)
def a_tensor_written_in_place(device: str, layout: str, write: str, dtype: str) -> Ran:
    """In the middle of a larger one, whose other elements stay what they are."""
    return same(device, WRITES[write], LAYOUTS[layout](dtype))


@checks.add("canaries")
def nothing_is_written_behind_a_buffer(device: str) -> Ran:
    """Every buffer of the device is followed by bytes that no kernel may touch."""
    # all of whole cache lines, so that no padding lies between the last of them and what is behind it
    given = [base((4, 16), "float32"), base((16, 16), "float32"), base((16,), "float32")]
    with opened(device, guards=True, fusion=False) as opening:

        def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = torch.relu(x @ w + b)
            b.add_(1)
            return hidden * 2, hidden.sum(0), hidden.t().clone()

        compiled = opening.compile(program, *given)
        compare_call(program, lambda *args: tuple(compiled(list(args))), given, "of a program")
        if not opening.watched.calls["allocate"]:
            raise CannotRunError("the device's plans allocate no memory through its runtime")
        sizes = opening.watched.overrun()
        assert not sizes, f"bytes behind buffers of {', '.join(map(str, sizes))} bytes were written over"
        return opening.ran()


# -- tensors that share memory


@checks.add("aliasing")
def one_tensor_as_two_arguments(device: str) -> Ran:
    x = base((4, 3), "float32")
    return same(device, lambda a, b: a * 2 + b, x, x)


@checks.add("aliasing")
def one_tensor_as_two_arguments_that_is_written(device: str) -> Ran:
    x = base((4, 3), "float32")
    return same(device, lambda a, b: (a.add_(1), b * 2)[1], x, x)


@checks.add("aliasing", overlap=(True, False))
def two_views_of_one_storage_one_written(device: str, overlap: bool) -> Ran:
    whole = base((12,), "float32")
    x, y = whole[:6], whole[4:10] if overlap else whole[6:]
    return same(device, lambda a, b: (a.mul_(2), b + 1)[1], x, y)


@checks.add("aliasing")
def tensors_that_overlap_and_have_no_base(device: str) -> Ran:
    """As `detach` makes them: nothing but their storage says that they share memory."""
    whole = base((12,), "float32")
    return same(device, lambda a, b: (a.mul_(2), b + 1)[1], whole[:6].detach(), whole[4:10].detach())


@checks.add("aliasing")
def views_that_interleave(device: str) -> Ran:
    """No element in common, but every other one of the same memory."""
    whole = base((20,), "float32")
    return same(device, lambda a, b: (a.add_(b), b * 3)[1], whole[::2], whole[1::2])


@checks.add("aliasing")
def results_that_share_memory(device: str) -> Ran:
    """A view of an argument, the argument itself, views of one result, one result twice."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = y * 2
        return x[1:], x, made, made.t(), made, made[:1]

    return same(device, program, base((4, 3), "float32"), base((2, 5), "float32"))


@checks.add("aliasing")
def an_argument_written_through_a_view_and_returned(device: str) -> Ran:
    def program(x: torch.Tensor) -> torch.Tensor:
        x[:, 1::2].add_(10)
        x.diagonal().zero_()
        return x

    return same(device, program, base((5, 5), "float32"))


@checks.add("aliasing")
def what_an_argument_was_before_it_is_written(device: str) -> Ran:
    """Write after read: the result has the old value, the argument the new one."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = x * 3
        x.copy_(y)
        y.add_(x)
        return before

    return same(device, program, base((4, 3), "float32"), base((3, 4), "float32").t())


# -- parameters


@checks.add("parameters")
def parameters_that_change_between_calls(device: str) -> Ran:
    """In place, as an optimizer does, and by new memory, as loading a checkpoint does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    x = torch.randn(3, 6)
    with opened(device) as opening, torch.no_grad():
        compiled = torch.compile(model, backend="kagent", options={"device": device}, dynamic=False)
        for call in range(4):
            assert_same(compiled(x), model(x), f"call {call}", every_stride=False)
            for parameter in model.parameters():
                if call % 2:
                    parameter.data = torch.randn_like(parameter)
                else:
                    parameter.mul_(0.5).add_(0.25)
        return opening.ran()


@checks.add("parameters")
def buffers_that_the_model_writes(device: str) -> Ran:
    """Running statistics, written by each call and read by the next one."""
    torch.manual_seed(0)
    mine, theirs = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    with opened(device) as opening, torch.no_grad():
        compiled = torch.compile(mine, backend="kagent", options={"device": device}, dynamic=False)
        for call in range(3):
            x = torch.randn(8, 4) + call
            assert_same(compiled(x), theirs(x), f"call {call}", every_stride=False)
            assert_same(dict(mine.named_buffers()), dict(theirs.named_buffers()), f"buffers after call {call}")
        return opening.ran()


def scaled(x: torch.Tensor, count: int, factor: float) -> torch.Tensor:
    """Compute with numbers that are arguments."""
    return x * factor + count
