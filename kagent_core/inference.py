"""From a captured inference graph to what runs it: whole-graph rewriting, and constants computed ahead."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule

from kagent_core.capture.graph import CapturedGraph
from kagent_core.config import Config
from kagent_core.folded import FoldedGraph, GraphRunner
from kagent_core.inspect.logs import get_logger
from kagent_core.optimize.affine import fold_affine_steps
from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_core.optimize.layout import LayoutError, propagate_strides
from kagent_core.optimize.splitting import split
from kagent_core.optimize.unused import drop_unused_results
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import Session
from kagent_core.watch.memory import MemoryWatch, memory_watch

log = get_logger("capture")


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
    graph = InferenceGraph(graph_module, parameters, session.may_rewrite)
    drop_unused_results(graph)
    folded = fold_affine_steps(graph)
    optimizer = session.open(session.target.device).optimizer
    if optimizer is not None:
        optimizer.optimize(graph)
    try:
        copies = propagate_strides(graph)
    except LayoutError as error:
        log.info("%s is not rewritten: %s", name, error)
        return run_whole()
    parts = split(graph)
    if parts is None:
        return run_whole()
    log.debug("%s: %d affine steps folded, %d constants, %d copies", name, folded, parts.count, copies)
    main = CapturedGraph(parts.main, name)
    constants = range(len(parts.kept), len(main.placeholders))
    return FoldedGraph(name, parts, CompiledGraph(session, main, constants), run_whole, watch)


def _watch(config: Config) -> tuple[bool, MemoryWatch | None]:
    """Return whether changed parameters are noticed, and what notices those changes that move no version counter."""
    if config.parameters != "checked":
        return config.parameters == "version", None
    watch = memory_watch(config.cache_dir)
    return watch is not None, watch
