"""Who runs the models: eager PyTorch, its compiler in two modes, kagent, and inference engines where installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kagent_core.bench.models import engines

Call = Callable[[], Any]

EAGER, INDUCTOR, FREEZING, KAGENT = "eager", "inductor", "freezing", "kagent"
ONNXRUNTIME, OPENVINO = "onnxruntime", "openvino"


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Attributes
    ----------
    name
        As ``--contenders`` gives it.
    what
        In words.
    prepare
        Given a module, its arguments, a directory of its own and a number of threads, makes everything ready up to and
        including a first call, and returns the call. What it finds in the directory of an earlier process it uses.
    modules
        What it is made of: imported before a clock runs.
    """

    name: str
    what: str
    prepare: Callable[[nn.Module, tuple[Any, ...], Path, int], Call]
    modules: tuple[str, ...] = ()

    def load(self) -> None:
        """Import what it is made of.

        Raises
        ------
        ImportError
            When it is not installed.
        """
        for module in self.modules:
            importlib.import_module(module)


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors of what a call returned, in order; an engine's arrays as tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves
    return [leaf if isinstance(leaf, Tensor) else torch.from_numpy(leaf.copy()) for leaf in leaves]


def _eager(module: nn.Module, args: tuple[Any, ...], directory: Path, threads: int) -> Call:
    return _called(lambda: module(*args))


def _compiled(module: nn.Module, args: tuple[Any, ...], **arguments: Any) -> Call:
    """Compile a function of its own, and call it: what Dynamo compiles hangs on the code object of the function."""
    compiled = torch.compile(own_call(module), **arguments)
    return _called(lambda: compiled(*args))


def _called(call: Call) -> Call:
    call()
    return call


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module, with a code object of its own."""

    def forward(*given: Any) -> Any:
        return module(*given)

    return FunctionType(forward.__code__.replace(), globals(), forward.__name__, None, forward.__closure__)


@contextmanager
def _inductor_cache(directory: Path) -> Iterator[None]:
    """Let inductor keep all that it caches, graphs and libraries, in a directory."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _inductor(module: nn.Module, args: tuple[Any, ...], directory: Path, threads: int) -> Call:
    with _inductor_cache(directory):
        return _compiled(module, args, backend="inductor")


def _freezing(module: nn.Module, args: tuple[Any, ...], directory: Path, threads: int) -> Call:
    # Dynamo asks the setting itself how to take parameters; as an option it makes the backend another one
    with _inductor_cache(directory), torch._inductor.config.patch(freezing=True):
        return _compiled(module, args, backend="inductor", options={"freezing": True})


def _kagent(module: nn.Module, args: tuple[Any, ...], directory: Path, threads: int) -> Call:
    return _compiled(module, args, backend="kagent", options=kagent_options(directory))


def kagent_options(directory: Path) -> dict[str, Any]:
    """Return what kagent is told: to run on the CPU and to keep what it caches in a directory."""
    return {"device": "cpu", "cache_dir": str(directory)}


_DYNAMO = ("torch._dynamo", "torch._dynamo.backends.common")

CONTENDERS = (
    Contender(EAGER, "eager PyTorch", _eager),
    Contender(INDUCTOR, "torch.compile's default", _inductor, (*_DYNAMO, "torch._inductor.compile_fx")),
    Contender(FREEZING, "the same with freezing", _freezing, (*_DYNAMO, "torch._inductor.compile_fx")),
    Contender(ONNXRUNTIME, "ONNX Runtime", engines.prepare_onnxruntime, ("onnxruntime", "onnx", "torch.onnx")),
    Contender(OPENVINO, "OpenVINO", engines.prepare_openvino, ("openvino",)),
    Contender(KAGENT, "kagent", _kagent, (*_DYNAMO, "kagent_core.backend")),
)
"""All, in the order in which they are printed."""

BY_NAME: Mapping[str, Contender] = MappingProxyType({one.name: one for one in CONTENDERS})

ENGINES: Sequence[str] = (ONNXRUNTIME, OPENVINO)
"""Those that run a model that was exported ahead of time, and do not return to PyTorch."""
