"""Graphs that cannot be planned ahead: one operator at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Interpreter

from kagent_core.capture.schemas import is_operator

if TYPE_CHECKING:
    from kagent_core.session import Session


class _Stepwise(Interpreter):
    """Runs each operator through the pipeline as a program of its own."""

    def __init__(self, session: Session, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self._session = session

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        from kagent_core.single import run_overload

        if is_operator(target) and any(
            isinstance(a, torch.Tensor) for a in torch.utils._pytree.tree_leaves((args, kwargs))
        ):
            return run_overload(self._session, target, args, kwargs)
        return super().call_function(target, args, kwargs)


def run_stepwise(session: Session, graph_module: GraphModule, args: Sequence[Any]) -> list[Any]:
    """Run a graph operator by operator and return its outputs."""
    with torch.no_grad():
        return list(_Stepwise(session, graph_module).run(*args))
