"""The code generator of a device that has a language with work-items."""

from __future__ import annotations

from collections.abc import Collection

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.loops.items import write_work_items
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.config import Config


def work_item_generator(
    language: WorkItemLanguage, config: Config, library: Collection[str] = ()
) -> ExpressionGenerator:
    """Return a generator of every kernel that can be generated, each with a source that is complete by itself.

    Parameters
    ----------
    language
        The printer.
    config
        Says how half types are rounded.
    library
        Signatures of operators that the device's registry resolves to kernels which are better than parametrised ones:
        nothing is fused into those.
    """
    round_halves = config.half_rounding == "operator"
    return ExpressionGenerator(
        language,
        write_work_items,
        round_halves=round_halves,
        generic=GenericKernels(GENERIC, RULES, round_halves),
        fuses_generic=not library,
        generic_is_better=lambda call: bool(library) and call.signature not in library,
        prefers_all=config.generated_kernels == "all",
        preamble=language.preamble(),
    )
