"""Attention of few queries on a CPU, as when a model writes word by word: it takes as long as reading the keys does."""

from __future__ import annotations

from collections.abc import Sequence

from kagent_core.codegen.generic.host_pieces import HostPieces


def write_few_queries(attention: HostPieces) -> None:
    """Write the attention of all queries of a head per item: each score is a sum along the elements of a key."""
    k, heads = attention.k, attention.heads
    count, keys = heads.query.spec.shape[2], attention.keys
    rows = range(count)
    with attention.items():
        k.array(heads.kind, "queries", count * attention.size)
        with k.loop("t", count), k.loop("e", attention.size, simd=True):
            k.add(f"queries[t * {attention.size} + e] = {heads.query.at('b', 'h', 't', 'e')};")
        k.array(heads.kind, "out", count * attention.width)
        attention.nothing_yet(count)
        with attention.some_keys():
            k.add(f"const {k.index_type} count = j_end - j_first;")
            for name, length in (("scores", count * keys), ("shrink", count)):
                k.array(heads.kind, name, length)
            _scores(attention, rows)
            with k.loop("n", count):
                _weights(attention)
            attention.add_values(
                count,
                lambda n, d: f"scores[{n * keys} + {d}]",
                lambda n: f"out[{n * attention.width}",
                lambda n: f"shrink[{n}]",
                _values(attention),
            )
        attention.finish()


def _scores(attention: HostPieces, rows: Sequence[int]) -> None:
    k, heads = attention.k, attention.heads
    k.add(f"{heads.kind} {', '.join(f'most_{n} = top[{n}]' for n in rows)};")
    with k.loop("j", "count"):
        sums = [f"sum_{n}" for n in rows]
        k.add(f"{heads.kind} {', '.join(f'{name} = 0' for name in sums)};")
        with k.loop("e", attention.size, reduction=f"+:{','.join(sums)}"):
            k.add(f"const {heads.kind} element = {heads.key.at('b', 'own', '(j_first + j)', 'e')};")
            for n, name in enumerate(sums):
                query = f"queries[{n * attention.size} + e]"
                k.add(f"{name} = {k.language.multiply_add(query, 'element', name, heads.compute)};")
        for n, name in enumerate(sums):
            added = "" if heads.bias is None else f" + {attention.added(str(n), '(j_first + j)')}"
            score = f"{name} * {heads.factor}{added}"
            if heads.causal:
                score = f"j_first + j > {n} ? {k.language.least(heads.compute)} : {score}"
            k.add(f"{name} = {score};", f"most_{n} = {name} > most_{n} ? {name} : most_{n};")
            k.add(f"scores[{n * attention.keys} + j] = {name};")
    k.array(heads.kind, "most", len(rows))
    k.add(*(f"most[{n}] = most_{n};" for n in rows))


def _weights(attention: HostPieces) -> None:
    """Write what turns the scores of query ``n`` into weights relative to the largest score so far."""
    k, heads = attention.k, attention.heads
    exp, least = k.language.function("exp", heads.compute), k.language.least(heads.compute)
    k.add(f"const {heads.kind} base = most[n] == {least} ? 0 : most[n];")  # only masked keys yet
    k.add(f"{heads.kind} sum = 0;", f"{heads.kind} *own_scores = scores + n * {attention.keys};")
    with k.loop("j", "count", reduction="+:sum"):
        k.add(f"const {heads.kind} weight = {exp}(own_scores[j] - base);", "own_scores[j] = weight; sum += weight;")
    k.add(f"shrink[n] = {exp}(top[n] - base);", "mass[n] = mass[n] * shrink[n] + sum; top[n] = most[n];")


def _values(attention: HostPieces) -> str:
    """Write where the values are, ``values``, and return how far apart: where they lie, if vectors fit there."""
    k, value = attention.k, attention.heads.value
    if value.spec.shape[3] == attention.width and value.dtype == attention.heads.compute and value.spec.strides[3] == 1:
        place = value.offset("b", "own", "j_first", "0")
        k.add(f"const {attention.heads.kind} *values = {value.pointer} + {place};")
        return k.size(value.spec.strides[2])
    attention.copy_values()
    return str(attention.width)
