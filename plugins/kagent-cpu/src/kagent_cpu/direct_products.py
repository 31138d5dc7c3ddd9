"""Products for which generated kernels are faster than oneDNN, with weights laid out as those take them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kagent_core.codegen.generic.register_rows import GAP
from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_cpu.language import CLanguage

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)

_MOST_BYTES, _DEEPEST = 1024 * 1024, 2048
"""Largest weight, and greatest depth, of products that are computed so: oneDNN cuts larger ones to the caches."""

_OF_ONE_ROW = 8 * 1024 * 1024
"""Largest weight of a product of one row, which reads it once."""

_MOST_WASTE, _MANY_ROWS = 1.3, 1000
"""How much longer than whole tiles a product's columns may take, and for how many rows that is asked: so many that the
last tile of rows counts for little."""


def is_direct_product(graph: InferenceGraph, node: Node, one_row: bool) -> bool:
    """Whether a product with a constant weight is better computed by a generated kernel."""
    weight = graph.fake(node.args[-1])
    sizes: list[object] = list(weight.shape)
    if graph.fake(node).dtype is not torch.float32 or not all(isinstance(size, int) for size in sizes):
        return False
    if one_row:
        return weight.nbytes <= _OF_ONE_ROW
    depth, columns = weight.shape
    tiles = CLanguage.register_tiles
    tile = tiles.choose("rows", _MANY_ROWS, columns)
    taken = tile.time(_MANY_ROWS, columns) / (_MANY_ROWS * columns / tiles.lanes)
    return depth <= _DEEPEST and weight.nbytes <= _MOST_BYTES and taken <= _MOST_WASTE


def lay_out_product(graph: InferenceGraph, node: Node) -> None:
    """Give a product its weight row by row, and compute what follows before its result is seen as another shape."""
    *others, weight = node.args
    with graph.before(node):
        laid_out = graph.prepared(_with_gaps, weight, like=_with_gaps(graph.fake(weight)))
        made = graph.call(node.target, *others, laid_out)
    graph.replace(node, made)
    _view_last(graph, made)


def _with_gaps(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows are neighbours, and far enough apart not to share the sets of a cache."""
    rows, columns = weight.shape
    return weight.new_empty(rows, columns + GAP)[:, :columns].copy_(weight)


def _view_last(graph: InferenceGraph, made: Node) -> None:
    """Let the pointwise operators that use a view of a result use the result, where one of them is all that is used."""
    view = graph.only_user(made)
    if view is None or view.target not in _VIEWS:
        return
    chain = _chain_after(graph, view)
    if not chain:
        return
    moved = {view: made}
    with graph.before(view):
        for node in chain:
            args: Any = map_arg(node.args, lambda n: moved[n])
            kwargs: Any = map_arg(node.kwargs, lambda n: moved[n])
            moved[node] = graph.call(node.target, *args, **kwargs)
        last = graph.call(view.target, moved[chain[-1]], *view.args[1:])
    graph.replace(chain[-1], last)


def _chain_after(graph: InferenceGraph, first: Node) -> list[Node]:
    """Return the pointwise operators that depend on a node alone, as many as have one result that others use."""
    known, found = {first}, 0
    chain: list[Node] = []
    while following := next((user for node in known for user in node.users if _follows(graph, user, known)), None):
        known.add(following)
        chain.append(following)
        outside = [node for node in known if not known.issuperset(node.users)]
        if outside == [following]:
            found = len(chain)
    return chain[:found]


def _follows(graph: InferenceGraph, user: Node, known: set[Node]) -> bool:
    if user in known or user.op != "call_function" or not known.issuperset(user.all_input_nodes):
        return False
    tags = user.target.tags if isinstance(user.target, torch._ops.OpOverload) else ()
    return torch.Tag.pointwise in tags and graph.is_free(user)
