"""From a captured inference graph to what runs it: whole-graph rewriting, and constants computed ahead."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from kagent_core.capture.graph import CapturedGraph
from kagent_core.config import Config
from kagent_core.errors import ConfigError
from kagent_core.folded import FoldedGraph, GraphRunner
from kagent_core.inspect.logs import get_logger
from kagent_core.optimize.affine import fold_affine_steps
from kagent_core.optimize.filled import fill_by_shape
from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_core.optimize.layout import LayoutError, propagate_strides
from kagent_core.optimize.rows import compute_needed_rows
from kagent_core.optimize.splitting import split
from kagent_core.optimize.unused import drop_unused_results, leave_out_logarithms
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import Session
from kagent_core.watch.memory import MemoryWatch, memory_watch, prepare_memory_watch

log = get_logger("capture")


def prepare_inference(config: Config) -> None:
    """Begin with what `inference_runner` needs and what does not depend on the graph, while that is captured."""
    if config.fold_constants and config.parameters == "checked":
        prepare_memory_watch(config.cache_dir)


def inference_runner(
    session: Session, graph_module: GraphModule, name: str, parameters: Collection[int]
) -> GraphRunner:
    """Return what runs an inference graph in a session.

    Parameters
    ----------
    session
        Says which device the graph is for, and what may be rewritten.
    graph_module
        As AOTAutograd makes it.
    name
        For logs and dumps.
    parameters
        Positions of the inputs that are parameters or buffers of the model.
    """

    def run_whole() -> GraphRunner:
        return CompiledGraph(session, CapturedGraph(graph_module, name))

    watches, watch = _watch(session.config)
    if not session.config.fold_constants or not watches or not parameters:
        return run_whole()
    if watch is not None and any(_on_a_torch_device(node) for node in _inputs(graph_module, parameters)):
        log.info("%s: nothing is folded into parameters outside of host memory, which nothing watches there", name)
        return run_whole()
    graph, changed = _rewritten(session, graph_module, parameters, name)
    parts = split(graph) if graph is not None else None
    if graph is None or (parts is None and not changed):
        return run_whole()
    if parts is None:
        return CompiledGraph(session, CapturedGraph(GraphModule(graph_module, graph.graph), name))
    log.debug("%s: %d constants", name, parts.count)
    main = CapturedGraph(parts.main, name)
    constants = range(len(parts.kept), len(main.placeholders))
    return FoldedGraph(name, parts, CompiledGraph(session, main, constants).bound, run_whole, watch)


def _rewritten(
    session: Session, graph_module: GraphModule, parameters: Collection[int], name: str
) -> tuple[InferenceGraph | None, int]:
    """Return a rewritten copy of a graph, and how often it differs without any constants; None where none can be had.

    A result that is a view of more than is returned has strides that no copy has: then no rows are left out.
    """
    optimizer = session.open(session.target.device).optimizer
    for rows_first in (True, False):
        graph = InferenceGraph(graph_module, parameters, session.may_rewrite)
        fill_by_shape(graph)
        dropped = drop_unused_results(graph)
        folded = fold_affine_steps(graph)
        picked = compute_needed_rows(graph) if rows_first else 0
        if optimizer is not None:
            optimizer.optimize(graph)
        try:
            copies = propagate_strides(graph)
        except LayoutError as error:
            log.info("%s is not rewritten%s: %s", name, " so that rows are left out" if picked else "", error)
            if not picked:
                break
            continue
        dropped += leave_out_logarithms(graph)
        log.debug("%s: %d affine steps folded, %d copies, rows left out of %d products", name, folded, copies, picked)
        return graph, dropped + picked
    return None, 0


def _inputs(graph_module: GraphModule, positions: Collection[int]) -> list[Node]:
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return [node for position, node in enumerate(placeholders) if position in positions]


def _on_a_torch_device(node: Node) -> bool:
    """Whether an input lies where no fingerprint is computed: in memory that the host does not read."""
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and fake.device.type != "cpu"


def check_float32_products(session: Session) -> None:
    """Make sure that a session can compute float32 products as its config asks.

    Raises
    ------
    ConfigError
        When it cannot: slower or more exact than what was asked for is no answer.
    """
    config, device = session.config, session.target.device
    if config.float32_products == "float32":
        return
    optimizer = session.open(device).optimizer
    if not config.fold_constants:
        reason, hint = "fold_constants is off, without which weights are not converted", "set fold_constants = true"
    elif not _watch(config)[0]:
        reason, hint = (
            f"with parameters = {config.parameters!r}, changes of the weights are not noticed here",
            "set parameters = 'version'",
        )
    elif optimizer is None:
        reason, hint = f"nothing rewrites graphs for {device}", _ONLY_FLOAT32
    else:
        reason, hint = optimizer.why_not_float32_products_in(config.float32_products) or "", _ONLY_FLOAT32
    if reason:
        raise ConfigError(f"float32_products is {config.float32_products!r} on {device}, but {reason}", hint=hint)


_ONLY_FLOAT32 = "leave float32_products at 'float32'"


def _watch(config: Config) -> tuple[bool, MemoryWatch | None]:
    """Return whether changed parameters are noticed, and what notices those changes that move no version counter."""
    if config.parameters != "checked":
        return config.parameters == "version", None
    watch = memory_watch(config.cache_dir)
    return watch is not None, watch
