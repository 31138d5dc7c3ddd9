"""The CPU's argument packer."""

from __future__ import annotations

from typing import Any

import torch

from kagent_core.errors import PackingError
from kagent_core.extract.pack_prototype import PrototypePacker
from kagent_core.extract.packing import CallPacker
from kagent_core.specs import KernelDescriptor, OpCall, PackedArg
from kagent_cpu.source import is_source

_INT64 = range(-(2**63), 2**63)


class CpuPacker(CallPacker):
    """Packs an operator's own arguments, and checks what ATen would take in silence or refuse obscurely.

    Kernels of C text that somebody wrote get their prototype's parameters.
    """

    def __init__(self) -> None:
        self._prototypes = PrototypePacker()

    def pack(self, call: OpCall, kernel: KernelDescriptor) -> tuple[PackedArg, ...]:
        """Return the packed arguments.

        Raises
        ------
        PackingError
            When an integer does not fit ATen's 64 bits, or an argument names another device; and as `PrototypePacker`.
        """
        if is_source(kernel):
            return self._prototypes.pack(call, kernel)
        packed = super().pack(call, kernel)
        for arg in packed:
            _check(arg.name, arg.value, call)
        return packed


def _check(name: str, value: Any, call: OpCall) -> None:
    if type(value) is int and value not in _INT64:
        raise PackingError(f"argument '{name}' of {call.signature} is {value}, which does not fit 64 bits")
    if isinstance(value, torch.device) and value.type != "cpu":
        raise PackingError(
            f"argument '{name}' of {call.signature} asks for device '{value}', but the call was placed on the CPU",
            hint="make the tensor on the CPU, or install the plugin of that device",
        )
