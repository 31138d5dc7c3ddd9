"""Dumps: a whole extraction as JSON that a person or a program can read.

The schema is ``kagent_core/inspect/schema/extraction-context-1.json``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kagent_core.errors import ConfigError
from kagent_core.specs import (
    BufferSpec,
    KernelTask,
    LaunchConfig,
    MemRange,
    OpCall,
    PackedArg,
    TensorSpec,
)

if TYPE_CHECKING:
    from kagent_core.extract.context import ExtractionContext
    from kagent_core.extract.launch_choice import LaunchChoice

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).parent / "schema" / "extraction-context-1.json"

_count = itertools.count()


def dump_extraction_context(ctx: ExtractionContext, path: str | os.PathLike[str]) -> Path:
    """Write an ExtractionContext as JSON and return the file's path.

    Parameters
    ----------
    ctx
        As an extraction left it; stages that have not run leave empty lists.
    path
        File to write; its directory must exist.

    Raises
    ------
    OSError
        When the file cannot be written.
    """
    target = Path(path)
    target.write_text(json.dumps(context_as_dict(ctx), indent=1) + "\n", encoding="utf-8")
    return target


def dump_into_directory(ctx: ExtractionContext, directory: Path) -> Path:
    """Write a context into a directory, made if needed, under a name of its own.

    Raises
    ------
    ConfigError
        When the directory cannot be made or written to.
    """
    device = str(ctx.request.device).replace(":", "")
    name = f"{os.getpid()}-{next(_count):04d}-{ctx.request.program}-{device}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return dump_extraction_context(ctx, directory / name)
    except OSError as error:
        came = "a file" if directory.is_file() else f"no directory that can be written to ({error.strerror})"
        raise ConfigError(
            f"config key dump: '{directory}' is {came}, expected a directory",
            hint="name another one, which is made where it is missing; dump = none writes nothing",
        ) from error


def context_as_dict(ctx: ExtractionContext) -> dict[str, Any]:
    """Return a context as plain dicts and lists."""
    info = ctx.opened.info
    return {
        "schema_version": SCHEMA_VERSION,
        "program": ctx.request.program,
        "device": {
            "device": str(info.device),
            "name": info.name,
            "emulated": info.emulated,
            "plugin": info.plugin,
            "memory_nbytes": info.memory_nbytes,
            "max_threads_per_block": info.max_threads_per_block,
            "shared_nbytes": info.shared_nbytes,
            "max_parameters": info.max_parameters,
            "max_registers": info.max_registers,
            "max_grid": list(info.max_grid),
            "details": dict(info.details),
        },
        "buffers": [_buffer(buffer) for buffer in ctx.request.buffers],
        "ops": [_call(call) for call in ctx.request.calls],
        "groups": [list(group.calls) for group in ctx.fusion.groups],
        "recomputed": [list(group.recomputed) for group in ctx.fusion.groups],
        "fusion_decisions": [
            {"producer": d.producer, "consumer": d.consumer, "fused": d.fused, "reason": d.reason}
            for d in ctx.fusion.decisions
        ],
        "kernels": [
            {"signature": k.signature, "name": k.name, "priority": k.priority, "origin": k.origin} for k in ctx.kernels
        ],
        "packed_args": [[_packed(arg) for arg in args] for args in ctx.packed],
        "launch_configs": [_config(config) for config in ctx.launch_configs],
        "launch_choices": [_choice(choice) for choice in ctx.launch_choices],
        "tasks": [_task(task) for task in ctx.tasks],
        "stages": [{"stage": r.stage, "elapsed_ms": r.elapsed_ms, "summary": r.summary} for r in ctx.records],
    }


def _buffer(buffer: BufferSpec) -> dict[str, Any]:
    return {
        "id": buffer.id,
        "nbytes": buffer.nbytes,
        "kind": buffer.kind.value,
        "device": None if buffer.device is None else str(buffer.device),
        "source": buffer.source,
    }


def _call(call: OpCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "name": call.name,
        "signature": call.signature,
        "arguments": {name: _value(value) for name, value in call.arguments.items()},
        "inputs": [_tensor(spec) for spec in call.inputs],
        "outputs": [_tensor(spec) for spec in call.outputs],
        "results": [None if spec is None else _tensor(spec) for spec in call.results],
        "random": call.random,
        "inserted": call.inserted,
        "source": call.provenance.line,
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "text": str(spec),
        "dtype": spec.dtype.name,
        "shape": list(spec.shape),
        "strides": list(spec.strides),
        "storage_offset": spec.storage_offset,
        "buffer": spec.buffer,
        "conj": spec.conj,
        "neg": spec.neg,
    }


def _value(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return {"tensor": _tensor(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_value(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return {"repr": repr(value)}  # infinities, complex numbers, dtypes: JSON has no word for them


def _packed(arg: PackedArg) -> dict[str, Any]:
    access = None if arg.access is None else arg.access.value
    return {"name": arg.name, "value": _value(arg.value), "access": access}


def _config(config: LaunchConfig | None) -> dict[str, Any] | None:
    if config is None:
        return None
    return {
        "grid": list(config.grid),
        "block": list(config.block),
        "shared_nbytes": config.shared_nbytes,
        "tiles": dict(config.tiles),
    }


def _choice(choice: LaunchChoice) -> dict[str, Any]:
    return {
        "source": choice.source,
        "derived": _config(choice.derived),
        "suggested": _config(choice.suggested),
        "refused": choice.refused,
    }


def _range(span: MemRange) -> dict[str, int]:
    return {"buffer": span.buffer, "offset": span.offset, "nbytes": span.nbytes}


def _task(task: KernelTask) -> dict[str, Any]:
    return {
        "id": task.id,
        "name": task.name,
        "kernel": task.kernel.name,
        "calls": [call.id for call in task.calls],
        "reads": [_range(span) for span in task.reads],
        "writes": [_range(span) for span in task.writes],
        "launch_config": _config(task.config),
        "priority": task.priority,
        "depends_on": list(task.depends_on),
    }
