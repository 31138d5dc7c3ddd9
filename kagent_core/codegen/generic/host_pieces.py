"""What kernels of attention on a CPU are made of: an item's memory, the loop over keys, weights times values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kagent_core.codegen.dtypes import NBITS
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.host_vectors import HostVectors

if TYPE_CHECKING:
    from kagent_core.codegen.generic.attention import Heads

LANES = 2
"""Vectors of queries that are computed with at a time."""

ROWS, ROWS_OF_FEW_REGISTERS = 8, 4
"""Rows of a tile whose sums are kept in registers, keys or queries: with 32 registers, and with fewer."""

WORK_NBYTES = 512 * 1024
"""Most bytes that an item works on: half of the second cache of a core."""


@dataclass(frozen=True)
class HostPieces:
    """An attention and the pieces that it is cut into.

    Attributes
    ----------
    queries, keys
        Of an item, and how many keys it takes at a time.
    lanes
        Values of a vector.
    rows
        Of a tile.
    """

    k: KernelBuilder
    heads: Heads
    queries: int
    keys: int
    lanes: int
    rows: int

    @classmethod
    def of(cls, k: KernelBuilder, heads: Heads, vectors: HostVectors) -> Self:
        """Return it, in pieces that fit into the caches."""
        lanes, nbytes = vectors.lanes(heads.compute), NBITS[heads.compute] // 8
        row = (heads.query.spec.shape[3] + whole(heads.value.spec.shape[3], lanes)) * nbytes
        rows = ROWS if vectors.registers >= 32 else ROWS_OF_FEW_REGISTERS
        queries = min(k.tiles.queries, WORK_NBYTES // 2 // row)
        keys = min(k.tiles.keys, WORK_NBYTES // 4 // row)
        return cls(k, heads, whole(queries, LANES * lanes), whole(keys, rows), lanes, rows)

    @property
    def size(self) -> int:
        """Elements of a query."""
        return self.heads.query.spec.shape[3]

    @property
    def width(self) -> int:
        """Elements of a value, in whole vectors."""
        return whole(self.heads.value.spec.shape[3], self.lanes)

    @property
    def across(self) -> int:
        """Queries that are computed with at a time."""
        return LANES * self.lanes

    @property
    def vector(self) -> str:
        """The type of a vector."""
        return f"vec_{self.heads.kind}"

    def load(self, place: str) -> str:
        """Return a vector of what lies at a place and behind it."""
        return f"load_{self.vector}(&{place})"

    def splat(self, value: str) -> str:
        """Return a vector of a single value."""
        return f"splat_{self.heads.kind}({value})"

    def store(self, place: str, value: str) -> None:
        """Write what puts a vector to a place and behind it."""
        self.k.add(f"store_{self.vector}(&{place}, {value});")

    @contextmanager
    def items(self) -> Iterator[None]:
        """Open items: some queries of a head each, from ``q_first`` to ``q_end`` - 1, for keys before ``limit``."""
        k, heads, kind = self.k, self.heads, self.k.index_type
        batch, count, length, _ = heads.query.spec.shape
        reach, shared = heads.key.spec.shape[2], count // max(heads.key.spec.shape[1], 1)
        axes = [("b", batch), ("h", count), ("chunk", -(-length // self.queries))]
        cost = (self.size + self.width) * min(self.queries, length) * reach // 16
        with k.items(*axes, steps=max(cost, 1)):
            k.add(f"const {kind} own = {'h' if shared <= 1 else f'h / {k.size(shared)}'};")
            k.add(f"const {kind} q_first = chunk * {self.queries};")
            k.add(f"const {kind} q_end = {k.least(k.size(length), f'q_first + {self.queries}')};")
            limit = k.size(reach)
            k.add(f"const {kind} limit = {k.least(limit, 'q_end') if heads.causal else limit};")
            yield

    @contextmanager
    def some_keys(self) -> Iterator[None]:
        """Write a loop over keys, from ``j_first`` to ``j_end`` - 1 each time."""
        k = self.k
        with k.loop("j_first", "limit", step=self.keys):
            k.add(f"const {k.index_type} j_end = {k.least('limit', f'j_first + {self.keys}')};")
            yield

    def nothing_yet(self, rows: int) -> None:
        """Write that nothing is summed up yet: ``out``, ``mass`` and the largest scores ``top`` of some queries."""
        k = self.k
        for name in ("top", "mass"):
            k.array(self.heads.kind, name, rows)
        with k.loop("t", rows, simd=True):
            k.add(f"top[t] = {k.language.least(self.heads.compute)}; mass[t] = 0;")
        with k.loop("t", f"(q_end - q_first) * {self.width}", simd=True):
            k.add("out[t] = 0;")

    def copy_values(self) -> None:
        """Write what copies the values of some keys."""
        k, heads, depth = self.k, self.heads, self.heads.value.spec.shape[3]
        k.array(heads.kind, "values", self.keys * self.width)
        with k.loop("t", "j_end - j_first"):
            k.add(f"const {k.index_type} j = j_first + t;")
            with k.loop("e", depth, simd=True):
                k.add(f"values[t * {self.width} + e] = {heads.value.at('b', 'own', 'j', 'e')};")
            if depth < self.width:
                with k.loop("e", self.width, depth, simd=True):
                    k.add(f"values[t * {self.width} + e] = 0;")

    def added(self, query: str, key: str) -> str:
        """Return what the mask adds to the score of a query and a key."""
        bias, k = self.heads.bias, self.k
        assert bias is not None
        own = bias.at(*("b", "h", query, key)[4 - len(bias.spec.shape) :])
        return f"({own} ? 0 : {k.language.least(self.heads.compute)})" if bias.dtype == "bool" else own

    def zero(self, sums: Sequence[Sequence[str]]) -> None:
        """Declare sums that stay in registers, a vector each."""
        for names in sums:
            self.k.add(f"{self.vector} {', '.join(f'{name} = {{0}}' for name in names)};")

    def multiply(
        self,
        sums: Sequence[Sequence[str]],
        end: str,
        row: Callable[[int, str], str],
        column: Callable[[str, int], str],
        first: str = "0",
    ) -> None:
        """Write a loop that adds products to sums: of single values of rows, and vectors."""
        k = self.k
        vectors = range(len(sums[0]))
        with k.loop("d", end, first):
            for v in vectors:
                k.add(f"const {self.vector} b_{v} = {self.load(column('d', v))};")
            for n, names in enumerate(sums):
                k.add(f"const {self.vector} a_{n} = {self.splat(row(n, 'd'))};")
                for v, name in enumerate(names):
                    k.add(f"{name} = mad_{self.vector}(a_{n}, b_{v}, {name});")

    def add_values(
        self,
        rows: int,
        weight: Callable[[int, str], str],
        out: Callable[[int], str],
        shrink: Callable[[int], str],
        pitch: str | None = None,
    ) -> None:
        """Write what values, by their weights, add to what some queries have, after that has shrunk.

        Parameters
        ----------
        rows
            Queries.
        weight
            Given which query, and which key, its weight.
        out
            Given which query, what it has, up to the first element: ``out[...``.
        shrink
            What is multiplied with that first.
        pitch
            How far ``values`` are apart, if not just as far as they are copied to.
        """
        k, vectors = self.k, self.width // self.lanes
        most = max(LANES * self.rows // rows, 1)
        whole_tiles, rest = divmod(vectors, most)
        if rest == 1 and whole_tiles and rows > 1:
            whole_tiles, rest = whole_tiles - 1, most + 1  # one vector alone has too few sums to wait for each other
        if whole_tiles:
            with k.loop("c", whole_tiles * most * self.lanes, step=most * self.lanes):
                self._add_tile(rows, most, weight, out, shrink, pitch or str(self.width))
        if rest:
            with k.block(""):
                k.add(f"const {k.index_type} c = {whole_tiles * most * self.lanes};")
                self._add_tile(rows, rest, weight, out, shrink, pitch or str(self.width))

    def _add_tile(
        self,
        rows: int,
        count: int,
        weight: Callable[[int, str], str],
        out: Callable[[int], str],
        shrink: Callable[[int], str],
        pitch: str,
    ) -> None:
        sums = [[f"sum_{n}_{v}" for v in range(count)] for n in range(rows)]
        self.zero(sums)
        self.multiply(sums, "count", weight, lambda d, v: f"values[{d} * {pitch} + c + {v * self.lanes}]")
        for n, names in enumerate(sums):
            for v, name in enumerate(names):
                place = f"{out(n)} + c + {v * self.lanes}]"
                self.store(place, f"mad_{self.vector}({self.load(place)}, {self.splat(shrink(n))}, {name})")

    def finish(self) -> None:
        """Write what stores the results."""
        k, heads = self.k, self.heads
        with k.loop("n", "q_end - q_first"):
            k.add(f"const {heads.kind} share = 1 / (mass[n] == 0 ? 1 : mass[n]);")
            with k.loop("e", heads.value.spec.shape[3], simd=True):
                k.store(["b", "h", "(q_first + n)", "e"], f"out[n * {self.width} + e] * share")
        if k.gives(1):
            log = k.language.function("log", heads.compute)
            with k.loop("n", "q_end - q_first", simd=True):
                k.store(["b", "h", "(q_first + n)"], f"(mass[n] == 0 ? 0 : top[n] + {log}(mass[n]))", 1)


def whole(size: int, step: int) -> int:
    """Return a size, rounded up to whole steps."""
    return -(-size // step) * step
