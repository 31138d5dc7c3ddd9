"""Lowering rules of ATen's operators, by kind."""

from kagent_core.codegen.rules import (
    activations,
    arithmetic,
    comparison,
    conversion,
    creation,
    functions,
    gather,
    inserting,
    normalization,
    padding,
    random,
    rearranging,
    reductions,
    resampling,
    sampling,
    windows,
)
from kagent_core.codegen.rules.core import RULES

__all__ = [
    "RULES",
    "activations",
    "arithmetic",
    "comparison",
    "conversion",
    "creation",
    "functions",
    "gather",
    "inserting",
    "normalization",
    "padding",
    "random",
    "rearranging",
    "reductions",
    "resampling",
    "sampling",
    "windows",
]
