"""Captured graphs made for measuring: as AOTAutograd makes them, of any size, with next to nothing to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kagent_core.capture.graph import CapturedGraph

aten = torch.ops.aten

BLOCK = 10
"""Operators in one block of `mixed_graph`."""

SIDE = 8
"""Rows and columns of the tensors in `mixed_graph`."""


class GraphWriter:
    """Writes a graph of operators on fake tensors."""

    def __init__(self) -> None:
        self._graph = Graph()
        self._mode = FakeTensorMode()
        self._count = 0

    def input(self, *shape: int) -> Node:
        """Add an input of float32."""
        node = self._graph.placeholder(f"arg{self._count}")
        self._count += 1
        with self._mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, overload: Any, *args: Any) -> Node:
        """Add an operator. It has a Python stack, as one that Dynamo saw has."""
        node = self._graph.call_function(overload, args)
        with self._mode:
            node.meta["val"] = overload(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        self._count += 1
        node.meta["stack_trace"] = (
            f'  File "model.py", line 10, in forward\n    x = self.layers(x)\n'
            f'  File "layers.py", line {self._count}, in forward\n    return {overload.__name__}(x)\n'
        )
        return node

    def finish(self, output: Node, name: str) -> CapturedGraph:
        """Return the graph with its output."""
        self._graph.output((output,))
        return CapturedGraph(GraphModule(torch.nn.Module(), self._graph), name)


def mixed_graph(operators: int) -> CapturedGraph:
    """Return a graph that takes two square matrices: a chain of blocks that branch and join, views among them.

    Parameters
    ----------
    operators
        A multiple of `BLOCK`, of whose operators two are views.
    """
    if operators < BLOCK or operators % BLOCK:
        raise ValueError(f"a graph of {operators} operators was asked for, expected a multiple of {BLOCK}")
    writer = GraphWriter()
    x, weight = writer.input(SIDE, SIDE), writer.input(SIDE, SIDE)
    for _ in range(operators // BLOCK):
        scaled = writer.call(aten.mul.Tensor, x, 0.5)
        added = writer.call(aten.add.Tensor, scaled, x)
        turned = writer.call(aten.permute.default, added, [1, 0])
        product = writer.call(aten.mm.default, turned, weight)
        one = writer.call(aten.relu.default, product)
        other = writer.call(aten.sigmoid.default, product)
        joined = writer.call(aten.mul.Tensor, one, other)
        flat = writer.call(aten.view.default, joined, [SIDE * SIDE])
        mean = writer.call(aten.mean.dim, flat, [0], True)
        x = writer.call(aten.sub.Tensor, joined, mean)
    return writer.finish(x, f"mixed{operators}")


def mixed_inputs() -> list[torch.Tensor]:
    """Return inputs of `mixed_graph`."""
    return [torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE), torch.eye(SIDE)]
