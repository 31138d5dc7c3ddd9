"""The backend that ``torch.compile(model, backend="kagent")`` finds by entry point."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import PlainTensorMeta, ViewAndMutationMeta
from torch._guards import TracingContext
from torch.fx import GraphModule

from kagent_core.capture.aliasing import guard_aliases
from kagent_core.capture.graph import CapturedGraph, why_not_a_program
from kagent_core.capture.lazy_bits import lazy_bits_as_captured
from kagent_core.capture.unlike_host import UNLIKE_HOST
from kagent_core.capture.views import restore_views
from kagent_core.config import load_config
from kagent_core.errors import KagentError
from kagent_core.inference import check_float32_products, inference_runner, prepare_inference
from kagent_core.inspect.logs import get_logger
from kagent_core.kernels import KernelSet, active_kernels
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import Session, session_for
from kagent_core.stepwise import run_stepwise

log = get_logger("capture")

GraphRunner = Callable[[list[Any]], list[Any]]

_numbers = itertools.count()


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Core ATen decompositions, but for operators that draw random numbers, and standard deviations.

    Those stay whole, so that a device which runs PyTorch's own kernels draws the numbers that eager PyTorch draws. The
    root of a variance is not a standard deviation where the variance is beyond float32, as it is of numbers of 1e20.
    Operators that are nothing but calls of others are not among them: dispatch takes those apart in any case, and to
    list them, as `core_aten_decompositions` does, takes 70 ms of every start.
    """
    whole = {
        torch.ops.aten.bernoulli.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten.std.correction,
        torch.ops.aten.std_mean.correction,
    }
    core: dict[Any, Callable[..., Any]] = _core_aten_decompositions_post_autograd()
    return {op: rule for op, rule in core.items() if op not in whole}


def kagent(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured.

    Parameters
    ----------
    graph_module, example_inputs
        As torch.compile passes them.
    options
        Config keys and values, which outrank environment and files.
    mode
        Accepted as torch.compile passes it; kagent has no modes, which a log line says.

    Returns
    -------
    Callable
        Runs the graph. A `KagentError` of compilation (a wrong config, a device that is not there) is raised when it
        is called: raised here, Dynamo would wrap it in an error of its own, and could be told to suppress it.
    """
    try:
        return _compile(graph_module, example_inputs, options, mode)
    except KagentError as error:
        return functools.partial(_raise, error)


def _raise(error: KagentError, *args: Any) -> NoReturn:
    raise error.with_traceback(None)


def _compile(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    session = session_for(load_config(options=dict(options or {})))
    check_float32_products(session)
    if not torch.is_grad_enabled() and any(isinstance(each, torch.nn.Parameter) for each in example_inputs):
        prepare_inference(session.config)
    if mode not in (None, "default"):
        log.warning("torch.compile's mode '%s' has no meaning for kagent and is ignored", mode)
    capture = _Capture(session, f"graph{next(_numbers)}", len(example_inputs))
    compiled = aot_autograd(
        fw_compiler=capture.compiler("forward"),
        bw_compiler=capture.compiler("backward"),
        inference_compiler=capture.compiler("inference"),
        decompositions=decompositions() | UNLIKE_HOST,
        keep_inference_input_mutations=True,
    )(graph_module, example_inputs)
    return guard_aliases(
        graph_module,
        _without_wrappers(capture.direct, compiled) if capture.direct is not None else compiled,
        capture.written,
        example_inputs,
        capture.name,
        functools.partial(kagent, options=options),
    )


def _with_active_kernels(session: Session, make: Callable[[Session], GraphRunner]) -> GraphRunner:
    """Return what runs a graph with the program's own kernels that are active where it is called.

    Dynamo takes what it compiled for the same function again, so what was active then cannot decide. A graph is
    planned once for each set of kernels, and these plans go when their set does.

    Parameters
    ----------
    session
        The session, with whatever kernels.
    make
        Makes what runs the graph in a session.
    """
    base, plain = session.base, make(session.base)
    variants: WeakKeyDictionary[KernelSet, GraphRunner] = WeakKeyDictionary()
    lock = threading.Lock()

    def variant(kernels: KernelSet) -> GraphRunner:
        with lock:
            found = variants.get(kernels)
            if found is None:
                found = variants[kernels] = make(base.with_kernels(kernels))
            return found

    def run(args: list[Any]) -> list[Any]:
        active = active_kernels()
        return variant(active)(args) if active else plain(args)

    return run


def _without_wrappers(run: GraphRunner, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs an inference graph that AOTAutograd's wrappers add nothing to, but a microsecond and a half.

    They turn gradients off, so where those are on, they are needed.
    """
    is_grad_enabled = torch.is_grad_enabled

    def call(*args: Any) -> Any:
        return wrapped(*args) if is_grad_enabled() else run(list(args))

    return call


def _adds_nothing(metadata: ViewAndMutationMeta) -> bool:
    """Whether AOTAutograd's wrappers give and take what the graph does: no views, no written inputs, no subclasses."""
    if metadata.tokens or metadata.is_rng_op_functionalized or metadata.dynamic_outputs:
        return False
    if any(info.mutates_data or info.mutates_metadata for info in metadata.input_info):
        return False
    if metadata.num_outputs_aliased or metadata.num_intermediate_bases:
        return False
    plain = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta)
    return all(isinstance(meta, PlainTensorMeta) for meta in plain)


