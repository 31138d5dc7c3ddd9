"""Products with constant matrices that were laid out in panels: what the operator means, and how its weight is made.

Panels are for devices whose kernels keep sums in registers: numbers that are multiplied one after the other lie one
after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph

_LIBRARY = torch.library.Library("kagent", "FRAGMENT")
_LIBRARY.define("panel_product(Tensor self, Tensor panels, int columns, Tensor? bias=None) -> Tensor")


def panel_product(
    self: torch.Tensor, panels: torch.Tensor, columns: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a product, as the operator ``kagent::panel_product`` means it.

    Parameters
    ----------
    self
        [rows, depth].
    panels
        [panels, depth, width]: a matrix, as `in_panels` lays it out.
    columns
        Of the matrix.
    bias
        [columns], added to each row.
    """
    depth = panels.shape[1]
    matrix = panels.permute(1, 0, 2).reshape(depth, -1)[:, :columns]
    return self @ matrix if bias is None else torch.addmm(bias, self, matrix)


def _empty(self: torch.Tensor, panels: torch.Tensor, columns: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    return self.new_empty(self.shape[0], columns)


_LIBRARY.impl("panel_product", panel_product, "CompositeExplicitAutograd")
_LIBRARY.impl("panel_product", _empty, "Meta")


def in_panels(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return a matrix [depth, columns] as panels of so many columns, with zeros behind the last column."""
    depth, columns = weight.shape
    made = weight.new_zeros(-(-columns // width), depth, width)
    whole = columns // width
    made[:whole] = weight[:, : whole * width].unflatten(1, (whole, width)).permute(1, 0, 2)
    if columns % width:
        made[-1, :, : columns % width] = weight[:, whole * width :]
    return made


def use_panels(graph: InferenceGraph, node: Node, width: int) -> Node:
    """Replace ``aten::mm`` or ``aten::addmm``, whose weight is a constant, by a product with panels; return that."""
    *bias, source, weight = node.args
    fake = graph.fake(weight)
    shape = (-(-fake.shape[1] // width), fake.shape[0], width)
    with graph.before(node):
        panels = graph.prepared(in_panels, weight, width, like=torch.empty(shape, dtype=fake.dtype, device="meta"))
        arguments: tuple[Any, ...] = (source, panels, fake.shape[1], *bias)
        made = graph.call(torch.ops.kagent.panel_product.default, *arguments)
    graph.replace(node, made)
    return made
