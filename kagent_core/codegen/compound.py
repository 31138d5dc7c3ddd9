"""Compound reductions: those whose running state has several parts, such as a value and where it is.

Each kind is described once: what a block of elements comes to, which takes plain reductions one after the other while
the block is in the nearest cache, and how the states of two blocks become one. So memory is read once, however long a
row is. An element by itself is a block of one (`of_one`): that is how a device takes elements one at a time, which
has many threads and little cache for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kagent_core.codegen.elements import Element

State = Sequence[Element]
"""The parts of a running state, in the order of `Compound.parts`."""


class Block(Protocol):
    """Elements that are reduced together."""

    @property
    def count(self) -> Element:
        """How many there are, as an int64."""

    def reduce(self, kind: str, value: Callable[..., Element]) -> Element:
        """Reduce what `value` makes of each of them with a plain kind of reduction.

        `value` gets what the compound reduction takes of an element: its value, and its place where that counts.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a running state.

    Attributes
    ----------
    name
        What it is called in kernels.
    first
        What it is before anything is taken: a number, or ``least`` or ``greatest`` for the end of its type's range.
        The type is that of what a block gives.
    """

    name: str
    first: float | str = 0


@dataclass(frozen=True, slots=True)
class Compound:
    """A kind of compound reductions.

    Attributes
    ----------
    name
        As it is called in dumps and kernels.
    parts
        Of the running state. Before anything is taken, merging it with another state gives the other.
    of_block
        What a block of elements comes to, a part after the other.
    merge
        What two states are together. The first one's elements need not come first.
    unchanged
        Given a state and the first part of a block's, whether merging the two would give the state itself: then the
        other parts of the block need not be found. None where every element counts.
    """

    name: str
    parts: tuple[Part, ...]
    of_block: Callable[[Block], State]
    merge: Callable[[State, State], State]
    unchanged: Callable[[State, Element], Element] | None = None


class _One:
    """A block of one element."""

    def __init__(self, taken: Sequence[Element]) -> None:
        self._taken = taken

    @property
    def count(self) -> Element:
        return Element(self._taken[0].made_by.constant(1, "int64"), self._taken[0].made_by)

    def reduce(self, kind: str, value: Callable[..., Element]) -> Element:
        found = value(*self._taken)
        return found.op("fmax", -math.inf) if kind == "fmax" and found.is_float else found


def of_one(kind: Compound, *taken: Element) -> State:
    """Return the state of one element."""
    return kind.of_block(_One(taken))


# -- the first greatest or least element, and where it is


def _position(order: str) -> Compound:
    """Return the kind that finds an extreme and its place: NaN before all others, the first of equals."""

    def of_block(block: Block) -> State:
        top = block.reduce(order, lambda value, place: value)

        def found(value: Element, place: Element) -> Element:
            here = value.equals(top) | value.op("isnan") if value.is_float else value.equals(top)
            return here.where(place, 2**31 - 1 if place.dtype == "int32" else 2**63 - 1)

        return top, block.reduce("min", found)

    def merge(one: State, other: State) -> State:
        (value, place), (others, its_place) = one, other
        beats = others > value if order == "max" else others < value
        equal = others.equals(value)
        if value.is_float:
            beats |= others.op("isnan") & ~value.op("isnan")
            equal |= others.op("isnan") & value.op("isnan")
        taken = beats | (equal & (its_place < place))
        return taken.where(others, value), taken.where(its_place, place)

    def unchanged(state: State, others: Element) -> Element:
        value = state[0]
        worse = others < value if order == "max" else others > value
        return worse | (value.op("isnan") & ~others.op("isnan")) if value.is_float else worse

    # where nothing is better than the end of the range, everything equals it: the first one is at 0
    parts = (Part("value", "least" if order == "max" else "greatest"), Part("place"))
    return Compound(f"arg{order}", parts, of_block, merge, unchanged)


# -- mean and variance


def _moments_of_block(block: Block) -> State:
    total = block.reduce("sum", lambda value: value)
    middle = total / block.count.to(total.dtype)

    def square(value: Element) -> Element:
        return (value - middle) * (value - middle)

    squares = block.reduce("sum", square)
    count, mean, spread = (part.widened() for part in (block.count, middle, squares))
    if total.dtype != "float64":  # what rounding the mean has cost: much, where it is large beside the deviation
        rest = block.reduce("sum", lambda value: value - middle).widened()
        mean, spread = mean + rest / count, spread - rest * (rest / count)
    return count, mean, spread


def _merged_moments(one: State, other: State) -> State:
    """Return the moments of two sets together (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm)."""
    (count, mean, squares), (its_count, its_mean, its_squares) = one, other
    both = count + its_count
    share = its_count / both
    apart = its_mean - mean
    infinite = mean.op("isinf") | its_mean.op("isinf")
    middle = infinite.where(mean + its_mean, mean + apart * share)
    return both, middle, squares + its_squares + apart * (apart * (count * share))


# -- softmax


def _weights_of_block(block: Block) -> State:
    # a NaN need not be the greatest: it makes the sum NaN
    top = block.reduce("fmax", lambda value: value)
    shift = _finite(top)
    return top, block.reduce("sum", lambda value: (value - shift).op("exp")).widened()


def _finite(top: Element) -> Element:
    """Return what exponents are taken less of: 0 for an infinity, since nothing is left of itself less itself."""
    return top.op("isinf").where(0, top)


def _merged_weights(one: State, other: State) -> State:
    (top, weights), (its_top, its_weights) = one, other
    higher = (its_top > top).where(its_top, top)
    shift = _finite(higher)
    scale, its_scale = ((value - shift).op("exp").widened() for value in (top, its_top))
    return higher, weights * scale + its_weights * its_scale


ARGMAX, ARGMIN = _position("max"), _position("min")
"""Take a value and its place; give the first greatest or least value and its place."""

WELFORD = Compound(
    "welford",
    (Part("count"), Part("mean"), Part("squares")),
    _moments_of_block,
    _merged_moments,
)
"""Takes a value; gives how many there are, their mean, and the sum of the squares of their differences from it."""

SOFTMAX = Compound("softmax", (Part("top", "least"), Part("weights")), _weights_of_block, _merged_weights)
"""Takes a value; gives the greatest that is no NaN, and the sum of exp of each, less that one where it is finite."""

COMPOUNDS = {kind.name: kind for kind in (ARGMAX, ARGMIN, WELFORD, SOFTMAX)}
"""By name."""
