"""Other libraries that ``kagent bench device`` can measure on the same device."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kagent_core.bench.device_rows import DEPTH, Arguments, Function
from kagent_core.errors import KagentError, choices


class NotMeasuredError(Exception):
    """Why a peer has no figure in a row."""


class Peer(Protocol):
    """Another library on the device.

    Attributes
    ----------
    name
        As the tables show it.
    """

    name: str

    def call(self, row: str, function: Function, args: Arguments) -> tuple[Callable[[], object], torch.Tensor]:
        """Return what computes a row once and waits for it, and its result in host memory.

        Raises
        ------
        NotMeasuredError
            When the library is missing, cannot use the device, or has no such row.
        """


class Tinygrad:
    """tinygrad, with inputs and results that stay on its device, and compiled calls (``TinyJit``).

    Parameters
    ----------
    device
        tinygrad's own name of the device, such as ``CL``; empty for the one that it takes by itself.
    """

    def __init__(self, device: str) -> None:
        self.name = f"tinygrad:{device}" if device else "tinygrad"
        self._device = device or None

    def call(self, row: str, function: Function, args: Arguments) -> tuple[Callable[[], object], torch.Tensor]:
        """As `Peer.call`."""
        written = _TINYGRAD.get(row)
        if written is None:
            raise NotMeasuredError("the row is a PyTorch model")
        try:
            tinygrad: Any = importlib.import_module("tinygrad")
        except ImportError as error:
            raise NotMeasuredError(f"it cannot be imported ({error}); `pip install tinygrad`") from error
        try:
            return self._prepared(tinygrad, written(tinygrad, self._tensors(tinygrad, function)), args)
        except (RuntimeError, OSError, ValueError, KeyError, AssertionError, AttributeError, ImportError) as error:
            lines = str(error).strip().splitlines() or [""]
            raise NotMeasuredError(f"{type(error).__name__}: {lines[0]}") from error

    def _prepared(
        self, tinygrad: Any, compute: Callable[..., Any], args: Arguments
    ) -> tuple[Callable[[], object], torch.Tensor]:
        given = [self._tensor(tinygrad, arg).realize() for arg in args]
        compiled = tinygrad.TinyJit(lambda *inputs: compute(*inputs).realize())
        device = tinygrad.Device[given[0].device]

        def call() -> object:
            result = compiled(*given)
            device.synchronize()
            return result

        for _ in range(3):  # TinyJit computes, then captures, and compiles for the third call
            result: Any = call()
        return call, torch.from_numpy(result.numpy())

    def _tensor(self, tinygrad: Any, tensor: torch.Tensor) -> Any:
        return tinygrad.Tensor(tensor.detach().numpy(), device=self._device)

    def _tensors(self, tinygrad: Any, function: Function) -> list[Any]:
        parameters = function.parameters() if isinstance(function, torch.nn.Module) else ()
        return [self._tensor(tinygrad, parameter).realize() for parameter in parameters]


def _gelu(x: Any) -> Any:
    """Return the exact gelu; tinygrad's own is the one with tanh."""
    return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())


def _layers(tinygrad: Any, parameters: list[Any]) -> Callable[[Any], Any]:
    """Return the block of layers; its parameters come in the order of its modules."""

    def compute(x: Any) -> Any:
        for layer in range(DEPTH):
            weight, bias, scale, shift = parameters[4 * layer : 4 * layer + 4]
            x = _gelu(x.linear(weight.transpose(), bias)).layernorm().mul(scale).add(shift)
        return x

    return compute


_TINYGRAD: dict[str, Callable[[Any, list[Any]], Callable[..., Any]]] = {
    "gemm": lambda tinygrad, parameters: lambda a, b: a @ b,
    "batched-gemm": lambda tinygrad, parameters: lambda a, b: a @ b,
    "gelu": lambda tinygrad, parameters: _gelu,
    "softmax": lambda tinygrad, parameters: lambda x: x.softmax(-1),
    "layer-norm": lambda tinygrad, parameters: lambda x: x.layernorm(),
    "layers": _layers,
}
"""Rows in tinygrad's words, given the parameters of the row's model."""

_PEERS: dict[str, Callable[[str], Peer]] = {"tinygrad": Tinygrad}


def peer_named(text: str) -> Peer:
    """Return the peer that ``--peer`` names: ``NAME`` or ``NAME:DEVICE``, the device as the peer calls it.

    Raises
    ------
    KagentError
        When there is none of that name.
    """
    name, _, device = text.partition(":")
    if name not in _PEERS:
        raise KagentError(
            f"--peer names '{name}', which kagent cannot measure; expected {choices(_PEERS)}",
            hint="write NAME or NAME:DEVICE, the device as that library calls it: --peer tinygrad:CL",
        )
    return _PEERS[name](device)
