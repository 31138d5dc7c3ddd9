"""Views whose fake tensors are not views: passes of PyTorch's own leave them so where they change what comes before."""

from __future__ import annotations

import operator
from typing import Any

from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from kagent_core.capture.graph import storages_of
from kagent_core.capture.schemas import is_operator


def restore_views(graph_module: GraphModule) -> None:
    """Give every view a fake tensor in the memory of one of its arguments, from which kagent knows it for a view.

    Where a Python number of the program becomes an input, as under ``dynamic=True``, PyTorch computes with it on
    tensors: such calls take the place of captured ones, and what viewed those keeps the fakes of a memory that is gone.
    """
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    restored: set[Node] = set()
    for node in nodes:
        stale = _is_view_of_nothing(node) if is_operator(node.target) else node.target is operator.getitem
        if stale and (is_operator(node.target) or node.args[0] in restored):
            node.meta["val"] = _evaluated(node)
            restored.add(node)


def _is_view_of_nothing(node: Node) -> bool:
    """Whether a call is to give a view and its fake tensors share no memory with those of its arguments."""
    if not node.target.is_view:  # type: ignore[union-attr]
        return False
    made = storages_of(node)
    given: set[int] = set().union(*map(storages_of, node.all_input_nodes))
    return bool(made) and bool(given) and made.isdisjoint(given)


def _evaluated(node: Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode(tree_leaves((args, kwargs)))
    if mode is None:
        return node.meta["val"]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]
