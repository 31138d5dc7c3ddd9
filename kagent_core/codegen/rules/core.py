"""The table that the core's rules are in."""

from kagent_core.codegen.table import RuleTable

RULES = RuleTable()
"""Rules of ATen's operators."""
