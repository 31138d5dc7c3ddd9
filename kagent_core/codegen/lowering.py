"""From operators to loops: a group of calls becomes one nest of loops around expressions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kagent_core.codegen.arguments import full_arguments, operand_names
from kagent_core.codegen.dtypes import SUPPORTED, common_dtype, compute_dtype
from kagent_core.codegen.elements import Element, Indices, Operand, is_number
from kagent_core.codegen.expressions import Expr, Expressions, operands, walk
from kagent_core.codegen.indices import Axis, Computed, Index, flatten, offset_of, unflatten
from kagent_core.codegen.kernel import LoopNest, Store
from kagent_core.codegen.nest import Nest, flat_position, normalized_dims
from kagent_core.codegen.primitives import COSTLY, PRIMITIVES
from kagent_core.codegen.reduced import Reduced
from kagent_core.codegen.table import NotLoweredError, Operands, Rule, RuleTable
from kagent_core.specs import OpCall, TensorSpec

MOST_REPEATED = 2
"""How many times as often as there are elements a costly value may be computed."""


class Lowering:
    """The lowering of one group of calls. Rules get it as their first argument.

    Parameters
    ----------
    calls
        In order. Each has a rule in `table`.
    table
        The rules.
    stored
        Buffers of results that the kernel writes; None for all of them.
    round_halves
        See `Expressions`.
    given
        For an epilogue, the tensor whose elements the kernel around it computes.
    one_pass
        Whether rows are read once wherever they can be, element by element: where no cache holds them in between.
    wide
        See `Expressions`.

    Attributes
    ----------
    result
        While a rule is called, the first tensor that its operator returns.

    Raises
    ------
    NotLoweredError
        When the calls cannot be one nest of loops.
    """

    result: TensorSpec

    def __init__(
        self,
        calls: Sequence[OpCall],
        table: RuleTable,
        stored: Collection[int] | None,
        round_halves: bool = True,
        given: TensorSpec | None = None,
        one_pass: bool = False,
        wide: str = "float64",
    ) -> None:
        self.one_pass = one_pass
        self.expressions = Expressions(round_halves, wide)
        self._calls = tuple(calls)
        self._table = table
        self._stored = stored
        self._made: dict[int, tuple[TensorSpec, Callable[[Indices], Element]]] = {}
        self._labels: dict[int, str] = {}
        self._memo: dict[Any, Element] = {}
        self._elements: dict[int, tuple[str, TensorSpec, Expr]] = {}
        self._axes_made = 0
        self._rules = [self._rule(call) for call in self._calls]
        self.nest = Nest(self._calls, self._rules, self._is_stored)
        if given is not None:
            self._made[given.buffer] = (given, lambda index: self._given(given, index))

    def run(self) -> LoopNest:
        """Return the loops."""
        for call, rule in zip(self._calls, self._rules, strict=True):
            self._lower(call, rule)
        stores = tuple(
            self._store(call, spec) for call in self._calls for spec in call.outputs if self._is_stored(spec)
        )
        if not stores:
            raise NotLoweredError("nothing that it makes is read outside")
        _check_rows(stores, self._calls)
        if len(self._calls) > 1:
            self._check_work()
        return LoopNest(self.nest.outer, self.nest.inner, stores, self._labels, self._calls)

    # -- for rules

    def constant(self, value: bool | float, dtype: str) -> Element:
        """Return a number."""
        return Element(self.expressions.constant(value, dtype), self.expressions)

    def size(self, value: int, dtype: str) -> Element:
        """Return a number that depends on shapes: a parameter, so that the same kernel serves other shapes."""
        return Element(self.expressions.size(value, dtype), self.expressions)

    def index_value(self, index: Index | int, dtype: str = "int64") -> Element:
        """Return an index as an element."""
        return Element(self.expressions.index(Index.of(index), dtype), self.expressions)

    def place(self, value: Element, size: int) -> Index:
        """Return a computed int64 as an index; wherever it counts, it is from 0 to `size` - 1."""
        return Index.of(Computed(value.expr, (0, max(size - 1, 0))))

    def is_made(self, spec: TensorSpec) -> bool:
        """Whether an earlier call of the group computes a tensor: it is not read from memory."""
        return spec.buffer in self._made

    def masked(self, condition: Element, value: Callable[[], Element], otherwise: Element | bool | float) -> Element:
        """Return what `value` gives where a condition holds, which memory is only read there; else `otherwise`."""
        if condition.expr.op == "constant" and condition.expr.payload:
            return value()
        with self.expressions.masked(condition.expr):
            then = value()
        return condition.where(then, otherwise)

    def reduced(self, operand_shape: Sequence[int], dims: int | Sequence[int] | None) -> Reduced:
        """Return the loops over some dimensions of a shape; None or no dimensions stand for all of them."""
        return Reduced(self, tuple(operand_shape), normalized_dims(dims, len(operand_shape)))

    def new_axes(self, sizes: Sequence[int], taken: Collection[Axis]) -> tuple[tuple[Axis, ...], Indices]:
        """Return loop variables for a reduction over some sizes, none of them in `taken`, and an index per size."""
        own = self.nest.inner
        if math.prod(axis.extent for axis in own) == math.prod(sizes) and own and not set(own) & set(taken):
            flat = flatten([Index.of(axis) for axis in own], [axis.extent for axis in own])
            return own, unflatten(flat, sizes)
        self._axes_made += 1
        axes = tuple(Axis(f"s{self._axes_made}_{n}", size, reduced=True) for n, size in enumerate(sizes))
        return axes, tuple(Index.of(axis) for axis in axes)

    # -- one call

    def _rule(self, call: OpCall) -> Rule:
        rule = self._table.find(call.signature)
        if rule is None:
            raise NotLoweredError(f"there is no lowering rule for {call.signature}")
        for spec in (*call.inputs, *call.outputs):
            if spec.dtype.name not in SUPPORTED:
                raise NotLoweredError(f"{call.name} has a tensor of {spec.dtype}, which generated kernels do not have")
            if spec.conj or spec.neg:
                raise NotLoweredError(f"{call.name} has a tensor that is lazily conjugated or negated")
        refused = rule.accepts(call) if rule.accepts is not None else None
        if refused is not None:
            raise NotLoweredError(f"{call.name}: {refused}")
        return rule

    def _lower(self, call: OpCall, rule: Rule) -> None:
        if all(spec.numel == 0 for spec in call.outputs):
            for empty in call.outputs:
                self._define(call, empty, functools.partial(_no_element, call))
            return
        self.result = next(spec for spec in call.results if spec is not None)
        arguments = {name: self._argument(value) for name, value in full_arguments(call).items()}
        if not rule.by_index:
            self._lower_pointwise(call, rule, arguments)
            return
        results = rule.function(self, **arguments)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(call.results):
            raise TypeError(f"the rule for {call.signature} gave {len(results)} results, not {len(call.results)}")
        for spec, result in zip(call.results, results, strict=True):
            if spec is not None and result is not None:
                self._define(call, spec, result)
            elif spec is not None:
                raise NotLoweredError(f"{call.name}: the rule gives no {spec}")

    def _lower_pointwise(self, call: OpCall, rule: Rule, arguments: Mapping[str, Any]) -> None:
        names = operand_names(call)
        target = self._operand_dtype(call, rule)
        spec = call.outputs[0]

        def element(index: Indices) -> Element:
            taken = {
                name: self._operand_at(value, index, target if name in names else None, name in rule.unrounded)
                for name, value in arguments.items()
            }
            made = rule.function(**taken)
            return made if isinstance(made, Element) else self.constant(made, spec.dtype.name)

        self._define(call, spec, element)

    def _operand_dtype(self, call: OpCall, rule: Rule) -> str | None:
        if rule.operands is Operands.RESULT:
            return call.outputs[0].dtype.name
        if rule.operands is Operands.OWN:
            return None
        values = full_arguments(call)
        return common_dtype(values[name] for name in operand_names(call) if values[name] is not None)

    def _operand_at(self, value: Any, index: Indices, dtype: str | None, unrounded: bool) -> Any:
        if not isinstance(value, Operand):
            if not is_number(value) or dtype is None:
                return value
            return self.constant(value, compute_dtype(dtype) if unrounded else dtype).compute()
        element = value.broadcast_at(index)
        if dtype is None:
            return element.compute()
        if unrounded and not value.shape:
            return element.to(compute_dtype(dtype))
        return element.to(dtype).compute()

    def _define(self, call: OpCall, spec: TensorSpec, result: Callable[[Indices], Element]) -> None:
        label = call.signature.partition("::")[2].partition(".")[0].lstrip("_")

        def element(index: Indices) -> Element:
            key = (spec.buffer, index, self.expressions.mask)
            found = self._memo.get(key)
            if found is None:
                found = self._memo[key] = result(index).to(spec.dtype.name)
                self._labels.setdefault(found.expr.number, label)
                self._elements.setdefault(found.expr.number, (call.name, spec, found.expr))
            return found

        self._made[spec.buffer] = (spec, element)

    # -- tensors

    def _argument(self, value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return self.operand(value)
        if isinstance(value, tuple):
            return tuple(self._argument(item) for item in value)
        return value

    def operand(self, spec: TensorSpec) -> Operand:
        """Return a tensor as rules see it: made by an earlier call of the group, or in memory."""
        made = self._made.get(spec.buffer)
        if made is None:
            return Operand(spec, lambda index: self._load(spec, index))
        base, element = made
        if (base.shape, base.strides, base.storage_offset) == (spec.shape, spec.strides, spec.storage_offset):
            return Operand(spec, lambda index: element(self._within(index, spec.shape)))
        return Operand(spec, lambda index: element(_seen_through(spec, base, self._within(index, spec.shape))))

    def _within(self, index: Indices, shape: Sequence[int]) -> Indices:
        """Return an index whose bounds are those of a shape: what lies beyond is ruled out by a condition."""
        return tuple(
            part if part.bounds[0] >= 0 and part.bounds[1] < size else self.place(self.index_value(part), size)
            for part, size in zip(index, shape, strict=True)
        )

    def _load(self, spec: TensorSpec, index: Indices) -> Element:
        return Element(self.expressions.load(spec, offset_of(index, spec.strides)), self.expressions)

    def _given(self, spec: TensorSpec, index: Indices) -> Element:
        """Return the element that an epilogue begins with, which is known at one place only: the loops' own."""
        flat = flatten(index, spec.shape)
        if flat != flat_position(self.nest.outer):
            raise NotLoweredError(f"{spec} is read at other places than where it is made")
        dtype = spec.dtype.name
        given = self.expressions.given(compute_dtype(dtype), flat.axes)
        return Element(self.expressions.cast(given, dtype), self.expressions)

    def _check_work(self) -> None:
        """A costly value must not be computed much more often than its tensor has elements."""
        for name, spec, expr in self._elements.values():
            axes = [number for number, axis in enumerate(self.nest.axes) if axis in expr.axes]
            times = math.prod(axis.extent for axis in self.nest.axes[: max(axes, default=-1) + 1])
            if times > MOST_REPEATED * spec.numel and self._is_costly(expr):
                raise NotLoweredError(f"{name} would be computed {times} times for the {spec.numel} elements of {spec}")

    def _is_costly(self, expr: Expr) -> bool:
        """Whether an operator's own expression, without its operands', has a function that takes long."""
        stack = [expr]
        while stack:
            node = stack.pop()
            if node.op in PRIMITIVES and PRIMITIVES[node.op].cost >= COSTLY:
                return True
            stack.extend(arg for arg in operands(node) if arg.number not in self._elements)
        return False

    # -- stores

    def _is_stored(self, spec: TensorSpec) -> bool:
        return spec.numel > 0 and (self._stored is None or spec.buffer in self._stored)

    def _store(self, call: OpCall, spec: TensorSpec) -> Store:
        position = self.nest.position_of(spec)
        if position is None:
            raise NotLoweredError(f"{call.name} makes {spec}, which is neither the size of the loops nor of their rows")
        flat, per_row = position
        index = unflatten(flat, spec.shape)
        element = self._made[spec.buffer][1](index)
        return Store(spec, offset_of(index, spec.strides), element.expr, per_row)


