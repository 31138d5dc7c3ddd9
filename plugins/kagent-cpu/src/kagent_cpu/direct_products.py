"""Products for which generated kernels are faster than oneDNN, with weights laid out as those take them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kagent_core.codegen.panel_tiles import choose_tile
from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_core.optimize.panels import use_panels
from kagent_cpu.language import CLanguage

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)

_ROWS = 1000
"""Of a product whose number of rows is a symbol."""

_CALL = 25e-6 * 250e9
"""What could be computed in the time that a call of oneDNN takes before it computes anything."""

_SLOWER = 1.08
"""How much longer than a generated kernel oneDNN takes for products with as many columns as tiles have: 1.04 to 1.3."""


def is_direct_product(graph: InferenceGraph, node: Node) -> bool:
    """Whether a product with a constant weight is better computed by a generated kernel.

    It is, but for few columns, where most of the last vector would be computed for nothing.
    """
    sizes: list[object] = list(graph.fake(node.args[-1]).shape)
    if graph.fake(node).dtype is not torch.float32 or not all(isinstance(size, int) for size in sizes):
        return False
    depth, columns = graph.fake(node.args[-1]).shape
    lanes = CLanguage.register_tiles.lanes
    computed = -(-columns // lanes) * lanes
    return 2 * _rows(graph, node) * depth * (computed - _SLOWER * columns) <= _CALL


def lay_out_product(graph: InferenceGraph, node: Node) -> None:
    """Give a product its weight in panels, and compute what follows before its result is seen as another shape."""
    columns = graph.fake(node).shape[1]
    tile = choose_tile(CLanguage.register_tiles, _rows(graph, node), columns)
    _view_last(graph, use_panels(graph, node, tile.width))


def _rows(graph: InferenceGraph, node: Node) -> int:
    rows: object = graph.fake(node).shape[0]
    return rows if isinstance(rows, int) else _ROWS


def _view_last(graph: InferenceGraph, made: Node) -> None:
    """Let the pointwise operators that use a view of a result use the result, where one of them is all that is used.

    What else they read, such as the other summand of a residual sum, is seen in the shape of the result.
    """
    view = graph.only_user(made)
    if view is None or view.target not in _VIEWS:
        return
    chain = _chain_after(graph, view)
    if not chain:
        return
    moved = {view: made}
    with graph.before(chain[-1]):  # where all that they read has been computed
        for node in chain:
            for other in node.all_input_nodes:
                if other not in moved:
                    moved[other] = _in_shape_of(graph, other, view, made)
            args: Any = map_arg(node.args, lambda n: moved[n])
            kwargs: Any = map_arg(node.kwargs, lambda n: moved[n])
            moved[node] = graph.call(node.target, *args, **kwargs)
        last = graph.call(view.target, moved[chain[-1]], *view.args[1:])
    graph.replace(chain[-1], last)


def _chain_after(graph: InferenceGraph, first: Node) -> list[Node]:
    """Return the pointwise operators that depend on a node, as many as have one result that others use."""
    known, found = {first}, 0
    chain: list[Node] = []

    def follows(user: Node) -> bool:
        return user not in known and _is_pointwise(graph, user) and all(map(may_read, user.all_input_nodes))

    def may_read(node: Node) -> bool:
        return node in known or (_is_like(node, first) and not _depends(node, first))

    while following := next((user for node in (first, *chain) for user in node.users if follows(user)), None):
        known.add(following)
        chain.append(following)
        outside = [node for node in known if not known.issuperset(node.users)]
        if outside == [following]:
            found = len(chain)
    return chain[:found]


def _is_pointwise(graph: InferenceGraph, node: Node) -> bool:
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.pointwise in tags and graph.is_free(node)


def _is_like(node: Node, first: Node) -> bool:
    """Whether a tensor is a single element, or has another's shape and no gaps: then it is seen in any shape."""
    value, like = node.meta.get("val"), first.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    return value.dim() == 0 or (value.shape == like.shape and value.is_contiguous())


def _depends(node: Node, first: Node) -> bool:
    """Whether a node is computed from another one."""
    seen, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source is first:
                return True
            if source not in seen and first < source:  # what comes before it does not depend on it
                seen.add(source)
                waiting.append(source)
    return False


def _in_shape_of(graph: InferenceGraph, other: Node, view: Node, made: Node) -> Node:
    """Return what is read beside a view of a result, in the shape of the result."""
    if graph.fake(other).dim() == 0:
        return other
    return graph.call(view.target, other, list(graph.fake(made).shape))
