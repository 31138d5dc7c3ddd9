"""How fast kernels and models are, next to eager PyTorch and its compiler in two modes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from kagent_core.device import Runtime
from kagent_cuda.check.models import Model, models
from kagent_cuda.check.sections import Row, Tell
from kagent_cuda.check.setting import Function, Setting
from kagent_cuda.check.timing import call_us, kernels_us
from kagent_cuda.emulated.runtime import EmulatedRuntime
from kagent_cuda.runtime import CudaRuntime

DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = 4096
ROWS = (2048, 16384, 65536)
BANDWIDTH_AIM = 0.9
OVERHEAD_AIM_US = 10.0
TASKS = 200

DEFAULT, AUTOTUNED = "default", "max-autotune"
NAMES = {DEFAULT: "compile", AUTOTUNED: "max-autotune"}


@dataclass(frozen=True)
class Fused:
    """A function whose kernel can do no better than to read its inputs and write its result once.

    Attributes
    ----------
    name
        For the table.
    function
        What is computed.
    tensors
        How many of its arguments are as large as the result.
    vectors
        How many more are as long as a row.
    """

    name: str
    function: Callable[..., Tensor]
    tensors: int
    vectors: int


FUSED = (
    Fused("pointwise", lambda x, y: functional.gelu(x + 1) * y, 2, 0),
    Fused("softmax", lambda x: torch.softmax(x, -1), 1, 0),
    Fused("layer norm", lambda x, w, b: functional.layer_norm(x, w.shape, w, b), 1, 2),
    Fused("RMS norm", lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6), 1, 1),
)


def measure_fused(setting: Setting, tell: Tell) -> None:
    """Measure memory-bound kernels, as a fraction of the bandwidth of a copy of as many bytes."""
    for dtype in DTYPES[: 1 if setting.tiny else None]:
        for rows in _rows(setting):
            copied = _copy_bandwidth(setting, rows, dtype, tell)
            for fused in FUSED[:2] if setting.tiny else FUSED:
                tell(_measure_fused(setting, fused, rows, dtype, copied))


def measure_fused_peers(setting: Setting, tell: Tell) -> None:
    """Measure the same kernels of eager PyTorch and its compiler, at the largest size."""
    if _no_peers(setting, tell):
        return
    for mode in (None, DEFAULT, AUTOTUNED):
        for dtype in DTYPES:
            rows = _rows(setting)[-1]
            copied = _copy_bandwidth(setting, rows, dtype, None)
            for fused in FUSED:
                args = _arguments(setting, fused, rows, dtype, setting.peer_place)
                made = fused.function if mode is None else setting.compile_peer(fused.function, mode)
                figures = _bandwidth(setting, _bind(made, args), _nbytes(args), copied)
                told = "eager" if mode is None else NAMES[mode]
                tell(Row(f"{fused.name} {rows} × {_columns(setting)} {_spelled(dtype)}, {told}", figures))


def measure_models(setting: Setting, tell: Tell) -> None:
    """Measure models, and their first calls with empty caches: kagent, eager PyTorch and its compiler's default."""
    if setting.has_peers:  # what it imports at its first call is not compiling
        setting.compile_peer(lambda x: x.sin() + 1, DEFAULT)(torch.ones(64, device=setting.peer_place))
    for dtype in DTYPES[: 1 if setting.tiny else None]:
        for model in models(setting.tiny)[1 if setting.tiny else 0 : 2 if setting.tiny else None]:
            with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
                tell(_measure_model(setting, model, dtype, Path(folder)))


def _measure_model(setting: Setting, model: Model, dtype: torch.dtype, folder: Path) -> Row:
    module, args = model.build(dtype, setting.place, large=True)
    cold = setting if setting.tiny else setting.with_cache(folder / "kagent")
    compiled = cold.compile(module)
    figures: dict[str, Any] = {"kagent first s": _first_call_s(cold, compiled, args)}
    figures["kagent µs"] = _round(call_us(setting, _bind(compiled, args)))
    spent = kernels_us(setting, _bind(compiled, args))
    if spent is not None:
        figures["of it on the GPU"] = _round(spent)
    if setting.has_peers:
        module, args = model.build(dtype, setting.peer_place, large=True)
        figures["eager µs"] = _round(call_us(setting, _bind(module, args)))
        with _empty_caches(folder):
            peer = setting.compile_peer(module, DEFAULT)
            figures["compile first s"] = _first_call_s(setting, peer, args)
        figures["compile µs"] = _round(call_us(setting, _bind(peer, args)))
    return _judged(f"{model.name} {_spelled(dtype)}", figures, "compile µs")


def measure_autotuned(setting: Setting, tell: Tell) -> None:
    """Measure models with PyTorch's compiler that tries everything, which takes it long."""
    if _no_peers(setting, tell):
        return
    for dtype in reversed(DTYPES):
        for model in models(setting.tiny):
            with torch.no_grad():
                module, args = model.build(dtype, setting.place, large=True)
                figures = {"kagent µs": _round(call_us(setting, _bind(setting.compile(module), args)))}
                module, args = model.build(dtype, setting.peer_place, large=True)
                compiled = setting.compile_peer(module, AUTOTUNED)
                figures["max-autotune µs"] = _round(call_us(setting, _bind(compiled, args)))
            tell(_judged(f"{model.name} {_spelled(dtype)}", figures, "max-autotune µs"))


