"""What the lowering of a group gives: loops, in no language yet; and what printers make of it."""

from __future__ import annotations

from dataclasses import dataclass

from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.indices import Axis, Index
from kagent_core.specs import Access, OpCall, TensorSpec


@dataclass(frozen=True, slots=True)
class Store:
    """One tensor that a kernel writes.

    Attributes
    ----------
    tensor
        Where to; the kernel gets a pointer to its first element.
    offset
        From that first element, in elements.
    value
        What is written, in the tensor's type.
    per_row
        Whether it is written once per row, rather than at every step of the inner loops.
    """

    tensor: TensorSpec
    offset: Index
    value: Expr
    per_row: bool


@dataclass(frozen=True)
class LoopNest:
    """Loops around stores: all that a generated kernel does.

    The outer loops are independent of each other and may run in any order or at the same time. For each of their steps,
    a *row*, the reductions run over the inner loops, one after the other where they depend on each other, and then the
    stores.

    Attributes
    ----------
    outer, inner
        Loop variables, outermost first. `inner` is empty where nothing is reduced.
    stores
        In the order of the operators that made them.
    labels
        What the kernel shows of its operators: by the number of an expression, the operator's short name.
    calls
        The operators.
    """

    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    stores: tuple[Store, ...]
    labels: dict[int, str]
    calls: tuple[OpCall, ...]


@dataclass(frozen=True, slots=True)
class KernelArg:
    """One parameter of a generated kernel.

    Attributes
    ----------
    name
        In the kernel's language.
    type
        C type, such as ``const f32*`` or ``i64``.
    value
        The tensor whose first element the kernel gets a pointer to, or a number.
    access
        What it does with the tensor.
    """

    name: str
    type: str
    value: TensorSpec | int
    access: Access | None = None


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A generated kernel in a device's language.

    Attributes
    ----------
    name
        Of its function; the same for the same text.
    text
        The function, without what all kernels have in common.
    args
        Its parameters, in order.
    reports
        Whether its last parameter is a pointer to an int64 that it sets to a number when a check fails.
    items
        Independent pieces of work.
    lowered
        Whether it is loops around expressions rather than a parametrised kernel.
    threads
        How many threads a block must have, where they share each piece of work; None where each has its own.
    """

    name: str
    text: str
    args: tuple[KernelArg, ...]
    reports: bool = False
    items: int = 1
    lowered: bool = False
    threads: int | None = None
