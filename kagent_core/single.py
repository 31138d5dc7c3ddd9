"""One operator through the whole pipeline, with plans kept for arguments that come again."""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from kagent_core.capture.graph import CapturedGraph, input_spec
from kagent_core.capture.ranges import overlap_with_written
from kagent_core.capture.schemas import OperatorSchema, schema_of, signature_of
from kagent_core.errors import CaptureError, KernelNotFoundError
from kagent_core.inspect.logs import get_logger
from kagent_core.pipeline import CompiledGraph
from kagent_core.specs import OpCall

if TYPE_CHECKING:
    from kagent_core.session import Session

log = get_logger("capture")

KEPT_OPERATORS = 256

READ_NO_ELEMENT = frozenset(
    f"aten::{name}"
    for name in (
        *("size", "stride", "numel", "storage_offset", "dim", "is_contiguous", "is_same_size"),
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous"),
        *("is_complex", "is_floating_point", "is_signed", "is_conj", "is_neg", "is_inference"),
    )
)
"""Operators that return what is known of a tensor without its elements."""


class _NotStridedError(Exception):
    """The operator returns a tensor of another layout than strided."""


class _NumberError(Exception):
    """The operator returns a number, which is that of these tensors and of no others."""


def _needs_the_tensors_themselves(overload: Any, leaves: Sequence[Any]) -> bool:
    """Whether no spec can stand for the arguments: the operator changes their shape, or they are not strided."""
    if torch.Tag.inplace_view in overload.tags:
        return True
    return any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves)


class _Single:
    """One operator's graph, compiled, and how to put its flat outputs back into what the operator returns."""

    def __init__(self, compiled: CompiledGraph, spec: pytree.TreeSpec) -> None:
        self.compiled = compiled
        self.spec = spec


class SingleOperators:
    """The single-operator graphs of a session, least recently used dropped first."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, _Single] = OrderedDict()
        self._lock = RLock()

    def run(self, session: Session, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and return what it returns. No gradient is recorded.

        Raises
        ------
        CaptureError
            When the operator does not take these arguments.
        KernelNotFoundError
            When what it returns is known only when it has run, and config allows no fallback device.
        KagentError
            As the agents raise.
        """
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if overload._schema.name in READ_NO_ELEMENT:
            return overload(*args, **kwargs)
        if _needs_the_tensors_themselves(overload, leaves):
            return _run_unplanned(session, overload, args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (overload, structure, tuple(_leaf_key(leaf) for leaf in leaves))
        with self._lock:
            single = self._known.get(key)
            if single is None:
                try:
                    single = _build(session, overload, leaves, structure)
                except (DataDependentOutputException, DynamicOutputShapeException, _NotStridedError, _NumberError):
                    return _run_unplanned(session, overload, args, kwargs)
                self._known[key] = single
                if len(self._known) > KEPT_OPERATORS:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
        return pytree.tree_unflatten(single.compiled(tensors), single.spec)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.is_conj(), leaf.is_neg(), leaf.device)
    return (type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf)


