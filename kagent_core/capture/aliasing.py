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

_OVERLAPS = "%s: this call runs in eager PyTorch: input %d, which is written, shares memory with input %d"


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
    return _guard_shared(graph_module, compiled, written, layout, name, backend)


def storage_layout(inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return how tensors share storages; None when none share one.

    For each strided tensor the position of the first one in the same storage, and its storage offset; then, for each
    storage with several, what AOTAutograd takes for their common base. A symbolic number is given as -1, which equals
    no real one.
    """
    members: dict[int, list[int]] = {}
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            members.setdefault(value.untyped_storage()._cdata, []).append(index)
    shared = [group for group in members.values() if len(group) > 1]
    if not shared:
        return None
    places = [
        (group[0], index, _number(inputs[index].storage_offset())) for group in members.values() for index in group
    ]
    return (*sorted(places), *(_base_of([inputs[index] for index in group]) for group in shared))


def _is_more_than_views(inputs: Sequence[Any]) -> bool:
    """Whether a storage goes on behind the last of the tensors that lie in it."""
    rest: dict[int, int] = {}
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            storage = value.untyped_storage()
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            behind = int(storage.nbytes() - (value.storage_offset() + last + 1) * value.element_size())
            rest[storage._cdata] = min(behind, rest.get(storage._cdata, behind))
    return any(rest.values())


def _base_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Geometry of the tensor that all of some tensors are views of, or of their storage when there is none."""
    base = next((tensor._base for tensor in tensors if tensor._base is not None), None)
    nbytes = _number(tensors[0].untyped_storage().nbytes())
    if base is None:
        return (nbytes,)
    return (nbytes, *map(_number, (*base.shape, *base.stride(), base.storage_offset())))


def _number(value: Any) -> int:
    return -1 if is_symbolic(value) else int(value)


def _is_static(inputs: Sequence[Any]) -> bool:
    """Whether every size and stride is a number: then addresses alone tell what overlaps."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return not any(is_symbolic(number) for tensor in tensors for number in (*tensor.shape, *tensor.stride()))


def _address(value: Any) -> int:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.data_ptr() if strided else 0


def _guard_separate(
    graph_module: GraphModule, compiled: Runner, written: frozenset[int], static: bool, name: str
) -> Runner:
    """Captured with inputs that share no memory: run calls with overlapping inputs in eager PyTorch."""
    last_clear: tuple[int, ...] = ()

    def run(*args: Any) -> Any:
        nonlocal last_clear
        addresses = tuple(map(_address, args))
        if addresses != last_clear or not static:
            overlap = overlap_with_written(args, written)
            if overlap is not None:
                log.warning(_OVERLAPS, name, *overlap)
                return graph_module(*args)
            last_clear = addresses
        return compiled(*args)

    return run


def _guard_shared(
    graph_module: GraphModule,
    compiled: Runner,
    written: frozenset[int],
    layout: tuple[Any, ...],
    name: str,
    backend: Callable[..., Runner],
) -> Runner:
    """Captured with inputs in one storage: the graph holds for exactly that layout.

    Views made under inference mode know no base. Of those that overlap, AOTAutograd captures as much of their storage
    as they reach, and calls with all of it.
    """
    without_base = any(len(place) == 1 for place in layout)
    separate = torch.compile(graph_module, backend=backend)

    def run(*args: Any) -> Any:
        came = storage_layout(args)
        if came is None:
            return separate(*args)
        if came == layout:
            overlap = overlap_with_written(args, written) if without_base and _is_more_than_views(args) else None
            if overlap is None:
                return compiled(*args)
            log.warning(_OVERLAPS, name, *overlap)
            return graph_module(*args)
        log.warning(
            "%s: this call runs in eager PyTorch: its inputs share memory otherwise than those it was captured with",
            name,
        )
        return graph_module(*args)

    return run
