"""Parametrised kernels for operators that are no single loop nest over expressions."""

from kagent_core.codegen.generic import (
    attention,
    avg_pooling,
    convolution,
    cumulative,
    dense_convolution,
    distances,
    flat_scatter,
    index_put,
    max_pooling,
    panels,
    products,
    recurrent,
    resampling,
    scatter,
    selecting,
    sorting,
)
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.table import GenericKernels, GenericTable

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
    "dense_convolution",
    "distances",
    "flat_scatter",
    "index_put",
    "max_pooling",
    "panels",
    "products",
    "recurrent",
    "resampling",
    "scatter",
    "selecting",
    "sorting",
]
