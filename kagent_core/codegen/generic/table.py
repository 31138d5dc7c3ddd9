"""The table of parametrised kernels, by exact signature."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kagent_core.codegen.arguments import full_arguments
from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.dtypes import SUPPORTED
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.leading import with_what_is_read
from kagent_core.codegen.generic.place_sums import without_sums
from kagent_core.codegen.generic.tiles import DEFAULT_TILES, Tiles
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.table import LoweringKind, NotLoweredError, RuleTable
from kagent_core.specs import OpCall
from kagent_core.specs.tiles import Tiles as LaunchTiles


@dataclass(frozen=True)
class Wanted:
    """What a kernel of several calls is made for; all is as for `KernelBuilder`."""

    summed: OpCall | None
    stored: Collection[int]
    language: CFamily
    rules: RuleTable
    round_halves: bool
    tiles: Tiles


class SeveralCalls(Protocol):
    """Writes one kernel of several calls of an operator, and of pointwise operators on what each of them makes."""

    def refusal(self, calls: Sequence[OpCall], is_pointwise: Callable[[OpCall], bool]) -> str | None:
        """Return why there is none, as far as the calls tell; None when there is one."""

    def source(self, name: str, calls: Sequence[OpCall], wanted: Wanted) -> KernelSource:
        """Return the kernel, or raise a `NotLoweredError`."""


@dataclass(frozen=True, slots=True)
class GenericRule:
    """How one operator's parametrised kernel is written.

    Attributes
    ----------
    signature
        The exact overload.
    function
        Called with a `KernelBuilder` and the operator's arguments by name, as `TensorSpec` and plain values, defaults
        filled in; writes the kernel's body.
    accepts
        Given a call, returns why the kernel does not take it, or None.
    epilogue
        Whether pointwise operators that follow can be computed where a result is stored.
    several
        What writes one kernel of several calls of it, each of which reads what the one before has made; None for none.
    """

    signature: str
    function: Callable[..., None]
    accepts: Callable[[OpCall], str | None] | None
    epilogue: bool
    several: SeveralCalls | None = None

    def is_repeated(self, calls: Sequence[OpCall]) -> bool:
        """Whether the operator is among some calls."""
        return any(call.signature == self.signature for call in calls)


class GenericKernels:
    """Parametrised kernels by signature.

    Parameters
    ----------
    rules
        Lowering rules, for the pointwise operators of epilogues.
    round_halves
        As for `kagent_core.codegen.expressions.Expressions`.
    tiles
        How much of a product one work-item computes, where no launch config says otherwise.
    """

    def __init__(
        self, table: GenericTable, rules: RuleTable, round_halves: bool = True, tiles: Tiles = DEFAULT_TILES
    ) -> None:
        self._table = table
        self._rules = rules
        self._round_halves = round_halves
        self._tiles = tiles

    def __contains__(self, signature: str) -> bool:
        return signature in self._table

    def refusal(self, calls: Sequence[OpCall]) -> str | None:
        """Return why there is no parametrised kernel for some calls, or None when there is one."""
        (first, *rest), summed = without_sums(with_what_is_read(calls))
        rule = self._table.find(first.signature)
        if rule is None:
            return f"there is no parametrised kernel for {first.signature}"
        for spec in (*first.inputs, *first.outputs):
            if spec.dtype.name not in SUPPORTED:
                return f"{first.name} has a tensor of {spec.dtype}, which generated kernels do not have"
            if spec.conj or spec.neg:
                return f"{first.name} has a tensor that is lazily conjugated or negated"
        if summed is not None and any(set(call.inputs).intersection(summed.outputs) for call in rest):
            return f"what {summed.name} adds up is known when all else is done, and read before"
        refused = rule.accepts(first) if rule.accepts is not None else None
        if refused is None and rule.several is not None and rule.is_repeated(rest):
            return rule.several.refusal([first, *rest], self._is_pointwise)
        return refused or (self._epilogue_refusal(rule, first, rest, summed) if rest or summed is not None else None)

    def source(
        self, calls: Sequence[OpCall], stored: Collection[int], language: CFamily, sizes: LaunchTiles = ()
    ) -> KernelSource:
        """Return the kernel for some calls, of which `refusal` was None; its function is called ``KERNEL``.

        Parameters
        ----------
        calls
            In order.
        stored
            Buffers of the results that it writes.
        language
            The device's.
        sizes
            Tile sizes that take the place of the device's.

        Raises
        ------
        LaunchConfigError
            When a work-item has too little memory for the tiles.
        NotLoweredError
            When there is none with a place for all of them, which its text alone tells.
        """
        (first, *rest), summed = without_sums(with_what_is_read(calls))
        rule = self._table.find(first.signature)
        if rule is None:
            raise KeyError(first.signature)
        tiles = replace(self._tiles.with_sizes(sizes), wide=language.wide)
        if rule.several is not None and rule.is_repeated(rest):
            wanted = Wanted(summed, stored, language, self._rules, self._round_halves, tiles)
            return rule.several.source("KERNEL_NAME", (first, *rest), wanted)
        builder = KernelBuilder(first, rest, stored, language, self._rules, self._round_halves, tiles, summed)
        rule.function(builder, **full_arguments(first))
        return builder.source("KERNEL_NAME")

    def _is_pointwise(self, call: OpCall) -> bool:
        rule = self._rules.find(call.signature)
        return rule is not None and rule.kind is LoweringKind.POINTWISE

    def _epilogue_refusal(
        self, rule: GenericRule, first: OpCall, rest: Sequence[OpCall], summed: OpCall | None
    ) -> str | None:
        if not rule.epilogue or len(first.results) != 1:
            return f"the parametrised kernel for {first.signature} has no place for what follows it"
        shape = first.outputs[0].shape
        for call in rest:
            if not self._is_pointwise(call) or call.outputs[0].shape != shape:
                return f"{call.name} does not compute one element from each of {first.name}"
        try:
            KernelBuilder(first, rest, None, CFamily(), self._rules, self._round_halves, summed=summed)
        except NotLoweredError as error:
            return str(error)
        return None


class GenericTable:
    """Rules of parametrised kernels by signature. The core's own is `kagent_core.codegen.generic.GENERIC`."""

    def __init__(self) -> None:
        self._rules: dict[str, GenericRule] = {}

    def find(self, signature: str) -> GenericRule | None:
        """Return the rule for an exact signature, or None."""
        return self._rules.get(signature)

    def __contains__(self, signature: str) -> bool:
        return signature in self._rules

    def __iter__(self) -> Iterator[GenericRule]:
        return iter(self._rules.values())

    def kernel(
        self,
        *signatures: str,
        accepts: Callable[[OpCall], str | None] | None = None,
        epilogue: bool = False,
        several: SeveralCalls | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register what writes the kernel of some operators: see `GenericRule`."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            for signature in signatures:
                if signature in self._rules:
                    raise ValueError(f"two parametrised kernels for {signature}")
                self._rules[signature] = GenericRule(signature, function, accepts, epilogue, several)
            return function

        return register
