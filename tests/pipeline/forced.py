"""Every graph that a test runs, once more with generated kernels forced wherever they can be.

The twin gets copies of the arguments, and must give what the graph itself gave, leave the arguments as it left them and
draw the random numbers that it drew.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from kagent_core.capture.ranges import overlap_with_written
from kagent_core.folded import FoldedGraph
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import session_for
from kagent_core.testing.compare import assert_alike, assert_same, copy_arguments

EVERYWHERE = {"generated_kernels": "all"}


@contextmanager
def generated_everywhere(*, whole_models: bool = False, made_from: Collection[torch.dtype] = ()) -> Iterator[list[str]]:
    """Run every graph twice, for as long as the block lasts; yields the names of those that were.

    Values of `whole_models` are compared on the whole (`assert_alike`), and others one by one (`assert_same`).
    """
    compare = assert_alike if whole_models else functools.partial(assert_same, every_stride=False, made_from=made_from)
    names: list[str] = []
    twins: WeakKeyDictionary[CompiledGraph, CompiledGraph] = WeakKeyDictionary()
    run = CompiledGraph.__call__

    def twin_of(graph: CompiledGraph) -> CompiledGraph:
        if graph not in twins:
            session = session_for(graph.session.config.replace(**EVERYWHERE))
            twins[graph] = CompiledGraph(session, graph.graph)
        return twins[graph]

    def run_both(graph: CompiledGraph, args: Any) -> Any:
        # a session with kernels of the test's own is no twin's, and tensors that overlap do not stay so when copied
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        special = graph.session is not graph.session.base or graph.graph.fixed or overlapping(tensors)
        copies = None if special or is_uninitialized(graph) else copy_arguments(list(args))
        before = torch.get_rng_state()
        want = run(graph, args)
        if copies is None:
            return want
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        got = run(twin_of(graph), copies)
        names.append(graph.graph.name)
        compare(list(got), list(want), f"{graph.graph.name} with generated kernels everywhere")
        compare(copies, list(args), f"arguments of {graph.graph.name} with generated kernels everywhere")
        assert torch.equal(torch.get_rng_state(), after), "with generated kernels it draws other random numbers"
        return want

    run_folded = FoldedGraph.__call__

    def run_as_captured_too(graph: FoldedGraph, args: Any) -> Any:
        if overlapping([arg for arg in args if isinstance(arg, torch.Tensor)]):
            return run_folded(graph, args)
        copies = copy_arguments(list(args))
        before = torch.get_rng_state()
        got = run_folded(graph, args)
        torch.set_rng_state(before)
        whole = graph.run_whole
        assert isinstance(whole, CompiledGraph)
        want = run(twin_of(whole), copies)
        names.append(graph.name)
        assert_alike(list(got), list(want), f"{graph.name} with constants folded")
        assert_alike(copies, list(args), f"arguments of {graph.name} with constants folded")
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledGraph, "__call__", run_both)
        patch.setattr(FoldedGraph, "__call__", run_as_captured_too)
        yield names


def is_uninitialized(graph: CompiledGraph) -> bool:
    """Whether a graph may return memory that nobody wrote, which is never the same twice."""
    names = {str(node.target).partition(".")[2].partition(".")[0] for node in graph.graph.graph_module.graph.nodes}
    return any(name.removeprefix("new_").startswith("empty") for name in names)


def overlapping(tensors: list[torch.Tensor]) -> bool:
    everything = set(range(len(tensors)))
    return overlap_with_written(tensors, everything) is not None
