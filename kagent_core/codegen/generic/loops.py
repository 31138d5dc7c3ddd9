"""What parametrised kernels share: names of loops, nests of loops, steps along one dimension, extremes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kagent_core.codegen.dtypes import FLOATS
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.specs import TensorSpec

Loop = tuple[str, str] | tuple[str, str, str] | tuple[str, str, str, str]
"""Name, end, start and step of a loop; it starts at 0 and steps by 1 where nothing else is said."""


def names(prefix: str, count: int) -> list[str]:
    """Return as many names as asked for."""
    return [f"{prefix}{number}" for number in range(count)]


@contextmanager
def nest(k: KernelBuilder, *loops: Loop) -> Iterator[None]:
    """Write loops inside each other, outermost first, each given as name, end, start and step, as to `loop`.

    Without loops it is a block that runs once.
    """
    with ExitStack() as stack:
        if not loops:
            stack.enter_context(k.block(""))
        for name, end, *rest in loops:
            start = rest[0] if rest else 0
            step = rest[1] if len(rest) > 1 else 1
            stack.enter_context(k.loop(name, end, start, step))
        yield


def unflattened(k: KernelBuilder, flat: str, shape: Sequence[int]) -> list[str]:
    """Return the index of an element that is given by its number in row-major order."""
    places = []
    for d, size in enumerate(shape):
        inner = math.prod(shape[d + 1 :])
        place = f"{flat} / {k.size(inner)}" if inner != 1 else flat
        places.append(f"({place}) % {k.size(size)}" if d else place)
    return places


def flattened(k: KernelBuilder, places: Sequence[str], shape: Sequence[int]) -> str:
    """Return the number, in row-major order, of an element whose index is given."""
    flat = places[0]
    for place, size in zip(places[1:], shape[1:], strict=True):
        flat = f"({flat}) * {k.size(size)} + {place}"
    return flat


def broadcast(places: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Return the index into something that is broadcast: its last dimensions are the last ones."""
    last = places[len(places) - len(shape) :]
    return ["0" if size == 1 else place for place, size in zip(last, shape, strict=True)]


class Rows:
    """The rows of a tensor along one dimension, each of which one work-item has to itself.

    A tensor without dimensions is one row of one element.

    Parameters
    ----------
    spec
        The tensor.
    dim
        The dimension; may be negative.
    """

    def __init__(self, spec: TensorSpec, dim: int) -> None:
        self.rank = len(spec.shape)
        self.dim = dim % max(self.rank, 1)
        self.length = spec.shape[self.dim] if spec.shape else 1
        others = [d for d in range(self.rank) if d != self.dim]
        self.axes = [(f"d{d}", spec.shape[d]) for d in others] or [("d", 1)]

    def place(self, step: str, rank: int | None = None) -> list[str]:
        """Return the index of an element of the row, for a tensor of this or another number of dimensions."""
        rank = self.rank if rank is None else rank
        return [step if d == self.dim else f"d{d}" for d in range(rank)]

    def reduced(self, rank: int) -> list[str]:
        """Return the index of the row's one element in a result without the dimension, or with a size of 1 there."""
        if rank == self.rank:
            return self.place("0")
        return [f"d{d}" for d in range(self.rank) if d != self.dim]


def greater(dtype: str, a: str, b: str) -> str:
    """Return the greater of two variables; NaN when one is, as ATen."""
    nan = f" || {a} != {a}" if dtype in FLOATS else ""
    return f"({a} > {b}{nan} ? {a} : {b})"


def smaller(dtype: str, a: str, b: str) -> str:
    """Return the smaller of two variables; NaN when one is, as ATen."""
    nan = f" || {a} != {a}" if dtype in FLOATS else ""
    return f"({a} < {b}{nan} ? {a} : {b})"


def comes_before(dtype: str, descending: bool, a: str, a_at: str, b: str, b_at: str) -> str:
    """Return whether one element comes before another in a sorted row, each given as a variable and its position.

    NaN is the greatest value; equal ones keep their order.
    """

    def precedes(a: str, b: str) -> str:
        lower, higher = (b, a) if descending else (a, b)
        nan = f" || ({higher} != {higher} && {lower} == {lower})" if dtype in FLOATS else ""
        return f"({a} {'>' if descending else '<'} {b}{nan})"

    return f"({precedes(a, b)} || (!{precedes(b, a)} && {a_at} < {b_at}))"
