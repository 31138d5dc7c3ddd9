"""The gradients of attention where the threads of a block share queries or keys, as "FlashAttention-2" cuts them up.

Dao, 2023: a block that has some queries goes over the keys for their gradients, and one that has some keys goes over
the queries for those of keys and values. Scores are computed again, and never leave shared memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_core.codegen.generic.block_tiles import line_of, pitch
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.shared_attention import (
    KEYS,
    QUERIES,
    AttentionTile,
    rows_copy,
    tile_of,
    write_mask,
    write_products,
    write_weighted,
)
from kagent_core.codegen.generic.shared_tiles import place_thread
from kagent_core.codegen.generic.staging import Registers
from kagent_core.codegen.groups import THREAD, power_above

if TYPE_CHECKING:
    from kagent_core.codegen.generic.attention import Heads

_DEPTHS = (32, 16, 8, 4, 2, 1)


def write_shared_gradients(k: KernelBuilder, heads: Heads, grad: Tensor, made: Tensor, logs: Tensor) -> None:
    """Write the gradients that are wanted.

    Parameters
    ----------
    k
        Where to.
    heads
        The operands.
    grad, made, logs
        The gradient of the attention, the attention, and the logarithms of the sums of its scores.
    """
    tile = _gradients_tile(k, heads)
    if k.gives(0):
        _Gradients(k, heads, tile, grad, made, logs, of_queries=True).write()
    if k.gives(1) or k.gives(2):
        _Gradients(k, heads, tile, grad, made, logs, of_queries=False).write()


def _gradients_tile(k: KernelBuilder, heads: Heads) -> AttentionTile:
    """Return how much a block computes: the most for which it has the shared memory."""
    assert k.work_groups is not None
    nbytes, sizes = int(heads.kind.lstrip("biuf")) // 8, (heads.query.spec.shape[3], heads.value.spec.shape[3])
    longest = max(heads.query.spec.shape[2], heads.key.spec.shape[2])
    rows = [n for n in QUERIES if n <= max(min(power_above(longest), k.work_groups.threads), 1)]
    others = [n for n in KEYS if n == KEYS[-1] or n < 2 * longest]
    for some, columns, deepest in itertools.product(rows, others, _DEPTHS):
        tile = tile_of(k, some, columns, deepest, (max(sizes), max(sizes)), nbytes)
        if _shared_length(tile, sizes) * nbytes <= k.work_groups.local_nbytes:
            break
    return tile  # what does not fit is told where the memory is declared


def _shared_length(tile: AttentionTile, sizes: tuple[int, int]) -> int:
    """Return how many values are in shared memory."""
    staged = max(tile.key_depth * pitch(tile.keys), tile.value_depth * pitch(tile.width))
    held = (sum(map(tile.padded, sizes)) + 2 * tile.keys) * pitch(tile.queries)
    return held + 2 * staged + tile.threads + 2 * max(tile.queries, tile.keys)


@dataclass(frozen=True)
class _Gradients:
    """The gradients of the queries, or of the keys and values: of a block's own rows, which it holds against others.

    In shared memory, own rows are neighbours: ``held`` and ``held_again`` have the elements of queries and of the
    attention's gradients, or of keys and values, ``slopes`` and ``shares`` a row for each of the others.
    """

    k: KernelBuilder
    heads: Heads
    tile: AttentionTile
    grad: Tensor
    made: Tensor
    logs: Tensor
    of_queries: bool

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """What scores and slopes are made of, of own rows."""
        return (self.heads.query, self.grad) if self.of_queries else (self.heads.key, self.heads.value)

    @property
    def others(self) -> tuple[Tensor, Tensor]:
        """The same of the others."""
        return (self.heads.key, self.heads.value) if self.of_queries else (self.heads.query, self.grad)

    def sums(self, name: str) -> Registers:
        """Return what a thread adds up for its own rows."""
        return Registers(name, self.heads.kind, self.heads.compute, self.tile.tall, self.tile.values)

    def write(self) -> None:
        """Write the loops."""
        k, heads, tile = self.k, self.heads, self.tile
        batch, count, length, _ = self.own[0].spec.shape
        names = ["slopes"] if self.of_queries else ["slopes", "shares"]
        for name in names:
            k.shared(heads.kind, name, tile.keys * pitch(tile.queries))
        with k.groups(("b", batch), ("h", count), ("block", -(-length // tile.queries)), threads=tile.threads):
            end, reach = k.size(length), k.size(self.others[0].spec.shape[2])
            k.add(f"const {k.index_type} i_first = block * {tile.queries};")
            last = k.least(reach, f"i_first + {tile.queries}") if heads.causal and self.of_queries else reach
            k.add(f"const {k.index_type} limit = {last};")
            place_thread(k, ("across", tile.across), ("down", tile.down))
            for name, tensor in zip(("held", "held_again"), self.own, strict=True):
                size = tensor.spec.shape[3]
                copy = rows_copy(k, tensor, name, tile.queries, tile.padded(size), tile.threads, "i_first", end)
                k.shared(heads.kind, copy.memory, copy.length)
                copy.whole(heads.kind, str(size))
            self.sums("sums").declare(k)
            if not self.of_queries:
                self.sums("value_sums").declare(k)
            k.barrier()
            if self.of_queries:
                self._statistics("i_first", end, tile.queries)
            begin = f"i_first / {tile.keys} * {tile.keys}" if heads.causal and not self.of_queries else "0"
            with k.loop("j_first", "limit", begin, tile.keys):
                if not self.of_queries:
                    self._statistics("j_first", "limit", tile.keys)
                self._slopes(end)
                write_weighted(k, tile, self.sums("sums"), "slopes", self.others[0], "others")
                if not self.of_queries:
                    write_weighted(k, tile, self.sums("value_sums"), "shares", self.others[1], "others")
            self._store(end)
            k.barrier()

    def _statistics(self, first: str, end: str, rows: int) -> None:
        """Write what some queries' slopes are made of, beside products: ``log`` and ``delta``. Threads share a row."""
        k, heads, tile = self.k, self.heads, self.tile
        most = max(tile.queries, tile.keys)
        for name, length in (("parts", tile.threads), ("log", most), ("delta", most)):
            k.shared(heads.kind, name, length)
        lanes, depth = max(tile.threads // rows, 1), self.grad.spec.shape[3]
        at = ("b", "h", f"({first} + q)", "e")
        each = f"for (i32 place = {THREAD}; place < {rows * lanes}; place += {tile.threads})"
        with k.block(each):
            k.add(f"const i32 q = place % {rows}, lane = place / {rows};", f"{heads.kind} part = 0;")
            with k.block(f"if ({first} + q < {end})"), k.block(f"for (i32 e = lane; e < {depth}; e += {lanes})"):
                k.add(f"part += {self.grad.at(*at)} * {self.made.at(*at)};")
            k.add("parts[place] = part;" if lanes > 1 else "delta[q] = part;")
            if lanes == 1:
                k.add(f"log[q] = {first} + q < {end} ? {self.logs.at(*at[:3])} : 0;")
        k.barrier()
        if lanes == 1:
            return
        with k.block(f"if ({THREAD} < {rows})"):
            k.add(f"const i32 q = {THREAD};", f"{heads.kind} all = 0;")
            with k.block(f"for (i32 n = 0; n < {lanes}; n++)"):
                k.add(f"all += parts[n * {rows} + q];")
            k.add("delta[q] = all;", f"log[q] = {first} + q < {end} ? {self.logs.at(*at[:3])} : 0;")
        k.barrier()

    def _slopes(self, end: str) -> None:
        """Write the gradients of some scores, to ``slopes``, and the weights that these are, to ``shares``."""
        k, heads, tile = self.k, self.heads, self.tile
        wide = tile.keys // tile.across
        with k.block(""):
            for name, held, tensor in zip(("score", "slope"), ("held", "held_again"), self.others, strict=True):
                sums = Registers(name, heads.kind, heads.compute, tile.tall, wide)
                sums.declare(k)
                with k.block(""):
                    write_products(k, tile, sums, held, tensor)
            with k.unrolled("r", tile.tall), k.unrolled("c", wide):
                k.add(f"const i32 own_row = {tile.query('r')};")
                k.add(f"const i32 other_row = {line_of(wide, 'across', 'c', tile.across)};")
                k.add(f"const {k.index_type} i = i_first + own_row;", f"const {k.index_type} j = j_first + other_row;")
                place = f"r * {wide} + c" if wide > 1 else "r"
                k.add(f"{heads.kind} value = score[{place}] * {heads.factor};")
                write_mask(k, heads, end, *(("i", "j") if self.of_queries else ("j", "i")))
                query, hidden = "own_row" if self.of_queries else "other_row", k.language.least(heads.compute)
                exp = k.language.function("exp", heads.compute)
                k.add(f"const {heads.kind} share = value == {hidden} ? 0 : {exp}(value - log[{query}]);")
                at = f"other_row * {pitch(tile.queries)} + own_row"
                if not self.of_queries:
                    k.add(f"shares[{at}] = share;")
                k.add(f"slopes[{at}] = share * (slope[{place}] - delta[{query}]);")
        k.barrier()

    def _store(self, end: str) -> None:
        """Write what stores the gradients of own rows."""
        k, tile, heads = self.k, self.tile, self.heads
        results = (
            [("sums", 0, heads.factor)] if self.of_queries else [("sums", 1, heads.factor), ("value_sums", 2, "1")]
        )
        with k.unrolled("r", tile.tall):
            k.add(f"const {k.index_type} i = i_first + {tile.query('r')};")
            with k.block(f"if (i < {end})"), k.unrolled("c", tile.values):
                k.add(f"const {k.index_type} e = {line_of(tile.values, 'across', 'c', tile.across)};")
                for name, number, factor in results:
                    if k.gives(number):
                        size = self.own[number == 2].spec.shape[3]
                        with k.block(f"if (e < {size})"):
                            value = f"{self.sums(name).place('r', 'c')} * {factor}"
                            k.store(["b", "h", "i", "e"], value, number)
