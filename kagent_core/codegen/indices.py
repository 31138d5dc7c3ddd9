"""Index arithmetic: sums of loop variables with whole factors, simplified by what is known of their bounds.

Views, broadcasting and reshapes are nothing but other sums; only where a dimension is cut up in a way that the loops do
not follow does a division or remainder stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kagent_core.codegen.expressions import Expr


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable: it runs from 0 to `extent` - 1.

    Attributes
    ----------
    name
        Unique in its kernel.
    extent
        Number of values; at least 1 where the loop has any.
    reduced
        Whether a reduction runs over it.
    """

    name: str
    extent: int
    reduced: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        return 0, max(self.extent - 1, 0)


@dataclass(frozen=True, slots=True)
class Quotient:
    """``index // divisor``, for an index that is never negative."""

    index: Index
    divisor: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        low, high = self.index.bounds
        return low // self.divisor, high // self.divisor


@dataclass(frozen=True, slots=True)
class Remainder:
    """``index % divisor``, for an index that is never negative."""

    index: Index
    divisor: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        return 0, min(self.index.bounds[1], self.divisor - 1)


@dataclass(frozen=True, slots=True)
class Computed:
    """An index that only running tells, such as an element of an index tensor; within known bounds."""

    value: Expr
    bounds: tuple[int, int]


Atom = Axis | Quotient | Remainder | Computed


