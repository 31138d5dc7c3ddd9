"""Inputs that share memory with an input that is written: the case that a captured graph does not cover.

AOTAutograd's graph holds for the way in which inputs shared memory while it was captured, and Dynamo's guards do not
see every later call that shares it otherwise (https://github.com/pytorch/pytorch/issues/139789). So each call is
looked at when its inputs are bound, and one that the graph does not hold for runs as eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from kagent_core.capture.ranges import overlap_with_written
from kagent_core.capture.symbols import is_symbolic
from kagent_core.inspect.logs import get_logger

log = get_logger("capture")

Runner = Callable[..., Any]


def guard_aliases(
    graph_module: GraphModule,
    compiled: Runner,
    written: frozenset[int],
    example_inputs: Sequence[Any],
    name: str,
    backend: Callable[..., Runner],
) -> Runner:
    """Return a runner that uses `compiled` for the calls that it holds for.

    Parameters
    ----------
    graph_module
        Dynamo's graph, which eager PyTorch runs where `compiled` does not hold.
    compiled
        The graph compiled for `example_inputs`.
    written
        Inputs that it writes. Without any, sharing memory changes nothing.
    example_inputs
        What it was captured with.
    name
        For log lines.
    backend
        Compiles `graph_module` again, should it have been captured with inputs that share memory and be called with
        inputs that do not.
    """
    if not written:
        return compiled
    layout = storage_layout(example_inputs)
    if layout is None:
        return _guard_separate(graph_module, compiled, written, _is_static(example_inputs), name)
    return _guard_shared(graph_module, compiled, layout, name, backend)


def storage_layout(inputs: Sequence[Any]) -> tuple[tuple[int, int], ...] | None:
    """Return which tensors lie in one storage and at which offsets; None when none share one.

    For each tensor: the position of the first tensor with the same storage, and its storage offset. A symbolic
    offset is given as -1, which equals no real one.
    """
    first: dict[int, int] = {}
    layout: list[tuple[int, int]] = []
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            offset = value.storage_offset()
            home = first.setdefault(value.untyped_storage()._cdata, index)
            layout.append((home, -1 if is_symbolic(offset) else int(offset)))
    return tuple(layout) if len(first) < len(layout) else None


def _is_static(inputs: Sequence[Any]) -> bool:
    """Whether every size and stride is a number: then addresses alone tell what overlaps."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return not any(is_symbolic(number) for tensor in tensors for number in (*tensor.shape, *tensor.stride()))


def _guard_separate(
    graph_module: GraphModule, compiled: Runner, written: frozenset[int], static: bool, name: str
) -> Runner:
    """Captured with inputs that share no memory: run calls with overlapping inputs in eager PyTorch."""
    last_clear: tuple[int, ...] = ()

    def run(*args: Any) -> Any:
        nonlocal last_clear
        addresses = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 for arg in args)
        if addresses != last_clear or not static:
            overlap = overlap_with_written(args, written)
            if overlap is not None:
                log.warning(
                    "%s: this call runs in eager PyTorch: input %d, which is written, shares memory with input %d",
                    name,
                    *overlap,
                )
                return graph_module(*args)
            last_clear = addresses
        return compiled(*args)

    return run


def _guard_shared(
    graph_module: GraphModule,
    compiled: Runner,
    layout: tuple[tuple[int, int], ...],
    name: str,
    backend: Callable[..., Runner],
) -> Runner:
    """Captured with inputs in one storage: the graph holds for exactly that layout."""
    separate = torch.compile(graph_module, backend=backend)

    def run(*args: Any) -> Any:
        came = storage_layout(args)
        if came is None:
            return separate(*args)
        if came == layout:
            return compiled(*args)
        log.warning(
            "%s: this call runs in eager PyTorch: its inputs share memory otherwise than those it was captured with",
            name,
        )
        return graph_module(*args)

    return run
