"""Graphs compiled for a device, with their plans in reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kagent_core.capture.graph import CapturedGraph
from kagent_core.config import load_config
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import Session, session_for

CPU, FAKE = {"device": "cpu"}, {"device": "fake:0"}


def session(**options: Any) -> Session:
    """The session of a config; inside `use_plugin`, the one with that plugin."""
    return session_for(load_config(options=options))


def compiled(function: Callable[..., Any], *, dynamic: bool | None = False, **options: Any) -> Any:
    """Compile whole: a graph break would let eager PyTorch in unseen."""
    return torch.compile(function, backend="kagent", fullgraph=True, dynamic=dynamic, options=options)


def traced(function: Callable[..., Any], *args: torch.Tensor, symbolic: bool = False, **options: Any) -> CompiledGraph:
    """Trace a function of tensors that returns a tuple, and compile it for what options say."""
    graph_module = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args)
    return CompiledGraph(session(**options), CapturedGraph(graph_module, "traced"))


def close(graph: CompiledGraph) -> None:
    """Close every plan of a graph."""
    for plan in graph.plans():
        plan.close()


def same(actual: Any, expected: Any) -> None:
    """Assert that tensors, one or a sequence of them, have equal values, dtypes, shapes and strides."""
    actual, expected = (t if isinstance(t, (tuple, list)) else (t,) for t in (actual, expected))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, check_stride=True, equal_nan=True)


def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Four operators that the fake device has kernels for."""
    return torch.addmm(b, torch.relu(x @ w1), w2) * 2.0


def mlp_inputs(rows: int = 5) -> tuple[torch.Tensor, ...]:
    """Arguments of `mlp`."""
    return torch.randn(rows, 4), torch.randn(4, 6), torch.randn(6, 3), torch.randn(3)
