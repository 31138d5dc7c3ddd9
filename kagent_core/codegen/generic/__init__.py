"""Parametrised kernels for operators that are no single loop nest over expressions."""

from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.table import GenericKernels, GenericTable
from kagent_core.codegen.generic import products

__all__ = ["GENERIC", "GenericKernels", "GenericTable", "KernelBuilder", "Tensor", "products"]
