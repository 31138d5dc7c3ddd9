"""KernelRegistry: the kernels of one device, found by exact signature."""

from __future__ import annotations

from kagent_core.registry.acceptance import group_tensors, named_tensors, refusal
from kagent_core.registry.missing import kernel_stub
from kagent_core.registry.operators import RegistryProblem
from kagent_core.registry.table import KernelRegistry, Resolver, StubWriter

__all__ = [
    "KernelRegistry",
    "RegistryProblem",
    "Resolver",
    "StubWriter",
    "group_tensors",
    "kernel_stub",
    "named_tensors",
    "refusal",
]
