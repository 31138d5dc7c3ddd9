"""Calls, specs and segments, made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kagent_core.capture.graph import CapturedGraph
from kagent_core.capture.schemas import dtype_of, signature_of
from kagent_core.config import load_config
from kagent_core.execute.plan import PlannedSegment
from kagent_core.pipeline import build_plan
from kagent_core.session import session_for
from kagent_core.specs import OpCall, TensorSpec
from kagent_cpu.generate import unit_loader
from kagent_cpu.replay import CompiledSegment
from kagent_cpu.source import SourceLoader

aten = torch.ops.aten


def spec_of(tensor: torch.Tensor, buffer: int) -> TensorSpec:
    """Describe a tensor whose buffer begins with its storage."""
    return TensorSpec(
        dtype_of(tensor.dtype),
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        buffer,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def call_of(overload: Any, *args: Any, **kwargs: Any) -> OpCall:
    """Return the call of an operator with tensors and numbers, each tensor in a buffer of its own."""
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    returned = overload(*args, **kwargs)
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    specs: dict[int, TensorSpec] = {}  # a result that is one of the arguments lies in that one's buffer
    for tensor in (*given.values(), *results):
        if isinstance(tensor, torch.Tensor):
            specs.setdefault(id(tensor), spec_of(tensor, len(specs)))
    arguments = {name: specs.get(id(value), value) for name, value in given.items()}
    made = tuple(specs[id(result)] for result in results)
    inputs = tuple(value for value in arguments.values() if isinstance(value, TensorSpec))
    return OpCall(0, overload.__name__, signature_of(overload), arguments, inputs, made, made, overload=overload)


def segment_of(function: Callable[..., Any], *args: torch.Tensor, **options: Any) -> CompiledSegment:
    """Take a function of tensors through the pipeline, with ATen's kernels; return its only segment, compiled."""
    options = {"generated_kernels": "off", **options}
    config = load_config({"device": "cpu", **options})
    graph = CapturedGraph(make_fx(lambda *a: (function(*a),), tracing_mode="fake")(*args), "example")
    plan = build_plan(session_for(config), graph.program(args), graph.constants)
    (step,) = plan.steps
    assert isinstance(step, PlannedSegment)
    return CompiledSegment(step.segment, unit_loader(config), SourceLoader(config.cache_dir))
