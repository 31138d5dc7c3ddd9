"""The table of lowering rules: by exact signature, what an operator's elements are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class NotLoweredError(Exception):
    """Why no kernel can be made of some calls. Never reaches a user: they see the reason in a decision or an error."""


class LoweringKind(Enum):
    """What the loops of a lowered operator look like."""

    POINTWISE = "pointwise"  # an expression of the elements at the same, broadcast, place
    GATHER = "gather"  # an expression of elements at other places, which index arithmetic finds
    REDUCTION = "reduction"  # elements along some dimensions become one
    ROWS = "rows"  # reduces along some dimensions, and then goes over them again


class Operands(Enum):
    """The type that a pointwise rule gets its elements in."""

    RESULT = "result"  # that of the result
    COMMON = "common"  # the one that PyTorch promotes all operands to
    OWN = "own"  # each its own


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator is lowered.

    Attributes
    ----------
    signature
        The exact overload.
    kind
        What its loops look like.
    function
        The rule: see `pointwise` and `indexed`.
    operands
        For a pointwise rule, the type that its elements come in.
    accepts
        Given a call, returns why the rule does not take it, or None.
    unrounded
        For a pointwise rule, names of the arguments whose numbers and 0-dim tensors keep float32's precision where
        the other operands are of a half type; else they are rounded to that type first.
    loops
        Given a call, returns the result's shape cut up further, so that index arithmetic needs no division; or None.
    by_index
        Whether the rule says what is at an index: see `indexed`.
    """

    signature: str
    kind: LoweringKind
    function: Callable[..., Any]
    operands: Operands = Operands.RESULT
    accepts: Callable[[Any], str | None] | None = None
    unrounded: frozenset[str] = frozenset()
    loops: Callable[[Any], Sequence[int]] | None = None
    by_index: bool = False


class RuleTable:
    """Rules by signature. The core's own are in `kagent_core.codegen.rules`.

    Examples
    --------
    >>> table = RuleTable()
    >>> @table.pointwise("mylib::double")
    ... def double(x):
    ...     return x * 2
    >>> table.find("mylib::double").kind.value
    'pointwise'
    """

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def find(self, signature: str) -> Rule | None:
        """Return the rule for an exact signature, or None."""
        return self._rules.get(signature)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules.values())

    def __contains__(self, signature: str) -> bool:
        return signature in self._rules

    def pointwise(
        self,
        *signatures: str,
        operands: Operands = Operands.RESULT,
        accepts: Callable[[Any], str | None] | None = None,
        unrounded: Iterable[str] = (),
    ) -> Callable[[F], F]:
        """Register a rule that computes one element from the elements at its place.

        The rule is called with the operator's arguments by name: an `Element` for a tensor, broadcast and in the type
        that `operands` says (half types in float32), None for a tensor that was not given, anything else as it is;
        defaults filled in. What it returns is converted to the result's type.
        """
        return self._register(signatures, LoweringKind.POINTWISE, operands, accepts, frozenset(unrounded))

    def indexed(
        self,
        *signatures: str,
        kind: LoweringKind,
        accepts: Callable[[Any], str | None] | None = None,
        loops: Callable[[Any], Sequence[int]] | None = None,
    ) -> Callable[[F], F]:
        """Register a rule that says what is at an index of the result.

        The rule is called with the lowering first (`kagent_core.codegen.lowering.Lowering`) and then the operator's
        arguments by name: an `Operand` for a tensor (lists are tuples of them), anything else as it is; defaults filled
        in. It returns a function from an index of the result to its `Element`, or a tuple of them for several
        results, None for one that is not given. The element is converted to the result's type.
        """
        return self._register(signatures, kind, Operands.OWN, accepts, loops=loops, by_index=True)

    def _register(
        self,
        signatures: tuple[str, ...],
        kind: LoweringKind,
        operands: Operands,
        accepts: Callable[[Any], str | None] | None,
        unrounded: frozenset[str] = frozenset(),
        loops: Callable[[Any], Sequence[int]] | None = None,
        by_index: bool = False,
    ) -> Callable[[F], F]:
        def register(function: F) -> F:
            for signature in signatures:
                if signature in self._rules:
                    raise ValueError(f"two lowering rules for {signature}")
                self._rules[signature] = Rule(signature, kind, function, operands, accepts, unrounded, loops, by_index)
            return function

        return register
