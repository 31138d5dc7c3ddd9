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

_FILLS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)

SMALL = 1 << 22
"""Bytes of a constant that is kept however little it is made from, such as a mask of 1,024 by 1,024 made from a size.

To read so much from memory takes less time than to compute it again.
"""


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
    """Return the constants that the rest of the graph uses.

    Where one is too large, what it is made from is kept, and it is computed at every call. So it is where all its
    elements are one number, which kernels of pointwise operators have in their text.
    """
    computed: set[Node] = set()
    returned = _returned(graph)
    for node in graph.graph.nodes:
        if node.op != "call_function" or not graph.is_constant(node) or node in returned:
            continue
        if not is_view(node) or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    while True:
        made = [node for node in graph.graph.nodes if node in computed and not computed.issuperset(node.users)]
        dropped = _too_large(graph, made) | {node for node in made if _is_number(node, computed)}
        if not dropped:
            return made
        computed -= dropped


def _too_large(graph: InferenceGraph, made: list[Node]) -> set[Node]:
    """Return the constants that take far more memory than what they are made from, and no little.

    All that come out of little memory together take no more than the model's parameters.
    """
    room = max(SMALL, sum(map(_nbytes, graph.parameters)))
    found: set[Node] = set()
    for node in made:
        if not isinstance(node.meta["val"], torch.Tensor):
            found.add(node)
            continue
        nbytes = _kept_nbytes(node)
        if nbytes <= 4 * _nbytes_of_sources(node):
            continue
        if nbytes > min(SMALL, room):
            found.add(node)
        else:
            room -= nbytes
    return found


def _is_number(node: Node, computed: set[Node]) -> bool:
    """Whether a constant is a number, or a view of one, that only pointwise operators take outside of constants."""
    filled = node
    while is_view(filled):
        filled = filled.all_input_nodes[0]
    return filled.target in _FILLS and _takes_elements(node, computed)


def _takes_elements(node: Node, computed: set[Node]) -> bool:
    """Whether what uses a constant outside of constants, directly or through views, computes element by element."""
    users = [user for user in node.users if user not in computed]
    return all(
        _takes_elements(user, computed)
        if user.op == "call_function" and is_view(user)
        else torch.Tag.pointwise in getattr(user.target, "tags", ())
        for user in users
    )


def _nbytes_of_sources(node: Node) -> int:
    """Return how much memory the parameters and tensors take that a constant is made from."""
    sources, waiting = set[Node](), [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in sources:
                sources.add(source)
                waiting.append(source)
    return sum(_nbytes(source) for source in sources if source.op in ("placeholder", "get_attr"))


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


def _kept_nbytes(node: Node) -> int:
    """Return how much memory a constant keeps: of a view, that of what it is a view of."""
    return _nbytes(node) and int(node.meta["val"].untyped_storage().nbytes())
