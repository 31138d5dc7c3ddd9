"""Scaled dot-product attention in one pass over the keys, and its gradients.

The forward kernel is the online softmax of "FlashAttention" (Dao et al., 2022): a work-item takes some queries of one
head and goes over the keys a few at a time, correcting what it has summed up whenever it meets a larger score. The
gradients compute the probabilities again, from the scores and the logarithm of their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kagent_core.capture.random import is_seeded
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.host_attention import write_host_attention
from kagent_core.codegen.generic.shared_attention import write_shared_attention
from kagent_core.codegen.generic.shared_gradients import write_shared_gradients
from kagent_core.codegen.generic.tiled import Sums, multiply_tile
from kagent_core.codegen.table import NotLoweredError
from kagent_core.codegen.vectors import Vectors
from kagent_core.specs import OpCall, TensorSpec

_UNEVEN = "{} heads of queries and {} of keys"

LARGEST_HEAD = 1024
"""Largest size of a head: a work-item keeps some queries and keys in memory of its own."""


def _refusal(call: OpCall) -> str | None:
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    mask = call.arguments.get("attn_mask")
    if call.arguments.get("dropout_p"):
        return f"{call.name} draws random numbers for dropout"
    if is_seeded(call):
        return f"{call.name} makes no random numbers from a seed"
    if any(spec.dtype != query.dtype for spec in (key, value)):
        return f"{call.name} has operands of several types"
    if mask is not None and mask.dtype.name not in ("bool", "float32", query.dtype.name):
        return f"{call.name} has a mask of {mask.dtype}"
    if query.shape[0] != key.shape[0] or query.shape[1] % max(key.shape[1], 1) or key.shape[1] != value.shape[1]:
        return f"{call.name} has {_UNEVEN.format(query.shape[1], key.shape[1])}"
    if not 0 < max(query.shape[3], value.shape[3]) <= LARGEST_HEAD:
        return f"{call.name} has heads that are empty or of more than {LARGEST_HEAD} elements"
    return None


def _refusal_of_gradients(call: OpCall) -> str | None:
    heads, others = (call.arguments[name].shape[1] for name in ("query", "key"))
    return _refusal(call) or (None if heads == others else f"{call.name} has {_UNEVEN.format(heads, others)}")


@GENERIC.kernel("aten::_scaled_dot_product_flash_attention_for_cpu", accepts=_refusal)
def attention(
    k: KernelBuilder,
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    dropout_p: float,
    is_causal: bool,
    attn_mask: TensorSpec | None,
    scale: float | None,
) -> None:
    """Write the attention of some queries of a head per work-item, and the logarithm of the sum of their scores."""
    heads = Heads.of(k, query, key, value, is_causal, attn_mask, scale)
    if k.language.host_vectors is not None:
        write_host_attention(k, heads, k.language.host_vectors)
        return
    if query.shape[1] != key.shape[1]:
        raise NotLoweredError(_UNEVEN.format(query.shape[1], key.shape[1]))
    if k.work_groups is not None:
        write_shared_attention(k, heads)
        return
    count, width, step = heads.rows, heads.padded(value.shape[3]), k.tiles.keys
    with heads.items(query, "i", query.shape[3] + value.shape[3]):
        heads.copy("q", heads.query, "i", count)
        for name, length in (("top", count), ("mass", count), ("out", count * width), ("scores", count * step)):
            k.array(heads.kind, name, length)
        with k.loop("t", count):
            k.add(f"top[t] = {k.language.least(heads.compute)}; mass[t] = 0;")
        with k.loop("t", count * width, simd=True):
            k.add("out[t] = 0;")
        with heads.keys("j"):
            heads.copy("keys", heads.key, "j", step, turned=True)
            heads.multiply("q", "keys", query.shape[3], "scores", heads.factor)
            with k.loop("n", "i_end - i_first"):
                heads.mask("scores", "(i_first + n)", "n", rows_are_queries=True)
                _softmax_step(k, heads, width)
            heads.copy("values", heads.value, "j", step)
            heads.accumulate("scores", "values", width, "out")
        with k.loop("n", "i_end - i_first"):
            k.add(f"const {heads.kind} share = mass[n] == 0 ? 1 : mass[n];")
            with k.loop("e", str(value.shape[3]), simd=True):
                k.store(["b", "h", "i_first + n", "e"], f"out[n * {width} + e] / share")
            if k.gives(1):
                log = k.language.function("log", heads.compute)
                k.store(["b", "h", "i_first + n"], f"(mass[n] == 0 ? 0 : top[n] + {log}(mass[n]))", 1)


def _softmax_step(k: KernelBuilder, heads: Heads, width: int) -> None:
    """Turn the scores of query ``n`` into weights relative to the largest score so far, and correct its sums."""
    exp = k.language.function("exp", heads.compute)
    _largest_score(k, heads)
    k.add(
        f"const {heads.kind} base = most == {k.language.least(heads.compute)} ? 0 : most;",  # only masked keys yet
        f"const {heads.kind} shrink = {exp}(top[n] - base);",
    )
    _weights(k, heads, exp)
    k.add("mass[n] = mass[n] * shrink + sum; top[n] = most;")
    with k.loop("e", width, simd=True):
        k.add(f"out[n * {width} + e] *= shrink;")


def _largest_score(k: KernelBuilder, heads: Heads) -> None:
    """Write the largest of the scores of query ``n`` and ``top[n]``, to ``most``."""
    step, vectors = k.tiles.keys, heads.vectors
    if vectors is None:
        k.add(f"{heads.kind} most = top[n], sum = 0;")
        with k.loop("j", step, reduction="max:most"):
            k.add(f"most = scores[n * {step} + j] > most ? scores[n * {step} + j] : most;")
        return
    kind = vectors.kind(heads.compute)
    k.add(f"{kind} lanes = ({kind})(top[n]);")
    with k.loop("j", step, step=vectors.width):
        address = f"&scores[n * {step} + j]"
        k.add(f"const {kind} score = {vectors.load(heads.compute, address)};")
        greater = vectors.mask("(score > lanes)", heads.compute)
        k.add(f"lanes = {vectors.choose(greater, 'score', 'lanes', heads.compute)};")
    k.add(f"const {heads.kind} most = {vectors.over_lanes('max', heads.kind, 'lanes')};")


def _weights(k: KernelBuilder, heads: Heads, exp: str) -> None:
    """Turn the scores of query ``n`` into weights, and write what they sum up to, to ``sum``."""
    step, vectors = k.tiles.keys, heads.vectors
    if vectors is None:
        with k.loop("j", step, reduction="+:sum"):
            k.add(f"const {heads.kind} weight = {exp}(scores[n * {step} + j] - base);")
            k.add(f"scores[n * {step} + j] = weight; sum += weight;")
        return
    kind, address = vectors.kind(heads.compute), f"&scores[n * {step} + j]"
    k.add(f"{kind} sums = ({kind})(0);")
    with k.loop("j", step, step=vectors.width):
        k.add(f"const {kind} weight = {exp}({vectors.load(heads.compute, address)} - base);")
        k.add(vectors.store(heads.compute, address, "weight"), "sums += weight;")
    k.add(f"const {heads.kind} sum = {vectors.over_lanes('sum', heads.kind, 'sums')};")


@GENERIC.kernel("aten::_scaled_dot_product_flash_attention_for_cpu_backward", accepts=_refusal_of_gradients)
def attention_backward(
    k: KernelBuilder,
    grad_out: TensorSpec,
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    out: TensorSpec,
    logsumexp: TensorSpec,
    dropout_p: float,
    is_causal: bool,
    attn_mask: TensorSpec | None,
    scale: float | None,
) -> None:
    """Write the gradients: of the queries some queries at a time, then of keys and values some keys at a time."""
    heads = Heads.of(k, query, key, value, is_causal, attn_mask, scale)
    grad, made, logs = k.read(grad_out), k.read(out), k.read(logsumexp)
    if k.work_groups is not None:
        write_shared_gradients(k, heads, grad, made, logs)
        return
    size, depth, count, step = query.shape[3], value.shape[3], heads.rows, k.tiles.keys
    if k.gives(0):
        width = heads.padded(size)
        with heads.items(query, "i", 3 * size):
            heads.copy("q", heads.query, "i", count)
            heads.copy("g", grad, "i", count)
            heads.products("delta", grad, made, "i", count)
            for name, length in (("sums", count * width), ("scores", count * step), ("slopes", count * step)):
                k.array(heads.kind, name, length)
            with k.loop("t", count * width, simd=True):
                k.add("sums[t] = 0;")
            with heads.keys("j"):
                heads.copy("keys", heads.key, "j", step, turned=True)
                heads.multiply("q", "keys", size, "scores", heads.factor)
                heads.copy("values", heads.value, "j", step, turned=True)
                heads.multiply("g", "values", depth, "slopes", "1")
                with k.loop("n", "i_end - i_first"):
                    heads.mask("scores", "(i_first + n)", "n", rows_are_queries=True)
                    log = logs.at("b", "h", "(i_first + n)")
                    heads.slope(f"const {heads.kind} log = {log}, own = delta[n];", "log", "own")
                heads.copy("keys_again", heads.key, "j", step)
                heads.accumulate("slopes", "keys_again", width, "sums")
            _store_rows(k, heads, "sums", width, size, 0, heads.factor)
    if k.gives(1) or k.gives(2):
        _key_gradients(k, heads, grad, made, logs)


def _key_gradients(k: KernelBuilder, heads: Heads, grad: Tensor, made: Tensor, logs: Tensor) -> None:
    """Write the gradients of keys and values, some keys per work-item: the scores are turned round, a row per key."""
    size, depth, count, step = heads.query.spec.shape[3], heads.value.spec.shape[3], heads.rows, k.tiles.keys
    width, wide = heads.padded(size), heads.padded(depth)
    with heads.items(heads.key.spec, "i", 2 * (size + depth)):
        heads.copy("own_keys", heads.key, "i", count)
        heads.copy("own_values", heads.value, "i", count)
        for name, length in (("sums", count * width), ("value_sums", count * wide)):
            k.array(heads.kind, name, length)
            with k.loop("t", length, simd=True):
                k.add(f"{name}[t] = 0;")
        for name in ("scores", "slopes"):
            k.array(heads.kind, name, count * step)
        with heads.queries("j"):
            heads.copy("q", heads.query, "j", step, turned=True)
            heads.multiply("own_keys", "q", size, "scores", heads.factor)
            heads.copy("g", grad, "j", step, turned=True)
            heads.multiply("own_values", "g", depth, "slopes", "1")
            heads.products("delta", grad, made, "j", step)
            k.array(heads.kind, "logs", step)
            with k.loop("t", step):
                k.add(f"logs[t] = j_first + t < j_end ? {logs.at('b', 'h', '(j_first + t)')} : 0;")
            with k.loop("n", "i_end - i_first"):
                heads.mask("scores", "(i_first + n)", "n", rows_are_queries=False)
                heads.slope("", "logs[j]", "delta[j]")
            heads.copy("grads_again", grad, "j", step)
            heads.accumulate("scores", "grads_again", wide, "value_sums")
            heads.copy("queries_again", heads.query, "j", step)
            heads.accumulate("slopes", "queries_again", width, "sums")
        if k.gives(1):
            _store_rows(k, heads, "sums", width, size, 1, heads.factor)
        if k.gives(2):
            _store_rows(k, heads, "value_sums", wide, depth, 2, "1")


def _store_rows(k: KernelBuilder, heads: Heads, name: str, width: int, size: int, number: int, factor: str) -> None:
    with k.loop("n", "i_end - i_first"), k.loop("e", str(size), simd=True):
        k.store(["b", "h", "i_first + n", "e"], f"{name}[n * {width} + e] * {factor}", number)


@dataclass(frozen=True)
class Heads:
    """What the kernels have in common: operands, and steps on blocks of rows by a few columns in an item's memory.

    Attributes
    ----------
    query, key, value
        The operands.
    causal
        Whether keys after a query are hidden from it.
    bias
        The mask: added to scores, or booleans that say which are seen.
    factor
        What scores are multiplied with, as text.
    compute, kind
        The type that is computed in: its name, and the C type.
    rows
        Queries of a work-item.
    """

    k: KernelBuilder
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    bias: Tensor | None
    factor: str
    compute: str
    kind: str
    rows: int

    @staticmethod
    def of(
        k: KernelBuilder,
        query: TensorSpec,
        key: TensorSpec,
        value: TensorSpec,
        causal: bool,
        mask: TensorSpec | None,
        scale: float | None,
    ) -> Heads:
        """Return them, for some operands."""
        compute = "float64" if query.dtype.name == "float64" else "float32"
        factor = k.number(1 / math.sqrt(query.shape[3]) if scale is None else scale, compute)
        bias = None if mask is None else k.read(mask)
        rows = -(-k.tiles.queries // k.tiles.rows) * k.tiles.rows
        operands = (k.read(query), k.read(key), k.read(value))
        return Heads(k, *operands, causal, bias, factor, compute, k.compute_type(compute), rows)

    def padded(self, size: int) -> int:
        """Return the length of rows that are summed up in tiles."""
        width = self.k.tiles.columns(self.compute)
        return -(-size // width) * width

    @property
    def vectors(self) -> Vectors | None:
        """What spells vectors, where they fit into rows of scores."""
        vectors = self.k.vectors
        return vectors if vectors is not None and self.k.tiles.keys % vectors.width == 0 else None

    @contextmanager
    def items(self, spec: TensorSpec, name: str, cost: int) -> Iterator[None]:
        """Open work-items for some rows of `spec` each, from ``<name>_first`` to ``<name>_end`` - 1."""
        k, (batch, heads, length, _) = self.k, spec.shape
        across = max(self.query.spec.shape[2], self.key.spec.shape[2])
        axes = [("b", batch), ("h", heads), ("block", -(-length // self.rows))]
        with k.items(*axes, steps=max(cost * across * self.rows // 16, 1)):
            k.add(f"const {k.index_type} {name}_first = block * {self.rows};")
            k.add(f"const {k.index_type} {name}_end = {k.least(k.size(length), f'{name}_first + {self.rows}')};")
            yield

    @contextmanager
    def keys(self, name: str) -> Iterator[None]:
        """Write a loop over the keys that the item's queries attend to."""
        k, length = self.k, self.k.size(self.key.spec.shape[2])
        k.add(f"const {k.index_type} limit = {k.least(length, 'i_end') if self.causal else length};")
        with self._stretches(name, "0", "limit"):
            yield

    @contextmanager
    def queries(self, name: str) -> Iterator[None]:
        """Write a loop over the queries that attend to the item's keys."""
        k, step = self.k, self.k.tiles.keys
        k.add(f"const {k.index_type} limit = {k.size(self.query.spec.shape[2])};")
        with self._stretches(name, f"i_first / {step} * {step}" if self.causal else "0", "limit"):
            yield

    @contextmanager
    def _stretches(self, name: str, first: str, end: str) -> Iterator[None]:
        k, step = self.k, self.k.tiles.keys
        with k.loop(f"{name}_first", end, first, step):
            k.add(f"const {k.index_type} {name}_end = {k.least(end, f'{name}_first + {step}')};")
            yield

    def copy(self, into: str, tensor: Tensor, rows: str, count: int, turned: bool = False) -> None:
        """Copy some rows of a tensor of heads, and zeros in place of rows that are not there.

        Parameters
        ----------
        into
            Name of the memory: rows one after the other, padded, or the other way round if `turned`.
        rows
            Name of the rows' range.
        count
            How many rows there is room for.
        """
        k, size = self.k, tensor.spec.shape[3]
        width = self.padded(size)
        k.array(self.kind, into, count * (size if turned else width))
        with k.loop("t", count):
            place = f"{into}[e * {count} + t]" if turned else f"{into}[t * {width} + e]"
            with k.block(f"if ({rows}_first + t < {rows}_end)"), k.loop("e", str(size), simd=True):
                k.add(f"{place} = {tensor.at('b', 'h', f'({rows}_first + t)', 'e')};")
            with k.block("else"), k.loop("e", str(size), simd=True):
                k.add(f"{place} = 0;")
            if width != size and not turned:
                with k.loop("e", str(width), str(size)):
                    k.add(f"{place} = 0;")

    def products(self, into: str, one: Tensor, other: Tensor, rows: str, count: int) -> None:
        """Write the sum of products of each row of two tensors; 0 for rows that are not there."""
        k = self.k
        k.array(self.kind, into, count)
        with k.loop("t", count):
            k.add(f"{self.kind} sum = 0;")
            at = ("b", "h", f"({rows}_first + t)", "e")
            is_there = k.block(f"if ({rows}_first + t < {rows}_end)")
            with is_there, k.loop("e", str(one.spec.shape[3]), reduction="+:sum"):
                k.add(f"sum += {one.at(*at)} * {other.at(*at)};")
            k.add(f"{into}[t] = sum;")

    def multiply(self, rows: str, columns: str, depth: int, into: str, factor: str) -> None:
        """Multiply a block of rows with columns that lie turned, and scale the products."""
        k, step, height, length = self.k, self.k.tiles.keys, self.k.tiles.rows, self.padded(depth)
        with k.loop("i", self.rows, step=height):
            multiply_tile(
                k,
                self.compute,
                (height, step),
                str(depth),
                lambda n, d: f"{rows}[(i + {n}) * {length} + {d}]",
                lambda d, e: f"{columns}[{d} * {step} + {e}]",
                Sums(lambda n, e: f"{into}[(i + {n}) * {step} + {e}]", self.compute, factor),
            )

    def accumulate(self, weights: str, rows: str, width: int, into: str) -> None:
        """Add to a block of rows: weights times other rows."""
        k, step, height = self.k, self.k.tiles.keys, self.k.tiles.rows
        columns = k.tiles.columns(self.compute)
        with k.loop("i", self.rows, step=height), k.loop("c", width, step=columns):
            multiply_tile(
                k,
                self.compute,
                (height, columns),
                f"{step}",
                lambda n, d: f"{weights}[(i + {n}) * {step} + {d}]",
                lambda d, e: f"{rows}[{d} * {width} + c + {e}]",
                Sums(lambda n, e: f"{into}[(i + {n}) * {width} + c + {e}]", self.compute),
            )

    def mask(self, scores: str, row: str, n: str, rows_are_queries: bool) -> None:
        """Add the mask to one row of scores, and hide keys after the query and places that are not there."""
        k, step = self.k, self.k.tiles.keys
        query, key = (row, "(j_first + j)") if rows_are_queries else ("(j_first + j)", row)
        place, hidden = f"{scores}[{n} * {step} + j]", k.language.least(self.compute)
        with k.loop("j", "j_end - j_first", simd=True):
            if self.bias is not None:
                index = ("b", "h", query, key)[4 - len(self.bias.spec.shape) :]
                own = self.bias.at(*index)
                masked = f"{own} ? {place} : {hidden}" if self.bias.dtype == "bool" else f"{place} + {own}"
                k.add(f"{place} = {masked};")
            if self.causal:
                k.add(f"{place} = {key} > {query} ? {hidden} : {place};")
        with k.loop("j", step, "j_end - j_first"):
            k.add(f"{place} = {hidden};")

    def slope(self, before: str, log: str, own: str) -> None:
        """Turn row ``n`` of ``scores`` into probabilities, and of ``slopes`` into the gradient of the scores."""
        k, step = self.k, self.k.tiles.keys
        exp, hidden = k.language.function("exp", self.compute), k.language.least(self.compute)
        place, slope = f"scores[n * {step} + j]", f"slopes[n * {step} + j]"
        if before:
            k.add(before)
        vectors = self.vectors
        if vectors is None:
            with k.loop("j", step, simd=True):
                k.add(f"const {self.kind} share = {exp}({place} - {log});")
                k.add(f"{place} = {place} == {hidden} ? 0 : share;")
                k.add(f"{slope} = {place} * ({slope} - {own});")
            return
        kind = vectors.kind(self.compute)
        log, own = (vectors.load(self.compute, f"&{text}") if "[j]" in text else text for text in (log, own))
        with k.loop("j", step, step=vectors.width):
            k.add(f"const {kind} score = {vectors.load(self.compute, '&' + place)};")
            seen = vectors.mask(f"(score == {hidden})", self.compute)
            share = vectors.choose(seen, f"({kind})(0)", f"{exp}(score - {log})", self.compute)
            k.add(f"const {kind} share = {share};", vectors.store(self.compute, f"&{place}", "share"))
            slopes = vectors.load(self.compute, f"&{slope}")
            k.add(vectors.store(self.compute, f"&{slope}", f"share * ({slopes} - {own})"))
