"""The backend that ``torch.compile(model, backend="kagent")`` finds by entry point."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule

from kagent_core.capture.graph import CapturedGraph, why_not_a_program
from kagent_core.capture.stepwise import run_stepwise
from kagent_core.config import load_config
from kagent_core.execute.aliasing import overlap_with_written
from kagent_core.inspect.logs import get_logger
from kagent_core.pipeline import CompiledGraph
from kagent_core.session import Session, session_for

log = get_logger("capture")

_numbers = itertools.count()


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Core ATen decompositions, but for operators that draw random numbers.

    Those stay whole, so that a device which runs PyTorch's own kernels draws the numbers that eager PyTorch draws.
    """
    drawing = {
        torch.ops.aten.bernoulli.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    return {op: rule for op, rule in core_aten_decompositions().items() if op not in drawing}


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

    Raises
    ------
    ConfigError, DeviceError, PluginError
        Before anything is compiled.
    """
    session = session_for(load_config(options=dict(options or {})))
    if mode not in (None, "default"):
        log.warning("torch.compile's mode '%s' has no meaning for kagent and is ignored", mode)
    capture = _Capture(session, f"graph{next(_numbers)}")
    compiled = aot_autograd(
        fw_compiler=capture.compiler("forward"),
        bw_compiler=capture.compiler("backward"),
        inference_compiler=capture.compiler("inference"),
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )(graph_module, example_inputs)
    written = capture.written
    if not written:
        return compiled  # type: ignore[no-any-return]
    return _guard_overlaps(graph_module, compiled, written, capture.name)


class _Capture:
    """Compiles the graphs that AOTAutograd makes of one of Dynamo's graphs."""

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self.name = name
        self.written: frozenset[int] = frozenset()

    def compiler(self, kind: str) -> Callable[[GraphModule, Sequence[Any]], Callable[[list[Any]], list[Any]]]:
        """Return a compiler for AOTAutograd's forward, backward or inference graph."""

        def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            self._note_written()
            return self._compile(graph_module, f"{self.name}_{kind}")

        return compile_graph

    def _note_written(self) -> None:
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        if metadata is not None:
            self.written = frozenset(
                index for index, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
            )

    def _compile(self, graph_module: GraphModule, name: str) -> Callable[[list[Any]], list[Any]]:
        reason = why_not_a_program(graph_module)
        if log.isEnabledFor(10):
            log.debug("%s:\n%s", name, graph_module.print_readable(print_output=False))
        if reason is not None:
            log.warning("%s runs operator by operator, not as a plan: %s", name, reason)
            run = functools.partial(run_stepwise, self.session, graph_module)
        else:
            run = CompiledGraph(self.session, CapturedGraph(graph_module, name))

        def boxed(args: list[Any]) -> list[Any]:
            return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def _guard_overlaps(
    graph_module: GraphModule, compiled: Callable[..., Any], written: frozenset[int], name: str
) -> Callable[..., Any]:
    """Run a call whose written inputs share memory with other inputs as eager PyTorch does.

    The captured graph holds for inputs that do not overlap; Dynamo's guards do not see that
    (https://github.com/pytorch/pytorch/issues/139789).
    """
    last_clear: tuple[int, ...] = ()

    def run(*args: Any) -> Any:
        nonlocal last_clear
        layout = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 for arg in args)
        if layout != last_clear:
            overlap = overlap_with_written(args, written)
            if overlap is not None:
                log.warning(
                    "%s: this call runs in eager PyTorch: input %d, which is written, shares memory with input %d",
                    name,
                    *overlap,
                )
                return graph_module(*args)
            last_clear = layout
        return compiled(*args)

    return run