def _seen_through(spec: TensorSpec, base: TensorSpec, index: Indices) -> Indices:
    """Return the index into `base` of the element that a view of its memory has at an index."""
    order = sorted((d for d in range(len(base.shape)) if base.shape[d] != 1), key=lambda d: (-base.strides[d], d))
    expected = 1
    for dim in reversed(order):
        if base.strides[dim] != expected:
            raise NotLoweredError(f"{base} with strides {base.strides}, which leaves gaps, is read as a view")
        expected *= base.shape[dim]
    offset = offset_of(index, spec.strides, spec.storage_offset - base.storage_offset)
    parts = unflatten(offset, [base.shape[dim] for dim in order])
    found = dict(zip(order, parts, strict=True))
    return tuple(found.get(dim, Index()) for dim in range(len(base.shape)))


def _no_element(call: OpCall, index: Indices) -> Element:
    raise NotLoweredError(f"what {call.name} makes has no elements")


def _check_rows(stores: Iterable[Store], calls: Sequence[OpCall]) -> None:
    """A reduction's value must be one per row: the loops around it are the outer ones."""
    for node in walk(*(store.value for store in stores)):
        if node.op == "reduce" and any(axis.reduced for axis in node.axes):
            raise NotLoweredError(f"a reduction of {calls[0].name} is needed at every step of another one")
    for store in stores:
        if store.per_row and any(axis.reduced for axis in store.value.axes):
            raise NotLoweredError(f"what is stored per row, {store.tensor}, depends on the place in the row")
