"""Prototypes: the parameters that a kernel declares, their C types, and values derived from shapes."""

from __future__ import annotations

from kagent_core.prototype.abi import Abi
from kagent_core.prototype.declaration import parse_prototype, prototype_name, prototype_refusal, same_value

__all__ = ["Abi", "parse_prototype", "prototype_name", "prototype_refusal", "same_value"]
