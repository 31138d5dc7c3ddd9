"""The values that flow through kagent: frozen, comparable, printable, and free of torch.

Every stage takes some of these and returns others; none of them refers to a tensor, a driver or a plugin.
"""

from __future__ import annotations

from kagent_core.specs.decisions import FusionDecision, FusionGroup, FusionPlan, Placement
from kagent_core.specs.devices import Device, DeviceInfo
from kagent_core.specs.program import (
    InputRef,
    OpCall,
    OutputRef,
    Program,
    Provenance,
    SeedInput,
    SizeNumber,
    format_value,
)
from kagent_core.specs.tasks import (
    DEFAULT_SIGNATURE,
    Access,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    LocalMemory,
    PackedArg,
    Parameter,
    TaskFinished,
)
from kagent_core.specs.tensors import BufferKind, BufferSpec, DType, MemRange, TensorSpec, flatten_tensors

__all__ = [
    "DEFAULT_SIGNATURE",
    "Access",
    "BufferKind",
    "BufferSpec",
    "DType",
    "Device",
    "DeviceInfo",
    "FusionDecision",
    "FusionGroup",
    "FusionPlan",
    "InputRef",
    "KernelDescriptor",
    "KernelTask",
    "LaunchConfig",
    "LocalMemory",
    "MemRange",
    "OpCall",
    "OutputRef",
    "PackedArg",
    "Parameter",
    "Placement",
    "Program",
    "Provenance",
    "SeedInput",
    "SizeNumber",
    "TaskFinished",
    "TensorSpec",
    "flatten_tensors",
    "format_value",
]
