"""The table that the core's parametrised kernels are in."""

from kagent_core.codegen.generic.table import GenericTable

GENERIC = GenericTable()
"""Parametrised kernels of ATen's operators."""
