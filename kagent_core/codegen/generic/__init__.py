"""Parametrised kernels for operators that are no single loop nest over expressions."""

from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.table import GenericKernels, GenericTable
from kagent_core.codegen.generic import products
from kagent_core.codegen.generic import convolution
from kagent_core.codegen.generic import attention
from kagent_core.codegen.generic import (
    avg_pooling,
    cumulative,
    distances,
    index_put,
    max_pooling,
    resampling,
    scatter,
    selecting,
    sorting,
)

__all__ = [
    "GENERIC",
    "GenericKernels",
    "GenericTable",
    "KernelBuilder",
    "Tensor",
    "attention",
    "avg_pooling",
    "convolution",
    "cumulative",
    "distances",
    "index_put",
    "max_pooling",
    "products",
    "resampling",
    "scatter",
    "selecting",
    "sorting",
]
