"""How reductions are accumulated, whatever the order of the loops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kagent_core.codegen.c_family import SHORT, CFamily
from kagent_core.codegen.dtypes import FLOATS
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.text import bare

CHUNK = 32
"""Elements that one lane sums up in its own type before the sum goes on in float64: more would lose digits."""

LANES = 16
"""Lanes that a row's elements are dealt out to, as far as `CHUNK` is concerned: those of a wide vector."""

PARTS = 64
"""Pieces that a long row is cut into, which threads take; their results are combined in order, so always the same."""

OPENMP = {"sum": "+", "prod": "*", "max": "max", "min": "min", "fmax": "max", "any": "|", "all": "&"}
"""OpenMP's names of the reductions."""

EXTREMES = frozenset({"max", "min", "fmax"})
"""Reductions that keep one of the values."""


class Accumulator:
    """The running value of one reduction.

    Parameters
    ----------
    node
        The reduction.
    name
        Of the variable, or of the array with one element per lane.
    in_chunks
        For a sum, whether chunks are summed up by themselves, and their sums in the language's wider type.
    language
        How things are spelled.
    """

    def __init__(self, node: Expr, name: str, in_chunks: bool, language: CFamily) -> None:
        self.node = node
        self.name = name
        self.kind: str = node.payload.kind
        self._language = language
        self.type = language.value_type(node.dtype)
        self.in_chunks = in_chunks and self.kind == "sum" and node.dtype in FLOATS and node.dtype != "float64"
        self.tracks_nan = self.kind in ("max", "min") and node.dtype in FLOATS
        """Whether NaN is looked for on the side, so that the comparisons are a processor's own."""
        self.compensated = self.in_chunks and language.wide == "float32"
        """Whether what the sum of chunks loses is kept beside it, there being no wider type."""

    @property
    def running_type(self) -> str:
        """The running value's type."""
        return SHORT[self._language.wide] if self.in_chunks else self.type

    @property
    def first(self) -> str:
        """What it starts from."""
        language, dtype = self._language, self.node.dtype
        if self.kind in EXTREMES:
            return bare(language.least(dtype) if self.kind != "min" else language.greatest(dtype))
        return "1" if self.kind in ("prod", "all") else "0"

    @property
    def taking(self) -> str:
        """Name of what elements are taken into: the sum of the current chunk where there are chunks."""
        return f"{self.name}_chunk" if self.in_chunks else self.name

    def update(self, value: str, lane: str = "") -> list[str]:
        """Return statements that take one more value, given as a variable or number."""
        return self._update(self.taking, value, lane)

    def combine(self, found: str, lane: str = "") -> list[str]:
        """Return statements that take what was found in a part, given as a variable."""
        return self._update(self.name, found, lane)

    def _update(self, name: str, value: str, lane: str) -> list[str]:
        place = f"{name}{lane}"
        if self.kind in EXTREMES:
            sign = "<" if self.kind == "min" else ">"
            lines = [f"{place} = {value} {sign} {place} ? {value} : {place};"]
            return [*lines, f"{self.name}_nan{lane} |= {value} != {value};"] if self.tracks_nan else lines
        return [f"{place} {OPENMP[self.kind]}= {bare(value)};"]

    def add(self, value: str) -> str:
        """Return the statement that adds the sum of a chunk."""
        if self.compensated:
            return f"{self.name} = two_sum_{self.running_type}({self.name}, {bare(value)}, &{self.name}_rest);"
        return f"{self.name} += {bare(value)};"

    def rest(self) -> list[str]:
        """Return the statement that declares what the sum of chunks loses, where that is kept."""
        return [f"{self.running_type} {self.name}_rest = {self.first};"] if self.compensated else []

    def clauses(self) -> str:
        """Return the OpenMP clauses of a loop whose lanes reduce."""
        found = f" reduction({OPENMP[self.kind]}:{self.taking})"
        return f"{found} reduction(|:{self.name}_nan)" if self.tracks_nan else found

    def found(self, lane: str = "") -> str:
        """Return the running value once all is taken in."""
        if self.tracks_nan:
            return f"{self.name}_nan{lane} ? {self._language.literal(math.nan, self.node.dtype)} : {self.name}{lane}"
        return f"{self.name}{lane}"

    def result(self, lane: str = "") -> str:
        """Return the reduction's value once all is taken in."""
        if self.compensated:
            return f"two_summed_{self.running_type}({self.name}, {self.name}_rest)"
        return f"({self.type}){self.name}{lane}" if self.running_type != self.type else self.found(lane)


def chunked(axes: Sequence[Axis], chunk: int) -> tuple[int, int] | None:
    """Return which of some nested loops is cut up so that no more than a chunk of steps are inside, and its step.

    Returns
    -------
    tuple or None
        Position of the axis, and how many of its steps make a chunk; None where all loops together make one.

    Examples
    --------
    >>> chunked([Axis("i", 32), Axis("j", 784)], 1024), chunked([Axis("i", 1000), Axis("j", 4)], 1024)
    ((0, 1), (0, 256))
    >>> chunked([Axis("i", 32), Axis("j", 5000)], 1024), chunked([Axis("i", 32), Axis("j", 32)], 1024)
    ((1, 1024), None)
    """
    inside = 1
    for position in reversed(range(len(axes))):
        if inside * axes[position].extent > chunk:
            return position, max(chunk // inside, 1)
        inside *= axes[position].extent
    return None


def passes(reductions: Sequence[Expr]) -> Iterator[tuple[tuple[Axis, ...], list[Expr]]]:
    """Yield passes over the inner loops as (loop variables, reductions): each needs only what earlier ones gave.

    Parameters
    ----------
    reductions
        Operands first: of a nest those that are of whole rows, or those of the blocks of a compound reduction.
    """
    level: dict[int, int] = {}
    found: dict[tuple[int, tuple[Axis, ...]], list[Expr]] = {}
    for node in reductions:
        needed = [level[inner.number] for inner in walk(*node.args) if inner.number in level]
        level[node.number] = max(needed, default=-1) + 1
        found.setdefault((level[node.number], node.payload.axes), []).append(node)
    for key in sorted(found, key=lambda key: key[0]):
        yield key[1], found[key]
