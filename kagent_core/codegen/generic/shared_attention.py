"""Attention whose queries are shared by the threads of a block: the online softmax of `attention`, for GPUs.

A block takes some queries of one head, which stay in shared memory, and goes over the keys some at a time. Their scores
never leave it: they become weights in shared memory, and what a query is made of stays in its threads' registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_core.codegen.generic.block_tiles import (
    CHUNK,
    COPIES,
    REGISTER_NBYTES,
    line_of,
    no_more_than,
    pitch,
)
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.shared_tiles import place_thread
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.generic.staging import Copy, Registers, write_stages
from kagent_core.codegen.generic.tiled import Operand
from kagent_core.codegen.groups import THREAD, power_above

if TYPE_CHECKING:
    from kagent_core.codegen.generic.attention import Heads

QUERIES, KEYS = (32, 16, 8, 4, 2, 1), (64, 32, 16)
"""Queries and keys of a block at a time: the first for which shared memory is large enough."""

BEFORE = "before"
"""Name of how much of the depth comes before a stage."""

WIDEST = 64
"""Most threads that share a query."""


@dataclass(frozen=True)
class AttentionTile:
    """How much of an attention a block computes at a time, and how its threads share it.

    Attributes
    ----------
    queries, keys
        Of a step, powers of two.
    down, across
        Threads: along the queries, and along keys and values.
    values
        Elements of a value that one thread sums up.
    key_depth, value_depth
        How much is copied to shared memory at a time: elements of keys, and values.
    """

    queries: int
    keys: int
    down: int
    across: int
    values: int
    key_depth: int
    value_depth: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.down * self.across

    @property
    def tall(self) -> int:
        """Queries of a thread."""
        return self.queries // self.down

    def query(self, step: str) -> str:
        """Return which query of a block one of a thread's is."""
        return line_of(self.tall, "down", step, self.down)

    @property
    def width(self) -> int:
        """Elements of a value that there is room for."""
        return self.across * self.values

    def padded(self, size: int) -> int:
        """Return how many elements of a query there is room for, for heads of a size: whole stages, the rest 0."""
        return -(-size // self.key_depth) * self.key_depth

    def shared_length(self, size: int) -> int:
        """Return how many values are in shared memory, for heads of a size."""
        staged = max(self.key_depth * pitch(self.keys), self.value_depth * pitch(self.width))
        held = (self.padded(size) + self.keys) * pitch(self.queries)
        return held + 2 * staged + 2 * self.threads + 3 * self.queries


def attention_tile(k: KernelBuilder, heads: Heads) -> AttentionTile:
    """Return how much of an attention a block computes: what a launch config says, and else what suits.

    Raises
    ------
    LaunchConfigError
        When a launch config asks for more threads or registers than a block has.
    """
    groups, nbytes = k.work_groups, int(heads.kind.lstrip("biuf")) // 8
    assert groups is not None
    length, size = heads.query.spec.shape[2:]
    reach, depth = heads.value.spec.shape[2:]
    most_queries = min(power_above(length), groups.threads)
    queries = [k.tiles.block_rows] if k.tiles.block_rows else [n for n in QUERIES if n <= most_queries]
    keys = [k.tiles.block_columns] if k.tiles.block_columns else [n for n in KEYS if n == KEYS[-1] or n < 2 * reach]
    deepest = [k.tiles.block_depth] if k.tiles.block_depth else [32, 16, 8, 4, 2, 1]
    found: AttentionTile | None = None
    for some, others, most in itertools.product(queries, keys, deepest):
        found = tile_of(k, some, others, most, (size, depth), nbytes)
        if found.shared_length(size) * nbytes <= groups.local_nbytes and most >= min(8, deepest[0]):
            return found
    for some, most in itertools.product(queries, deepest):
        found = tile_of(k, some, keys[-1], most, (size, depth), nbytes)
        if found.shared_length(size) * nbytes <= groups.local_nbytes:
            return found
    assert found is not None
    return found  # what does not fit is told where the memory is declared


def tile_of(
    k: KernelBuilder, queries: int, keys: int, deepest: int, sizes: tuple[int, int], nbytes: int
) -> AttentionTile:
    """Return how a block's threads share some queries and keys, whose elements and values have some sizes.

    Raises
    ------
    LaunchConfigError
        When a launch config asks for more threads or registers than a block has.
    """
    assert k.work_groups is not None
    most, (size, depth) = k.work_groups.threads, sizes
    # no more than there are keys: as many threads as queries at least, for each query needs one
    tall = min(k.tiles.thread_rows or CHUNK, queries, keys)
    while True:
        down = queries // tall
        across = min(max(most // down, 1), WIDEST, keys)
        values = -(-depth // across)
        values = values if values <= CHUNK else -(-values // CHUNK) * CHUNK
        if tall == 1 or k.tiles.thread_rows or tall * values * nbytes <= REGISTER_NBYTES:
            break
        tall //= 2
    no_more_than(k, most, max(down * across, queries), tall * max(values, keys // across) * nbytes)
    copied = COPIES * down * across
    key_depth = min(power_above(size), deepest, max(copied // keys, 8))
    value_depth = min(keys, deepest, power_above(max(copied // (across * values), 1)))
    return AttentionTile(queries, keys, down, across, values, key_depth, value_depth)


def write_shared_attention(k: KernelBuilder, heads: Heads) -> None:
    """Write the attention of some queries of a head per block, and the logarithm of the sum of their scores."""
    tile = attention_tile(k, heads)
    _SharedAttention(k, heads, tile).write()


def rows_copy(
    k: KernelBuilder, tensor: Tensor, memory: str, lines: int, depth: int, threads: int, first: str, end: str
) -> Copy:
    """Return a copy of some rows of a head, such as queries, whose depth are their elements."""
    spec = tensor.spec
    operand = Operand(
        Space((spec.shape[2],)),
        Space((spec.shape[3],)),
        lambda line, at: tensor.at("b", "h", *line, *at),
        along_depth=spec.strides[3] <= spec.strides[2],
    )
    return Copy(k, operand, "keys", memory, lines, depth, threads, first, end)


def write_products(k: KernelBuilder, tile: AttentionTile, sums: Registers, held: str, tensor: Tensor) -> None:
    """Write products of a block's queries with some keys: elements of the former are in shared memory, as `held`."""
    copy = rows_copy(k, tensor, "stage", tile.keys, tile.key_depth, tile.threads, "j_first", "limit")
    key = line_of(sums.wide, "across", "t", tile.across)

    def multiply(begins: Sequence[str]) -> None:
        row = f"{held}[({BEFORE} + p) * {pitch(tile.queries)} + {tile.query('t')}]"
        sums.multiply(k, tile.key_depth, "s", row, f"{begins[0]}p * {pitch(tile.keys)} + {key}]")

    write_stages(k, sums.kind, [copy], ("0", str(tensor.spec.shape[3])), multiply, tile.threads, BEFORE)


def write_weighted(
    k: KernelBuilder, tile: AttentionTile, sums: Registers, weights: str, tensor: Tensor, name: str
) -> None:
    """Write what adds some rows of a head, called `name`, by the weights that each query has for them."""
    size, depth = tensor.spec.shape[3], tile.value_depth
    operand = Operand(
        Space((size,)),
        Space((tensor.spec.shape[2],)),
        lambda line, at: tensor.at("b", "h", *at, *line),
        along_depth=tensor.spec.strides[2] < tensor.spec.strides[3],
    )
    copy = Copy(k, operand, name, "stage", tile.width, depth, tile.threads, "0", str(size))
    element = line_of(tile.values, "across", "t", tile.across)

    def multiply(begins: Sequence[str]) -> None:
        row = f"{weights}[({BEFORE} + p) * {pitch(tile.queries)} + {tile.query('t')}]"
        sums.multiply(k, depth, "s", row, f"{begins[0]}p * {pitch(tile.width)} + {element}]")

    with k.block(""):
        k.add(f"const {k.index_type} j_end = {k.least('limit', f'j_first + {tile.keys}')};")
        write_stages(k, sums.kind, [copy], ("j_first", "j_end"), multiply, tile.threads, BEFORE)


def write_mask(k: KernelBuilder, heads: Heads, end: str, query: str = "i", key: str = "j") -> None:
    """Write what adds the mask to a score, and hides keys after the query and places that are not there.

    Parameters
    ----------
    k
        Where to.
    heads
        The operands.
    end
        Of what the block has as ``i``. What it goes over, ``j``, ends at ``limit``.
    query, key
        Which of the two is which.
    """
    hidden = k.language.least(heads.compute)
    if heads.bias is not None:
        bias = heads.bias.at(*("b", "h", query, key)[4 - len(heads.bias.spec.shape) :])
        masked = f"{bias} ? value : {hidden}" if heads.bias.dtype == "bool" else f"value + {bias}"
        k.add(f"if (i < {end} && j < limit) {{ value = {masked}; }}")
    k.add(f"value = j >= limit{f' || {key} > {query}' if heads.causal else ''} ? {hidden} : value;")


@dataclass(frozen=True)
class _SharedAttention:
    """An attention and the pieces that it is cut into.

    In shared memory, queries are neighbours: ``queries`` has their elements one after the other, ``weights`` a row for
    each key, and ``top``, ``mass`` and ``shrink`` the largest score so far, the sum of weights and what the last step
    multiplied it with.
    """

    k: KernelBuilder
    heads: Heads
    tile: AttentionTile

    @property
    def made(self) -> Registers:
        """What a thread's queries are made of."""
        return Registers("made", self.heads.kind, self.heads.compute, self.tile.tall, self.tile.values)

    def write(self) -> None:
        """Write the kernel."""
        k, heads, tile = self.k, self.heads, self.tile
        batch, count, length, size = heads.query.spec.shape
        kind = k.index_type
        axes = [("b", batch), ("h", count), ("block", -(-length // tile.queries))]
        k.shared(heads.kind, "weights", tile.keys * pitch(tile.queries))
        for name, extent in (("parts", tile.threads), ("sums", tile.threads)):
            k.shared(heads.kind, name, extent)
        for name in ("top", "mass", "shrink"):
            k.shared(heads.kind, name, tile.queries)
        with k.groups(*axes, threads=tile.threads):
            end, reach = k.size(length), k.size(heads.key.spec.shape[2])
            k.add(f"const {kind} i_first = block * {tile.queries};")
            last = k.least(reach, f"i_first + {tile.queries}") if heads.causal else reach
            k.add(f"const {kind} limit = {last};")
            place_thread(k, ("across", tile.across), ("down", tile.down))
            rows, depth = tile.queries, tile.padded(size)
            copy = rows_copy(k, heads.query, "queries", rows, depth, tile.threads, "i_first", end)
            k.shared(heads.kind, copy.memory, copy.length)
            copy.whole(heads.kind, str(size))
            with self._each_query():
                k.add(f"top[place] = {k.language.least(heads.compute)};", "mass[place] = 0;")
            self.made.declare(k)
            k.barrier()
            with k.loop("j_first", "limit", step=tile.keys):
                self._scores()
                self._softmax()
                self._values()
            self._store()
            k.barrier()

    def _each_query(self) -> AbstractContextManager[None]:
        return self.k.block(f"for (i32 place = {THREAD}; place < {self.tile.queries}; place += {self.tile.threads})")

    def _scores(self) -> None:
        """Write the scores of some keys, to ``weights``."""
        k, heads, tile = self.k, self.heads, self.tile
        wide = tile.keys // tile.across
        score = Registers("score", heads.kind, heads.compute, tile.tall, wide)
        with k.block(""):
            score.declare(k)
            write_products(k, tile, score, "queries", heads.key)
            with k.unrolled("r", tile.tall), k.unrolled("c", wide):
                k.add(
                    f"const i32 own_query = {tile.query('r')}, own_key = {line_of(wide, 'across', 'c', tile.across)};"
                )
                k.add(f"const {k.index_type} i = i_first + own_query;", f"const {k.index_type} j = j_first + own_key;")
                k.add(f"{heads.kind} value = {score.place('r', 'c')} * {heads.factor};")
                write_mask(k, heads, k.size(heads.query.spec.shape[2]))
                k.add(f"weights[own_key * {pitch(tile.queries)} + own_query] = value;")
        k.barrier()

    def _softmax(self) -> None:
        """Turn scores into weights relative to the largest score so far: some threads for each query."""
        k, heads, tile = self.k, self.heads, self.tile
        lanes, kind = tile.threads // tile.queries, heads.kind
        exp, least = k.language.function("exp", heads.compute), k.language.least(heads.compute)
        weight = f"weights[e * {pitch(tile.queries)} + q]"
        each = f"for (i32 e = lane; e < {tile.keys}; e += {lanes})"
        with k.block(""):
            k.add(f"const i32 q = {THREAD} % {tile.queries}, lane = {THREAD} / {tile.queries};")
            k.add(f"const {kind} before = top[q];", f"{kind} most = before, all = 0;")
            with k.block(each):
                k.add(f"const {kind} score = {weight};", "most = score > most ? score : most;")
            if lanes > 1:
                k.add(f"parts[{THREAD}] = most;")
                k.barrier()
                with k.block(f"for (i32 n = 0; n < {lanes}; n++)"):
                    k.add(f"const {kind} other = parts[n * {tile.queries} + q];", "most = other > most ? other : most;")
            k.add(f"const {kind} base = most == {least} ? 0 : most;")  # only masked keys yet
            with k.block(each):
                k.add(f"const {kind} share = {exp}({weight} - base);", f"{weight} = share;", "all += share;")
            k.add(f"sums[{THREAD}] = all;")
            k.barrier()
            with k.block("if (lane == 0)"):
                k.add(f"const {kind} factor = {exp}(before - base);", f"{kind} total = mass[q] * factor;")
                with k.block(f"for (i32 n = 0; n < {lanes}; n++)"):
                    k.add(f"total += sums[n * {tile.queries} + q];")
                k.add("top[q] = most;", "mass[q] = total;", "shrink[q] = factor;")
        k.barrier()

    def _values(self) -> None:
        """Write what adds values by their weights."""
        k, tile, made = self.k, self.tile, self.made
        with k.unrolled("r", tile.tall), k.unrolled("c", tile.values):
            k.add(f"{made.place('r', 'c')} *= shrink[{tile.query('r')}];")
        write_weighted(k, tile, made, "weights", self.heads.value, "values")

    def _store(self) -> None:
        """Write what stores the results."""
        k, heads, tile = self.k, self.heads, self.tile
        end, depth = k.size(heads.query.spec.shape[2]), heads.value.spec.shape[3]
        with k.unrolled("r", tile.tall):
            k.add(f"const {k.index_type} i = i_first + {tile.query('r')};")
            with k.block(f"if (i < {end})"):
                k.add(f"const {heads.kind} all = mass[{tile.query('r')}], share = all == 0 ? 1 : all;")
                with k.unrolled("c", tile.values):
                    k.add(f"const {k.index_type} e = {line_of(tile.values, 'across', 'c', tile.across)};")
                    with k.block(f"if (e < {depth})"):
                        k.store(["b", "h", "i", "e"], f"{self.made.place('r', 'c')} / share")
        if k.gives(1):
            log = k.language.function("log", heads.compute)
            with self._each_query(), k.block(f"if (i_first + place < {end})"):
                value = f"(mass[place] == 0 ? 0 : top[place] + {log}(mass[place]))"
                k.store(["b", "h", "i_first + place"], value, 1)