def measure_overhead(setting: Setting, tell: Tell) -> None:
    """Measure what a task costs that has next to nothing to compute, in a plan of many."""
    tasks = 4 if setting.tiny else TASKS
    args = (torch.linspace(0, 1, 8, device=setting.place), torch.linspace(1, 2, 8, device=setting.place))

    def chain(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(tasks):
            x = x + y
        return x

    with torch.no_grad():
        for graphs in (True, False):
            with _graphs(setting, allowed=graphs) as made:
                call = _bind(setting.compile(chain, fusion=False), args)
                kagent = call_us(setting, call) / tasks
                spent = kernels_us(setting, call)
            figures: dict[str, Any] = {"µs per task": round(kagent, 2), "CUDA graphs": sum(made)}
            if spent is not None:
                figures["of it computing"] = round(spent / tasks, 2)
            met = None if setting.emulated or not graphs else kagent - (spent or 0.0) / tasks < OVERHEAD_AIM_US
            name = f"kagent, {tasks} tasks, {'as it is' if graphs else 'each launched'}"
            tell(Row(name, figures, aim=f"overhead below {OVERHEAD_AIM_US:.0f} µs" if graphs else "", met=met))
        if setting.has_peers:
            placed = tuple(arg.to(setting.peer_place) for arg in args)
            eager = call_us(setting, _bind(chain, placed)) / tasks
            tell(Row(f"eager, {tasks} operators", {"µs per task": round(eager, 2)}))


@contextmanager
def _graphs(setting: Setting, allowed: bool) -> Iterator[list[bool]]:
    """Watch whether plans become CUDA graphs, and let none where they are not allowed. A section ends its process."""
    kind: type[Runtime] = EmulatedRuntime if setting.emulated else CudaRuntime
    record, made = kind.record, []

    def watched(runtime: Any, launches: Any) -> Any:
        recording = record(runtime, launches) if allowed else None
        made.append(recording is not None)
        return recording

    with patch.object(kind, "record", watched):
        yield made


# -- parts


def _measure_fused(setting: Setting, fused: Fused, rows: int, dtype: torch.dtype, copied: float | None) -> Row:
    args = _arguments(setting, fused, rows, dtype, setting.place)
    figures = _bandwidth(setting, _bind(setting.compile(fused.function), args), _nbytes(args), copied)
    part = figures.get("of copy")
    met = None if part is None else part >= BANDWIDTH_AIM
    name = f"{fused.name} {rows} × {_columns(setting)} {_spelled(dtype)}"
    return Row(name, figures, aim=f"{BANDWIDTH_AIM:.0%} of copy", met=met)


def _copy_bandwidth(setting: Setting, rows: int, dtype: torch.dtype, tell: Tell | None) -> float | None:
    """Return the bytes per microsecond that a copy on the GPU moves, read and written; None where none can be made."""
    if not setting.has_peers:
        return None
    source = torch.randn(rows, _columns(setting), device=setting.peer_place).to(dtype)
    target = torch.empty_like(source)
    figures = _bandwidth(setting, lambda: target.copy_(source), _nbytes((source,)), None)
    if tell is not None:
        tell(Row(f"copy {rows} × {_columns(setting)} {_spelled(dtype)}", figures))
    return _nbytes((source,)) / float(figures.get("GPU µs", figures["call µs"]))


def _bandwidth(setting: Setting, call: Callable[[], object], nbytes: int, copied: float | None) -> dict[str, Any]:
    """Return times and rates of a call that moves so many bytes, by what the GPU says where it does."""
    with torch.no_grad():
        figures: dict[str, Any] = {"call µs": _round(call_us(setting, call))}
        spent = kernels_us(setting, call)
    if spent is not None:
        figures["GPU µs"] = _round(spent)
    if setting.has_peers:
        rate = nbytes / (spent or figures["call µs"])
        figures["GB/s"] = float(f"{rate / 1e3:.4g}")
        if copied is not None:
            figures["of copy"] = round(rate / copied, 3)
    return figures


def _arguments(
    setting: Setting, fused: Fused, rows: int, dtype: torch.dtype, place: torch.device
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = [(rows, _columns(setting))] * fused.tensors + [(_columns(setting),)] * fused.vectors
    return tuple(torch.randn(shape, device=place).to(dtype) for shape in shapes)


def _rows(setting: Setting) -> tuple[int, ...]:
    return (2,) if setting.tiny else ROWS


def _columns(setting: Setting) -> int:
    return 40 if setting.tiny else COLUMNS


def _nbytes(args: tuple[Tensor, ...]) -> int:
    """Bytes of the arguments, and of a result like the first of them."""
    return sum(arg.nbytes for arg in args) + args[0].nbytes


def _judged(name: str, figures: dict[str, Any], peer: str) -> Row:
    if peer not in figures:
        return Row(name, figures)
    ratio = figures[peer] / figures["kagent µs"]
    return Row(name, {**figures, "times as fast": round(ratio, 2)}, aim="at least 1 time as fast", met=ratio >= 1)


def _first_call_s(setting: Setting, compiled: Function, args: tuple[Tensor, ...]) -> float:
    setting.synchronize()
    started = time.perf_counter()
    compiled(*args)
    setting.synchronize()
    return round(time.perf_counter() - started, 2)


@contextmanager
def _empty_caches(folder: Path) -> Iterator[None]:
    """Let PyTorch's compiler find nothing that it compiled before."""
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(folder / part) for name, part in names.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _no_peers(setting: Setting, tell: Tell) -> bool:
    if not setting.has_peers:
        tell(Row("peers", {"state": "none: PyTorch has no CUDA here"}))
    return not setting.has_peers


def _bind(function: Function, args: tuple[Tensor, ...]) -> Callable[[], object]:
    return lambda: function(*args)


def _round(microseconds: float) -> float:
    return round(microseconds, 1)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
