"""Whether a kernel takes a call, or a group of calls, and why not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from kagent_core.prototype import prototype_refusal
from kagent_core.specs import Access, KernelDescriptor, OpCall, Parameter, TensorSpec, flatten_tensors

NamedTensor = tuple[str, TensorSpec]

RESULT_NAME = re.compile(r"out\d*")
"""How a kernel's results are named: ``out``, or ``out0``, ``out1``, ..."""


def refusal(kernel: KernelDescriptor, call: OpCall) -> str | None:
    """Return why a kernel does not take a call, or None when it does."""
    tensors = (*call.inputs, *call.outputs)
    reason = _dtype_refusal(kernel, tensors) or _lazy_bits_refusal(kernel, tensors)
    if reason is None and not (kernel.layout.takes_all and not kernel.layouts):
        reason = _layout_refusal(kernel, named_tensors(call))
    reason = reason or prototype_refusal(kernel, call)
    return kernel.accepts(call) if reason is None and kernel.accepts is not None else reason


def group_refusal(kernel: KernelDescriptor, calls: Sequence[OpCall]) -> str | None:
    """Return why a fused kernel does not take a group, or None when it does.

    What the group makes and uses up inside itself has a dtype, but no layout: it never lies in memory.
    """
    outer = list(group_tensors(calls))
    every = [spec for call in calls for spec in (*call.inputs, *call.outputs)]
    return (
        _wiring_refusal(kernel, calls, {name for name, _ in outer})
        or _dtype_refusal(kernel, every)
        or _lazy_bits_refusal(kernel, every)
        or _layout_refusal(kernel, outer)
    )


def named_tensors(call: OpCall) -> Iterator[NamedTensor]:
    """Yield a call's tensors by name: arguments by the operator's names, then results in new memory.

    A single result is ``out``; several are ``out0``, ``out1``, ... Every tensor of a list has the list's name.
    """
    for name, value in call.arguments.items():
        for spec in flatten_tensors(value):
            yield name, spec
    yield from zip(result_names(call), call.fresh_results, strict=True)


def group_tensors(calls: Sequence[OpCall]) -> Iterator[NamedTensor]:
    """Yield a group's tensors by name: what it reads from outside, then the results of its last call.

    An argument keeps the operator's name for it, unless an earlier call of the group has an argument of that name
    that comes from outside, be it a tensor or a number; then the position of its call is added: ``other1`` is `other`
    of the second call.
    """
    inner: set[int] = set()
    taken: set[str] = set()
    for position, call in enumerate(calls):
        for name, value in call.arguments.items():
            tensors = list(flatten_tensors(value))
            outside = [spec for spec in tensors if spec.buffer not in inner]
            if outside or not tensors:
                renamed = f"{name}{position}" if name in taken else name
                taken.add(renamed)
                yield from ((renamed, spec) for spec in outside)
        inner.update(spec.buffer for spec in call.fresh_results)
    yield from zip(result_names(calls[-1]), calls[-1].fresh_results, strict=True)


def result_names(call: OpCall) -> list[str]:
    """Return the names that a kernel's results go by."""
    count = len(call.fresh_results)
    return ["out"] if count == 1 else [f"out{number}" for number in range(count)]


def _dtype_refusal(kernel: KernelDescriptor, tensors: Iterable[TensorSpec]) -> str | None:
    if kernel.dtypes is not None:
        for spec in tensors:
            if spec.dtype.name not in kernel.dtypes:
                return f"takes {', '.join(sorted(kernel.dtypes))}, not {spec.dtype}"
    return None


def _lazy_bits_refusal(kernel: KernelDescriptor, tensors: Iterable[TensorSpec]) -> str | None:
    if not kernel.lazy_bits:
        for spec in tensors:
            if spec.conj or spec.neg:
                return f"does not read lazily conjugated or negated tensors, such as {spec}"
    return None


def _layout_refusal(kernel: KernelDescriptor, tensors: Iterable[NamedTensor]) -> str | None:
    special = dict(kernel.layouts)
    for name, spec in tensors:
        layout = special.get(name, kernel.layout)
        if not layout.takes(spec):
            where = f" as '{name}'" if name in special else ""
            return f"takes {layout}{where}, not {spec} with strides {spec.strides}"
    return None


def _wiring_refusal(kernel: KernelDescriptor, calls: Sequence[OpCall], outer: set[str]) -> str | None:
    """A prototype tells which arguments come from outside: ``sub(relu(x), y)`` is not ``sub(y, relu(x))``."""
    if not kernel.parameters:
        return None
    declared = {parameter.name for parameter in kernel.parameters if parameter.derived is None}
    inputs = {name for name in outer if not RESULT_NAME.fullmatch(name)}
    missing = sorted(inputs - declared)
    if missing:
        return f"has no parameter for {_listed(missing)}, which the group takes from outside"
    tensors = {
        name for call in calls for name, value in call.arguments.items() if next(iter(flatten_tensors(value)), None)
    }
    read = {parameter.name for parameter in kernel.parameters if _is_read(parameter)}
    unused = sorted(name for name in (read | declared & tensors) - inputs if not RESULT_NAME.fullmatch(name))
    return f"takes {_listed(unused)} from outside, which the group makes itself" if unused else None


def _is_read(parameter: Parameter) -> bool:
    """Whether a parameter is a tensor that must be given from outside."""
    read_only = parameter.access is None and parameter.type.startswith("const ") and parameter.type.endswith("*")
    return (read_only or parameter.access in (Access.IN, Access.INOUT)) and not parameter.optional


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