def _build(session: Session, overload: Any, leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Single:
    """Write a graph with this one operator, as capture would have."""
    graph, mode = Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    nodes: list[Any] = []
    fakes: list[Any] = []
    module = torch.nn.Module()
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            nodes.append(_node_of(graph, module, leaf, f"constant{len(nodes)}"))
            fakes.append(leaf)
            continue
        node = graph.placeholder(f"arg{len(nodes)}")
        fake = mode.from_tensor(leaf.detach())
        node.meta["val"] = fake
        nodes.append(node)
        fakes.append(fake)
    fake_args, fake_kwargs = pytree.tree_unflatten(fakes, structure)
    with mode, torch.no_grad(), _quiet_meta_kernels():
        try:
            value = overload(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise
        except Exception as error:
            raise _refused(overload, leaves, error) from error
    flat, spec = pytree.tree_flatten(value)
    if any(isinstance(item, torch.Tensor) and item.layout is not torch.strided for item in flat):
        raise _NotStridedError
    if flat and not any(item is None or isinstance(item, torch.Tensor) for item in flat):
        raise _NumberError  # which it is depends on elements: of scalars, fake tensors remember them in PyTorch 2.15
    node_args, node_kwargs = pytree.tree_unflatten(nodes, structure)
    call = graph.create_node(
        "call_function", overload, node_args, node_kwargs, name=overload._schema.name.split("::")[1]
    )
    call.meta["val"] = value
    graph.output(_outputs(graph, call, value, flat, overload))
    name = signature_of(overload).replace("::", "_").replace(".", "_")
    captured = CapturedGraph(GraphModule(module, graph), name)
    return _Single(CompiledGraph(session.for_one_operator(), captured), spec)


def _node_of(graph: Graph, module: torch.nn.Module, leaf: Any, name: str) -> Any:
    """Return an argument that is no tensor as a graph has it: one that no text stands for, from an attribute."""
    if not isinstance(leaf, torch.Generator):
        return leaf
    setattr(module, name, leaf)
    return graph.get_attr(name)


@contextmanager
def _quiet_meta_kernels() -> Iterator[None]:
    """Torch logs a traceback when an operator refuses its arguments; the error that we raise says it better."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _refused(overload: Any, leaves: Sequence[Any], error: Exception) -> CaptureError:
    given = ", ".join(
        str(input_spec(leaf, 0, whole_storage=False)) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
    return CaptureError(
        f"{signature_of(overload)} does not take ({given}): {str(error).strip().splitlines()[0]}",
        hint=f"its schema is {overload._schema}",
    )


def _outputs(graph: Graph, call: Any, value: Any, flat: Sequence[Any], overload: Any) -> tuple[Any, ...]:
    """Nodes for the flat results; an argument that is written and returned stands for itself."""
    written = [arg.alias_info.before_set if arg.alias_info else None for arg in overload._schema.arguments]
    returned = []
    for result in overload._schema.returns:
        info = result.alias_info
        position = written.index(info.before_set) if info is not None and info.is_write else None
        returned.append(position)
    if len(flat) == 1 and isinstance(value, torch.Tensor):
        return (_argument(call, overload, returned[0]) or call,)
    outputs: list[Any] = []
    for path, item in _indexed(value, ()):
        if not isinstance(item, torch.Tensor):
            outputs.append(item)
            continue
        same = _argument(call, overload, returned[path[0]]) if len(path) == 1 and len(returned) > 1 else None
        if same is None:
            same, part = call, value
            for index in path:
                part = part[index]
                same = graph.call_function(operator.getitem, (same, index))
                same.meta["val"] = part
        outputs.append(same)
    return tuple(outputs)


def _indexed(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield what an operator returns, flattened, with the indices that lead to each part."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _indexed(item, (*path, index))
    else:
        yield path, value


def _argument(call: Any, overload: Any, position: int | None) -> Any:
    if position is None:
        return None
    name = overload._schema.arguments[position].name
    found = call.args[position] if position < len(call.args) else call.kwargs.get(name)
    return found if isinstance(found, torch.fx.Node) else None


def _run_unplanned(session: Session, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that cannot be planned, on a device in host memory, by its own kernel.

    What it returns has a size that only running tells, or it takes or returns what no spec describes.
    """
    signature = signature_of(overload)
    elsewhere = _torch_device_of((*args, *kwargs.values()))
    if elsewhere is not None and session.config.missing_kernel != "error":
        log.warning(
            "%s runs in eager PyTorch on %s: what it returns is known only when it has run", signature, elsewhere
        )
        with torch.no_grad():
            return overload(*args, **kwargs)
    target = session.open(session.target.device)
    opened = target
    if not target.runtime.host_memory:
        if session.config.missing_kernel == "error":
            raise KernelNotFoundError(
                f"what {signature} returns is known only when it has run: '{target.device}' cannot plan memory for it",
                hint='set missing_kernel = "fallback" to run it on the fallback device',
            )
        opened = session.open(session.plugins.resolve(session.config.fallback_device).device)
        log.warning("%s runs on %s: what it returns is known only when it has run", signature, opened.device)
    names = [argument.name for argument in schema_of(overload).arguments]
    call = OpCall(0, overload.__name__, signature, dict(zip(names, args, strict=False)), (), (), (), overload=overload)
    kernel = opened.registry.find(call)
    if kernel.function is None:
        raise KernelNotFoundError(f"kernel '{kernel.name}' for {signature} cannot be called without planned memory")
    with torch.no_grad():
        return kernel.function(*args, **kwargs)


def _torch_device_of(values: Any) -> torch.device | None:
    """The torch device of the first tensor that is not in host memory, None where all are."""
    leaves = pytree.tree_leaves(values)
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), None)


def _tensors_and_written(
    schema: OperatorSchema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], set[int]]:
    """Every tensor among the arguments, lists taken apart, and the positions of those that the operator writes."""
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    writes = {argument.name for argument in schema.arguments if argument.writes}
    tensors: list[Any] = []
    written: set[int] = set()
    for name, value in given.items():
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if name in writes:
            written.update(range(len(tensors), len(tensors) + len(leaves)))
        tensors += leaves
    return tensors, written


def run_overload(session: Session, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one overload in a session: the operator itself, below autograd and autocast.

    A call that writes memory which it also reads through another argument runs in host memory; on tensors of a torch
    device, in eager PyTorch.
    """
    schema = schema_of(overload)
    if schema.writes and not session.open(session.target.device).runtime.host_memory:
        tensors, written = _tensors_and_written(schema, args, kwargs)
        if overlap_with_written(tensors, written) is not None:
            elsewhere = _torch_device_of(tensors)
            if elsewhere is not None:
                log.warning("%s runs in eager PyTorch on %s: its arguments share memory", schema.signature, elsewhere)
                with torch._C._DisableAutocast(), torch.no_grad():
                    return overload(*args, **kwargs)
            log.warning("%s runs on the fallback device: its arguments share memory", schema.signature)
            session = session.on_fallback_device()
    with torch._C._DisableAutocast(), torch.no_grad():
        return session.single.run(session, overload, args, kwargs)
