"""A graph is split into what depends on parameters only, which is computed once, and what remains for every call."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kagent_core.optimize.inference_graph import InferenceGraph, is_view

SMALL = 1 << 20
"""Bytes of a constant that is kept however little it is made from, such as a mask made from a size."""


@dataclass(frozen=True)
class SplitGraph:
    """The two parts of a graph.

    Attributes
    ----------
    constants
        Computes the constants from some of the graph's inputs.
    watched
        Positions of those inputs.
    main
        Computes the results, from what is left of the inputs and then the constants.
    kept
        Positions of the inputs that are left.
    count
        Of constants.
    """

    constants: ConstantPart
    watched: tuple[int, ...]
    main: GraphModule
    kept: tuple[int, ...]
    count: int


class ConstantPart:
    """Computes constants by calling the nodes that make them.

    Parameters
    ----------
    module
        Whose attributes the nodes name.
    parameters, calls, made
        Nodes: what is given, what is computed in which order, and what is wanted of it.
    """

    def __init__(
        self, module: GraphModule, parameters: tuple[Node, ...], calls: tuple[Node, ...], made: tuple[Node, ...]
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._calls = calls
        self._made = made

    def __call__(self, *parameters: torch.Tensor) -> list[torch.Tensor]:
        """Return the constants of some parameters."""
        values: dict[Node, Any] = dict(zip(self._parameters, parameters, strict=True))
        for node in self._calls:
            if node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(self._module)
                continue
            args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [values[node] for node in self._made]


def split(graph: InferenceGraph) -> SplitGraph | None:
    """Split a graph; None where nothing is worth being computed ahead.

    Views of parameters are no computations: they stay where they are used. A constant that is returned is computed at
    every call, for it is the caller's to write.
    """
    graph.clean()
    made = _worth_keeping(graph)
    if not made:
        return None
    constants, watched = _constants(graph, made)
    main, kept = _main(graph, made)
    positions = {node: position for position, node in enumerate(graph.placeholders)}
    return SplitGraph(
        constants, tuple(positions[node] for node in watched), main, tuple(positions[node] for node in kept), len(made)
    )


def _worth_keeping(graph: InferenceGraph) -> list[Node]:
    """Return the constants that the rest of the graph uses."""
    computed: set[Node] = set()
    returned = _returned(graph)
    for node in graph.graph.nodes:
        if node.op != "call_function" or not graph.is_constant(node) or node in returned:
            continue
        if not is_view(node) or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    made = [node for node in graph.graph.nodes if node in computed and not computed.issuperset(node.users)]
    return [node for node in made if isinstance(node.meta["val"], torch.Tensor) and _is_worth(graph, node)]


def _is_worth(graph: InferenceGraph, node: Node) -> bool:
    """Whether a constant takes no more memory than what it is made from, or very little."""
    sources, waiting = set[Node](), [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in sources:
                sources.add(source)
                waiting.append(source)
    given = sum(_nbytes(source) for source in sources if source.op in ("placeholder", "get_attr"))
    return _nbytes(node) <= max(4 * given, SMALL)


def _returned(graph: InferenceGraph) -> set[Node]:
    """Return the nodes whose memory the caller gets."""
    found: set[Node] = set()
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    waiting = [output]
    while waiting:
        node = waiting.pop()
        for source in node.all_input_nodes:
            if source not in found and (node is output or is_view(node)):
                found.add(source)
                waiting.append(source)
    return found


def _constants(graph: InferenceGraph, made: list[Node]) -> tuple[ConstantPart, list[Node]]:
    needed, waiting = set(made), list(made)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                waiting.append(source)
    calls = [node for node in graph.graph.nodes if node in needed and node.op != "placeholder"]
    parameters = [node for node in graph.placeholders if node in needed]
    return ConstantPart(graph.module, tuple(parameters), tuple(calls), tuple(made)), parameters


def _main(graph: InferenceGraph, made: list[Node]) -> tuple[GraphModule, list[Node]]:
    part = Graph()
    copies: dict[Node, Node] = {}
    needed = _needed(graph, made)
    kept = [node for node in graph.placeholders if node in needed or node not in graph.parameters]
    for node in kept:
        copies[node] = part.node_copy(node)
    for node in made:
        copies[node] = part.placeholder(f"constant_{node.name}")
        copies[node].meta = {"val": node.meta["val"], "fixed": True}
    for node in graph.graph.nodes:
        if node.op != "placeholder" and node in needed and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    return GraphModule(graph.module, part), kept


def _needed(graph: InferenceGraph, made: list[Node]) -> set[Node]:
    """Return what the results need, where some nodes are given."""
    given = set(made)
    waiting = [node for node in graph.graph.nodes if node.op == "output" or not node.users]
    needed = set(waiting)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in needed and source not in given:
                needed.add(source)
                waiting.append(source)
    return needed


def _nbytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return 0
    return math.prod(value.shape) * value.element_size()
