"""Activations that oneDNN computes together with a product or a convolution, as captured graphs spell them.

Only those that give what PyTorch gives, NaN included: oneDNN's relu, hardtanh and hardsigmoid turn NaN into a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kagent_core.optimize.inference_graph import InferenceGraph

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation behind a node.

    Attributes
    ----------
    last
        The node that gives its result.
    attr, scalars, algorithm
        As oneDNN's operators take it.
    """

    last: Node
    attr: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""

    @property
    def arguments(self) -> tuple[str, list[float], str]:
        """The arguments of ``mkldnn::_linear_pointwise`` and its like."""
        return self.attr, list(self.scalars), self.algorithm


def activation_after(graph: InferenceGraph, node: Node) -> Activation | None:
    """Return the activation that is all that becomes of a node's result, or None.

    In half types eager PyTorch rounds before the activation and after it, which oneDNN does once: there is none.
    """
    if graph.fake(node).dtype is not torch.float32:
        return None
    user = graph.only_user(node)
    if user is not None and graph.is_free(user):
        if user.target is aten.sigmoid.default:
            return Activation(user, "sigmoid")
        if user.target is aten.tanh.default:
            return Activation(user, "tanh")
        if user.target is aten.gelu.default:
            return Activation(user, "gelu", algorithm=user.kwargs.get("approximate", "none"))  # type: ignore[arg-type]
    return _swish(graph, node) or _hardswish(graph, node)


def _swish(graph: InferenceGraph, node: Node) -> Activation | None:
    """Match ``x * sigmoid(x)``."""
    sigmoids = [user for user in node.users if user.target is aten.sigmoid.default]
    if len(node.users) != 2 or len(sigmoids) != 1:
        return None
    last = graph.only_user(sigmoids[0])
    if last is None or last.target is not aten.mul.Tensor or set(last.args) != {node, sigmoids[0]}:
        return None
    return Activation(last, "swish") if _all_free(graph, sigmoids[0], last) else None


def _hardswish(graph: InferenceGraph, node: Node) -> Activation | None:
    """Match ``x * clamp(x + 3, 0, 6) / 6``, its clamp in two."""
    chain: list[Node] = []
    step: Node | None = next((user for user in node.users if user.target is aten.add.Tensor), None)
    for target, rest in _HARDSWISH:
        if step is None or step.target is not target or step.kwargs or not _has(step, node if rest == "x" else rest):
            return None
        chain.append(step)
        step = graph.only_user(step)
    if set(node.users) != {chain[0], chain[-2]} or chain[0].args[0] is not node:
        return None
    return Activation(chain[-1], "hardswish") if _all_free(graph, *chain) else None


_HARDSWISH: tuple[tuple[Any, Any], ...] = (
    (aten.add.Tensor, (3,)),
    (aten.clamp.default, (0,)),
    (aten.clamp.default, (None, 6)),
    (aten.mul.Tensor, "x"),
    (aten.div.Tensor, (6,)),
)


def _has(node: Node, rest: Any) -> bool:
    """Whether a call has some numbers behind its first argument, or a node among its arguments."""
    return rest in node.args if isinstance(rest, Node) else node.args[1:] == rest


def _all_free(graph: InferenceGraph, *nodes: Node) -> bool:
    return all(map(graph.is_free, nodes))
