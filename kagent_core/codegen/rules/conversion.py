"""Copies and conversions."""

from __future__ import annotations

from typing import Any

from kagent_core.codegen.elements import Element
from kagent_core.codegen.rules.core import RULES

pointwise = RULES.pointwise


@pointwise("aten::clone", "aten::_to_copy", "aten::lift_fresh_copy")
def copied(self: Element, **options: Any) -> Element:
    return self


@pointwise("prims::convert_element_type")
def convert_element_type(a: Element, dtype: Any) -> Element:
    return a


@pointwise("aten::copy")
def copy(self: Element, src: Element, non_blocking: bool) -> Element:
    return src


def _no_overlap(call: Any) -> str | None:
    written, read = call.arguments["self"], call.arguments["src"]
    if written.buffer != read.buffer or written == read:
        return None
    return f"it reads {read} from the memory that it writes"


@pointwise("aten::copy_", accepts=_no_overlap)
def copy_in_place(self: Element, src: Element, non_blocking: bool) -> Element:
    return src
