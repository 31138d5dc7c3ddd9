"""Attention on a CPU: scores stay in the nearest caches, and vectors have neighbouring queries in their lanes.

A thread takes some queries of a head and goes over the keys a few at a time, as `attention` does. Queries lie turned
round, element by element. So a vector of scores is a sum of vectors of queries times single numbers of a key, its
softmax has nothing to do across lanes, and a single weight is what a row of values is multiplied with. Keys and values
are used as they lie; only queries, and masks that differ from query to query, are turned round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_core.codegen.dtypes import NBITS
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.host_decoding import write_few_queries
from kagent_core.codegen.generic.host_pieces import LANES, HostPieces
from kagent_core.codegen.host_vectors import HostVectors

if TYPE_CHECKING:
    from kagent_core.codegen.generic.attention import Heads

FEW = 4
"""Queries that are too few to fill vectors with: then vectors go along the elements of a key."""

STRETCH = 128
"""Elements of a query and a key whose products are summed up one after the other: more of them would lose digits."""

TILE = 32
"""Rows and columns of what `CFamily.tile_transposer` turns round."""

PITCH = TILE + 1
"""How far rows of such a tile are apart."""


def write_host_attention(k: KernelBuilder, heads: Heads, vectors: HostVectors) -> None:
    """Write the attention of some queries of a head per item, and the logarithm of the sum of their scores."""
    if heads.query.spec.shape[2] <= FEW:
        write_few_queries(HostPieces.of(k, heads, vectors))
    else:
        _ManyQueries.of(k, heads, vectors).write()


@dataclass(frozen=True)
class _ManyQueries(HostPieces):
    """Attention of so many queries that they fill vectors."""

    def write(self) -> None:
        """Write the kernel."""
        k, heads = self.k, self.heads
        with self.items():
            for name, length in (("queries", self.queries * self.size), ("out", self.queries * self.width)):
                k.array(heads.kind, name, length)
            self.nothing_yet(self.queries)
            self._turn_queries()
            with self.some_keys():
                self._copy_keys()
                self.copy_values()
                first = "q_first"
                if heads.causal:
                    k.add(f"const {k.index_type} seen = j_first / {self.across} * {self.across};")
                    first = "(seen > q_first ? seen : q_first)"
                with k.loop("i_first", "q_end", first, self.across):
                    self._block()
            self.finish()

    def _turn_queries(self) -> None:
        """Write what turns the queries round, some at a time. Behind the last one it stands again."""
        k, query = self.k, self.heads.query
        with k.loop("i_first", "q_end", "q_first", self.across):
            k.add(f"{self.heads.kind} *into = queries + (i_first - q_first) * {self.size};")
            self._turn("i_first", "q_end", self.size, lambda row, e: query.at("b", "h", row, e))

    def _turn(self, first: str, end: str, depth: int | str, value: Callable[[str, str], str]) -> None:
        """Write to ``into`` a column for each row from `first` on, of as many elements as `depth` says."""
        k, heads = self.k, self.heads
        transpose = k.language.tile_transposer(NBITS[heads.compute] // 8) if self.across == TILE else None
        with k.block(""):
            if transpose is None or (isinstance(depth, int) and depth < TILE // 4):
                with k.loop("t", self.across):
                    k.add(f"const {k.index_type} row = {k.least(f'{first} + t', f'{end} - 1')};")
                    with k.loop("e", depth):
                        k.add(f"into[e * {self.across} + t] = {value('row', 'e')};")
                return
            k.array(heads.kind, "tile", TILE * PITCH)
            k.array(heads.kind, "turned", TILE * TILE)
            tiles = k.name("tiles")
            k.add(f"const {k.index_type} {tiles} = {depth} / {TILE};")
            with k.loop("n", tiles):
                self._fill_tile(first, end, str(TILE), value)
                k.add(f"{transpose}(tile, into + n * {TILE * TILE});")
            if not isinstance(depth, int) or depth % TILE:
                k.add(f"const {k.index_type} n = {tiles}, rest = {depth} - n * {TILE};")
                self._fill_tile(first, end, "rest", value)
                k.add(f"{transpose}(tile, turned);")
                with k.loop("t", f"rest * {TILE}", simd=True):
                    k.add(f"into[n * {TILE * TILE} + t] = turned[t];")

    def _fill_tile(self, first: str, end: str, length: str, value: Callable[[str, str], str]) -> None:
        k = self.k
        with k.loop("t", TILE):
            k.add(f"const {k.index_type} row = {k.least(f'{first} + t', f'{end} - 1')};")
            with k.loop("e", length, simd=True):
                k.add(f"tile[t * {PITCH} + e] = {value('row', f'(n * {TILE} + e)')};")

    def _copy_keys(self) -> None:
        """Write what copies some keys. Behind the last one it stands again, until a tile is full."""
        k, heads = self.k, self.heads
        k.array(heads.kind, "keys", self.keys * self.size)
        with k.loop("t", f"(j_end - j_first + {self.rows - 1}) / {self.rows} * {self.rows}"):
            k.add(f"const {k.index_type} j = {k.least('j_first + t', 'j_end - 1')};")
            with k.loop("e", self.size, simd=True):
                k.add(f"keys[t * {self.size} + e] = {heads.key.at('b', 'own', 'j', 'e')};")

    def _block(self) -> None:
        """Write what some queries have of some keys, in no more vectors than it takes."""
        k, heads = self.k, self.heads
        end = k.least("j_end", f"i_first + {self.across}") if heads.causal else "j_end"
        k.add(f"const {k.index_type} place = i_first - q_first, count = {end} - j_first;")
        k.add(f"const {heads.kind} *block = queries + place * {self.size};")
        for name, length in (("scores", self.keys * self.across), ("shrink", self.across)):
            k.array(heads.kind, name, length)
        mask = self._mask()
        with k.block(f"if (q_end - i_first > {self.lanes})"):
            self._weights(LANES, mask)
        with k.block("else"):
            self._weights(1, mask)
        with k.loop("i", k.least(str(self.across), "q_end - i_first"), step=self.rows):
            self.add_values(
                self.rows,
                lambda n, d: f"scores[{d} * {self.across} + i + {n}]",
                lambda n: f"out[(place + i + {n}) * {self.width}",
                lambda n: f"shrink[i + {n}]",
            )

    def _mask(self) -> Callable[[int, int], str] | None:
        """Write the mask of some queries and keys where they are found quickly.

        Returns
        -------
        Given which key of a tile and which vector of queries, what is added to their scores.
        """
        k, heads = self.k, self.heads
        if heads.bias is None:
            return None
        spec = heads.bias.spec

        def value(row: str, key: str) -> str:
            return self.added(row, f"(j_first + {key})")

        rows = k.name("mask")
        differs = len(spec.shape) > 1 and spec.shape[-2] != 1 and spec.strides[-2] != 0
        k.array(heads.kind, rows, self.keys * (self.across if differs else 1))
        if not differs:
            with k.loop("t", "count", simd=True):
                k.add(f"{rows}[t] = {value('0', 't')};")
            with k.loop("t", f"(count + {self.rows - 1}) / {self.rows} * {self.rows}", "count"):
                k.add(f"{rows}[t] = {rows}[count - 1];")
            return lambda n, v: self.splat(f"{rows}[j + {n}]")
        with k.block(""):
            k.add(f"{heads.kind} *into = {rows};")
            self._turn("i_first", "q_end", "count", value)
        beyond = k.loop("t", f"(count + {self.rows - 1}) / {self.rows} * {self.rows}", "count")
        with beyond, k.loop("e", self.across, simd=True):
            k.add(f"{rows}[t * {self.across} + e] = {rows}[(count - 1) * {self.across} + e];")
        return lambda n, v: self.load(f"{rows}[(j + {n}) * {self.across} + {v * self.lanes}]")

    def _weights(self, count: int, mask: Callable[[int, int], str] | None) -> None:
        """Write the scores of some vectors of queries, and turn them into weights relative to the largest so far."""
        k, vectors = self.k, range(count)
        least = self.splat(k.language.least(self.heads.compute))
        for v in vectors:
            k.add(f"{self.vector} top_{v} = {self.load(f'top[place + {v * self.lanes}]')}, most_{v} = top_{v};")
        with k.loop("j", "count", step=self.rows):
            self._scores(count, mask)
        for v in vectors:
            base = f"choose_{self.vector}(most_{v} == {least}, {self.splat('0')}, most_{v})"  # only masked keys yet
            k.add(
                f"const {self.vector} base_{v} = {base};",
                f"const {self.vector} shrink_{v} = exp_{self.vector}(top_{v} - base_{v});",
                f"{self.vector} mass_{v} = {{0}};",
            )
            self.store(f"shrink[{v * self.lanes}]", f"shrink_{v}")
        with k.loop("j", "count"):
            for v in vectors:
                place = f"scores[j * {self.across} + {v * self.lanes}]"
                k.add(f"const {self.vector} weight_{v} = exp_{self.vector}({self.load(place)} - base_{v});")
                self.store(place, f"weight_{v}")
                k.add(f"mass_{v} += weight_{v};")
        for v in vectors:
            before = self.load(f"mass[place + {v * self.lanes}]")
            self.store(f"mass[place + {v * self.lanes}]", f"mad_{self.vector}({before}, shrink_{v}, mass_{v})")
            self.store(f"top[place + {v * self.lanes}]", f"most_{v}")

    def _scores(self, count: int, mask: Callable[[int, int], str] | None) -> None:
        """Write the scores of a tile of keys."""
        k, heads = self.k, self.heads
        sums = [[f"sum_{n}_{v}" for v in range(count)] for n in range(self.rows)]
        self.zero(sums)
        if self.size <= STRETCH:
            self._multiply_keys(sums, "0", str(self.size))
        else:
            parts = [[f"part_{name}" for name in names] for names in sums]
            with k.loop("first", self.size, step=STRETCH):
                self.zero(parts)
                self._multiply_keys(parts, "first", k.least(str(self.size), f"first + {STRETCH}"))
                for names in sums:
                    k.add(*(f"{name} += part_{name};" for name in names))
        for n, names in enumerate(sums):
            for v, name in enumerate(names):
                added = "" if mask is None else f" + {mask(n, v)}"
                k.add(f"{name} = {name} * {self.splat(heads.factor)}{added};")
        if heads.causal:
            with k.block(f"if (j_first + j + {self.rows - 1} > i_first)"):
                for n, names in enumerate(sums):
                    for v, name in enumerate(names):
                        k.add(f"{name} = hide_{self.vector}({name}, j_first + j + {n} - i_first - {v * self.lanes});")
        for n, names in enumerate(sums):
            for v, name in enumerate(names):
                k.add(f"most_{v} = max_{self.vector}({name}, most_{v});")
                self.store(f"scores[(j + {n}) * {self.across} + {v * self.lanes}]", name)

    def _multiply_keys(self, sums: Sequence[Sequence[str]], first: str, end: str) -> None:
        self.multiply(
            sums,
            end,
            lambda n, d: f"keys[(j + {n}) * {self.size} + {d}]",
            lambda d, v: f"block[{d} * {self.across} + {v * self.lanes}]",
            first,
        )
