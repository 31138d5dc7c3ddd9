"""Lowering rules of ATen's operators, by kind."""

from kagent_core.codegen.rules import normalization, pointwise, reductions
from kagent_core.codegen.rules.core import RULES

__all__ = ["RULES", "normalization", "pointwise", "reductions"]
