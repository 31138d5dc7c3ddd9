"""Layers of LSTMs become a product with all of their input, and an operator that makes the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from kagent_core.inspect.logs import get_logger
from kagent_core.optimize.inference_graph import InferenceGraph

log = get_logger("capture")

aten = torch.ops.aten

PackedShape = tuple[int, int, int]
"""Of a weight in tiles: how many there are, the width of the state, columns of a tile."""

ChooseShape = Callable[[int, int], PackedShape | str]
"""Given a batch and the width of a state, how the weight of the state is laid out, or why it is not."""

_LSTM = 2
"""What ``aten::mkldnn_rnn_layer`` calls an LSTM."""

_GATES = 4

_LIBRARY = torch.library.Library("kagent", "FRAGMENT")
_LIBRARY.define(
    "lstm_steps(Tensor projected, Tensor weight, Tensor hx, Tensor cx, bool reverse) -> (Tensor, Tensor, Tensor)"
)


def lstm_steps(
    projected: torch.Tensor, weight: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the steps of an LSTM layer one by one: what the operator ``kagent::lstm_steps`` means.

    Parameters
    ----------
    projected
        [steps, batch, 4 * width]: the product of the layer's input and its weight, and the biases.
    weight
        What is multiplied with the state, as `packed_lstm_weight` gives it.
    hx, cx
        [1, batch, width]: state and cell before the first step.
    reverse
        Whether the last step comes first.

    Returns
    -------
    tuple
        All states [steps, batch, width], the last state and the last cell.
    """
    state, cell = hx[0], cx[0]
    width = state.shape[1]
    matrix = weight.permute(1, 0, 2).reshape(width, -1)[:, : _GATES * width]
    made = []
    for given in projected.flip(0) if reverse else projected:
        put, kept, new, shown = (given + state @ matrix).chunk(_GATES, 1)
        cell = kept.sigmoid() * cell + put.sigmoid() * new.tanh()
        state = shown.sigmoid() * cell.tanh()
        made.append(state)
    states = torch.stack(made[::-1] if reverse else made)
    return states, state.unsqueeze(0).clone(), cell.unsqueeze(0).clone()


def _laid_out(
    projected: torch.Tensor, weight: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    steps, batch, _ = projected.shape
    return projected.new_empty(steps, batch, hx.shape[2]), hx.new_empty(hx.shape), cx.new_empty(cx.shape)


_LIBRARY.impl("lstm_steps", lstm_steps, "CompositeExplicitAutograd")
_LIBRARY.impl("lstm_steps", _laid_out, "Meta")


def compute_inputs_first(graph: InferenceGraph, choose: ChooseShape) -> int:
    """Compute what the layers of LSTMs make of their input in one product each; return of how many.

    Parameters
    ----------
    graph
        To rewrite.
    choose
        Given how many sequences there are, and the width of the state: how the weight of the state is laid out for a
        kernel that makes the steps; or why the layer is better left to the library.
    """
    changed = 0
    for node in graph.calls(aten.mkldnn_rnn_layer.default):
        found = _refusal(graph, node) or choose(graph.fake(node.args[0]).shape[1], graph.fake(node.args[2]).shape[1])
        if isinstance(found, str):
            log.debug("%s stays as it is: %s", node.name, found)
            continue
        _compute_input_first(graph, node, found)
        changed += 1
    if changed:
        log.debug("what %d layers of LSTMs make of their input is computed first", changed)
        graph.clean()
    return changed


def packed_lstm_weight(weight: torch.Tensor, shape: PackedShape) -> torch.Tensor:
    """Return a weight [4 * width, width] tile by tile: [tiles, width, columns], with zeros behind the last column."""
    count, depth, columns = shape
    made = weight.new_zeros(depth, count * columns)
    made[:, : weight.shape[0]] = weight.t()
    return made.view(depth, count, columns).permute(1, 0, 2).contiguous()


def _refusal(graph: InferenceGraph, node: Node) -> str | None:
    """Return why a layer cannot be computed so, or None."""
    arguments: Any = node.args
    source, *weights, hx, cx, _, batch_sizes, mode, _, layers, _, bidirectional, batch_first, train = arguments
    if mode != _LSTM or layers != 1 or bidirectional or batch_first or train or batch_sizes or node.kwargs:
        return "it is not one layer of an LSTM in inference"
    if any(user.args[1] == 3 and user.users for user in node.users):
        return "what gradients need is asked for"
    dtypes = {graph.fake(tensor).dtype for tensor in (source, *weights, hx, cx)}
    if dtypes != {torch.float32}:
        return f"its tensors are {', '.join(sorted(map(str, dtypes)))}, not float32"
    if not all(map(graph.is_constant, weights)) or graph.is_constant(node):
        return "its weights are no constants, or all of it is one"
    if not graph.is_free(node):
        return "it has a kernel or a device of its own"
    steps, *sizes = graph.fake(source).shape
    known: list[object] = [*sizes, graph.fake(arguments[2]).shape[1]]
    if not all(isinstance(size, int) and size > 0 for size in known) or steps == 0:
        return "a size is a symbol, or 0"
    return None


def _compute_input_first(graph: InferenceGraph, node: Node, shape: PackedShape) -> None:
    arguments: Any = node.args
    source, to_input, to_state, *biases, hx, cx, reverse, _, _, _, _, has_biases, _, _, _ = arguments
    _, batch, depth = graph.fake(source).shape
    rows = graph.fake(to_state).shape[0]
    with graph.before(node):
        if not graph.fake(source).is_contiguous():
            source = graph.call(aten.clone.default, source, memory_format=torch.contiguous_format)
        flat = graph.call(aten.view.default, source, [-1, depth])
        weight = graph.call(aten.permute.default, to_input, [1, 0])
        if has_biases:
            made = graph.call(aten.addmm.default, graph.call(aten.add.Tensor, *biases), flat, weight)
        else:
            made = graph.call(aten.mm.default, flat, weight)
        projected = graph.call(aten.view.default, made, [-1, batch, rows])
        like = torch.empty(shape, dtype=torch.float32, device="meta")
        packed = graph.prepared(packed_lstm_weight, to_state, shape, like=like)
        stepped = graph.call(torch.ops.kagent.lstm_steps.default, projected, packed, hx, cx, reverse)
    graph.replace(node, stepped)
