"""What one call of a compiled function with one operator costs, next to eager PyTorch and its other compilers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch._inductor.config
from torch.nn import functional

from kagent_core.bench.timing import CALL_ROUNDS, Timing, time_calls

CALLS_PER_ROUND = 200

BACKENDS: dict[str, dict[str, Any]] = {
    "default backend": {"backend": "inductor"},
    "aot_eager": {"backend": "aot_eager"},
    "kagent": {"backend": "kagent", "options": {"device": "cpu"}},
}
"""Arguments of `torch.compile` for each contender but eager. ``aot_eager`` compiles nothing: what it costs is what
Dynamo's guards and AOTAutograd's wrappers cost."""


@dataclass(frozen=True)
class FunctionFigures:
    """Times of one function.

    Attributes
    ----------
    name
        What it computes.
    per_call
        By contender, eager among them.
    first_call_ms
        By contender, milliseconds of the first call, compilation included.
    unavailable
        Contenders that could not compile it, with the reason.
    """

    name: str
    per_call: dict[str, Timing]
    first_call_ms: dict[str, float]
    unavailable: dict[str, str]

    def ratio(self, contender: str, peer: str) -> float | None:
        """How many times as long as the peer's a contender's call takes, by the minima; None when one is missing."""
        if contender not in self.per_call or peer not in self.per_call:
            return None
        return self.per_call[contender].minimum / self.per_call[peer].minimum

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "function": self.name,
            "per_call": {name: timing.as_dict() for name, timing in self.per_call.items()},
            "first_call_ms": {name: round(value, 1) for name, value in self.first_call_ms.items()},
            "unavailable": self.unavailable,
        }


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight, bias)


FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "x + 1 on 8 floats": (_add_one, ((8,),)),
    "linear, 8 x 8 by 8 x 8": (_linear, ((8, 8), (8, 8), (8,))),
}
"""What is measured, by name: the function and the shapes of its arguments."""


def own_function(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a copy with a code object of its own: Dynamo keeps what it compiled with the code object."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def measure_functions(rounds: int = CALL_ROUNDS, on_round: Callable[[], None] = lambda: None) -> list[FunctionFigures]:
    """Compile each function with each backend and time the calls. Forgets what Dynamo compiled before."""
    torch._dynamo.reset()
    return [_measure(name, rounds, on_round) for name in FUNCTIONS]


def _measure(name: str, rounds: int, on_round: Callable[[], None]) -> FunctionFigures:
    function, shapes = FUNCTIONS[name]
    args = tuple(torch.linspace(-1, 1, math.prod(shape)).view(shape) for shape in shapes)
    contenders: dict[str, Callable[[], object]] = {"eager": bind(function, args)}
    first_call_ms: dict[str, float] = {}
    unavailable: dict[str, str] = {}
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):  # no pool of compiling processes
        for backend, options in BACKENDS.items():
            call = bind(torch.compile(own_function(function), **options), args)
            started = time.perf_counter()
            try:
                call()
            except torch._dynamo.exc.TorchDynamoException as error:
                if backend == "kagent":
                    raise
                # a peer that is missing, as the default backend is without a C++ compiler, is no failure of ours
                unavailable[backend] = reason_for(error)
                continue
            first_call_ms[backend] = (time.perf_counter() - started) * 1e3
            contenders[backend] = call
        per_call = time_calls(contenders, CALLS_PER_ROUND, rounds, on_round)
    return FunctionFigures(name, per_call, first_call_ms, unavailable)


def reason_for(error: Exception) -> str:
    """Return what went wrong, in a line."""
    cause = error.inner_exception if isinstance(error, torch._dynamo.exc.BackendCompilerFailed) else error
    first, *_ = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {first}"


def bind(function: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Return a call of a function with given arguments."""

    def call() -> object:
        return function(*args)

    return call