@dataclass(frozen=True, slots=True)
class Index:
    """A sum ``constant + factor * atom + ...``, its terms in a fixed order.

    Examples
    --------
    >>> i, j = Axis("i", 4), Axis("j", 6)
    >>> flat = Index.of(i) * 6 + Index.of(j)
    >>> print(flat, "|", flat // 6, "|", flat % 6, "|", flat // 3)
    6*i + j | i | j | 2*i + j/3
    """

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    @staticmethod
    def of(value: Atom | Index | int) -> Index:
        """Return an axis, another atom or a number as an index."""
        if isinstance(value, Index):
            return value
        if isinstance(value, int):
            return Index((), value)
        if isinstance(value, Axis) and value.extent == 1:
            return Index()
        return Index(((value, 1),))

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value that it can have."""
        low = high = self.constant
        for atom, factor in self.terms:
            least, greatest = atom.bounds
            low += factor * (least if factor > 0 else greatest)
            high += factor * (greatest if factor > 0 else least)
        return low, high

    @property
    def axes(self) -> frozenset[Axis]:
        """Every axis that it depends on."""
        found: set[Axis] = set()
        for atom, _ in self.terms:
            if isinstance(atom, Axis):
                found.add(atom)
            elif isinstance(atom, Computed):
                found |= atom.value.axes
            else:
                found |= atom.index.axes
        return frozenset(found)

    def factor(self, axis: Axis) -> int:
        """Return the factor of an axis among the terms, 0 where it is none."""
        return next((factor for atom, factor in self.terms if atom == axis), 0)

    def __add__(self, other: Index | int) -> Index:
        other = Index.of(other)
        if not other.terms:
            return self if other.constant == 0 else Index(self.terms, self.constant + other.constant)
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0) + factor
        return _sum(factors.items(), self.constant + other.constant)

    def __sub__(self, other: Index | int) -> Index:
        return self + Index.of(other) * -1

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        return Index(tuple((atom, own * factor) for atom, own in self.terms), self.constant * factor)

    def __floordiv__(self, divisor: int) -> Index:
        if divisor == 1:
            return self
        whole, rest = self._split(divisor)
        _, high = rest.bounds
        if high < divisor:
            return whole
        if len(rest.terms) == 1 and rest.constant == 0 and rest.terms[0][1] == 1:
            atom = rest.terms[0][0]
            if isinstance(atom, Quotient):
                return whole + Index.of(Quotient(atom.index, atom.divisor * divisor))
        common = math.gcd(divisor, rest.constant, *(factor for _, factor in rest.terms))
        if common > 1:
            return whole + Index(tuple((a, f // common) for a, f in rest.terms), rest.constant // common) // (
                divisor // common
            )
        coarse = rest._in_steps(divisor)
        if coarse is not None:
            step, steps, _ = coarse
            return whole + steps // (divisor // step)
        return whole + Index.of(Quotient(rest, divisor))

    def __mod__(self, divisor: int) -> Index:
        if divisor == 1:
            return Index()
        _, rest = self._split(divisor)
        _, high = rest.bounds
        if high < divisor:
            return rest
        coarse = rest._in_steps(divisor)
        if coarse is not None:
            step, steps, fine = coarse
            return steps % (divisor // step) * step + fine
        return Index.of(Remainder(rest, divisor))

    def substitute(self, replaced: dict[Axis, Index]) -> Index:
        """Return the index with other indices in the place of axes that stand in the sum by themselves."""
        total = Index((), self.constant)
        for atom, factor in self.terms:
            total += (replaced.get(atom, Index.of(atom)) if isinstance(atom, Axis) else Index.of(atom)) * factor
        return total

    def _in_steps(self, divisor: int) -> tuple[int, Index, Index] | None:
        """Return (step, steps, fine): ``self == steps * step + fine``, `fine` is less than `step`, which divides."""
        for step in sorted({math.gcd(divisor, factor) for _, factor in self.terms}, reverse=True):
            if 1 < step < divisor:
                steps, fine = self._split(step)
                _, high = fine.bounds
                if high < step:
                    return step, steps, fine
        return None

    def _split(self, divisor: int) -> tuple[Index, Index]:
        """Return (whole, rest): ``self == whole * divisor + rest``, `rest` not negative, all that can be in `whole`."""
        whole: list[tuple[Atom, int]] = []
        rest: list[tuple[Atom, int]] = []
        for atom, factor in self.terms:
            if factor % divisor == 0:
                whole.append((atom, factor // divisor))
            else:
                rest.append((atom, factor))
        remainder = Index(tuple(rest), self.constant % divisor)
        low, _ = remainder.bounds
        # what counts backwards is lifted above 0 by whole divisors
        remainder += -(min(low, 0) // divisor) * divisor
        return Index(tuple(whole), (self.constant - remainder.constant) // divisor), remainder

    def __str__(self) -> str:
        parts = [_text(atom) if factor == 1 else f"{factor}*{_text(atom)}" for atom, factor in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


def _text(atom: Atom) -> str:
    if isinstance(atom, Axis):
        return atom.name
    if isinstance(atom, Computed):
        return f"[{atom.value}]"
    inner = str(atom.index) if len(atom.index.terms) == 1 and not atom.index.constant else f"({atom.index})"
    return f"{inner}{'/' if isinstance(atom, Quotient) else '%'}{atom.divisor}"


def _sum(factors: Iterable[tuple[Atom, int]], constant: int) -> Index:
    return Index(tuple((atom, factor) for atom, factor in factors if factor != 0), constant)


def flatten(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """Return the row-major position of an element."""
    position = Index()
    for part, size in zip(index, shape, strict=True):
        position = position * size + part
    return position


def unflatten(position: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """Return the index of the element at a row-major position.

    Examples
    --------
    >>> i, j = Axis("i", 4), Axis("j", 6)
    >>> [str(part) for part in unflatten(Index.of(i) * 6 + Index.of(j), (2, 2, 6))]
    ['i/2', 'i%2', 'j']
    """
    parts: list[Index] = []
    last = len(shape) - 1
    step = 1
    for number, size in enumerate(reversed(shape)):
        if size == 1:
            parts.append(Index())
            continue
        part = position // step
        is_first = number == last or math.prod(shape[: last - number]) == 1
        parts.append(part if is_first else part % size)
        step *= size
    return tuple(reversed(parts))


def refine(shapes: Iterable[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the coarsest shape of which every given shape is a view that joins dimensions; None if there is none.

    All have the same number of elements, at least one.

    Examples
    --------
    >>> refine([(4, 6), (24,), (2, 12)]), refine([(4, 6), (3, 8)])
    ((2, 2, 6), None)
    """
    cuts: set[int] = set()
    for shape in shapes:
        step = 1
        for size in reversed(shape):
            step *= size
            cuts.add(step)
    cuts.discard(1)
    sizes: list[int] = []
    below = 1
    for cut in sorted(cuts):
        if cut % below:
            return None
        sizes.append(cut // below)
        below = cut
    return tuple(reversed(sizes))


def offset_of(index: Sequence[Index], strides: Sequence[int], constant: int = 0) -> Index:
    """Return where an element lies, in elements."""
    offset = Index((), constant)
    for part, stride in zip(index, strides, strict=True):
        offset += part * stride
    return offset