def _boxed(run: GraphRunner) -> GraphRunner:
    """Tell AOTAutograd that a runner takes its arguments as one list, which it may empty."""

    def boxed(args: list[Any]) -> list[Any]:
        return run(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class _Capture:
    """Compiles the graphs that AOTAutograd makes of one of Dynamo's graphs.

    Parameters
    ----------
    session
        To compile for.
    name
        For logs and dumps.
    arguments
        Of Dynamo's graph.

    Attributes
    ----------
    written
        Inputs that the graph writes.
    direct
        What runs an inference graph that can be called with the arguments themselves; None where there is none.
    """

    def __init__(self, session: Session, name: str, arguments: int) -> None:
        self.session = session
        self.name = name
        self.arguments = arguments
        self.written: frozenset[int] = frozenset()
        self.direct: GraphRunner | None = None

    def compiler(self, kind: str) -> Callable[[GraphModule, Sequence[Any]], Callable[[list[Any]], list[Any]]]:
        """Return a compiler for AOTAutograd's forward, backward or inference graph."""

        def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            metadata = self._note_written()
            inference = metadata if kind == "inference" else None
            parameters = frozenset(inference.static_input_indices) if inference is not None else frozenset()
            run = self._compile(graph_module, f"{self.name}_{kind}", parameters)
            if inference is not None and _adds_nothing(inference) and why_not_a_program(graph_module) is None:
                given = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
                self.direct = run if len(given) == self.arguments else None
            # Dynamo's guards watch the lazy bits of forward inputs; nobody watches those of gradients that come back
            return _boxed(lazy_bits_as_captured(graph_module, run) if kind == "backward" else run)

        return compile_graph

    def _note_written(self) -> ViewAndMutationMeta | None:
        """Note which inputs the graph writes, and return what AOTAutograd knows about it."""
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        if metadata is not None:
            self.written = frozenset(
                index for index, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
            )
        return metadata

    def _compile(
        self, graph_module: GraphModule, name: str, parameters: Collection[int]
    ) -> Callable[[list[Any]], list[Any]]:
        restore_views(graph_module)
        reason = why_not_a_program(graph_module)
        if log.isEnabledFor(10):
            log.debug("%s:\n%s", name, graph_module.print_readable(print_output=False))
        if reason is not None:
            log.warning("%s runs operator by operator, not as a plan: %s", name, reason)
            return _with_active_kernels(self.session, lambda s: functools.partial(run_stepwise, s, graph_module))
        if parameters:
            return _with_active_kernels(self.session, lambda s: inference_runner(s, graph_module, name, parameters))
        graph = CapturedGraph(graph_module, name)
        return _with_active_kernels(self.session, lambda s: CompiledGraph(s, graph))
