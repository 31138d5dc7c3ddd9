"""The code generator of a device that has a language with work-items."""

from __future__ import annotations

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.loops.items import write_work_items
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.config import Config


def work_item_generator(language: WorkItemLanguage, config: Config) -> ExpressionGenerator:
    """Return a generator of every kernel that can be generated, each with a source that is complete by itself.

    Parameters
    ----------
    language
        The printer.
    config
        Says how half types are rounded.
    """
    round_halves = config.half_rounding == "operator"
    return ExpressionGenerator(
        language,
        write_work_items,
        round_halves=round_halves,
        generic=GenericKernels(GENERIC, RULES, round_halves),
        preamble=language.preamble(),
    )
