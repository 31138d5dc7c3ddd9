"""kagent-cpu's code generator: C for whatever has a lowering rule, where the machine has a C compiler."""

from __future__ import annotations

from collections.abc import Callable

from kagent_core.codegen.dtypes import HALVES
from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.loops import write_loops
from kagent_core.codegen.rules import RULES
from kagent_core.config import Config
from kagent_core.inspect.logs import get_logger
from kagent_core.native import Library, find_compiler, load, why_no_compiler
from kagent_core.specs import OpCall
from kagent_cpu.language import CLanguage

log = get_logger("codegen")


BETTER_ALONE = frozenset(
    {
        *("aten::constant_pad_nd", "aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d"),
        *("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::exp2", "aten::prod", "aten::prod.dim_int"),
        *("aten::fmod.Tensor", "aten::fmod.Scalar", "aten::remainder.Tensor", "aten::remainder.Scalar"),
        *("aten::floor_divide", "aten::floor_divide.Scalar", "aten::div.Tensor_mode", "aten::div.Scalar_mode"),
    }
)
"""Operators for which ATen's kernels are taken where nothing fuses with them.

Generated ones took longer, in one thread of a processor with AVX-512, for constant_pad_nd, reflection_pad2d,
grid_sampler_2d, exp2, prod, and fmod, remainder and floor division of floats; the other overloads compute alike.
"""

BETTER_ALONE_IN_HALVES = frozenset({"aten::cat", "aten::stack"})
"""Of half types, generated kernels convert what ATen moves as bits."""


def aten_is_better(call: OpCall) -> bool:
    """Return whether ATen's kernel is faster than a generated one for a call alone."""
    in_halves = any(spec.dtype.name in HALVES for spec in call.outputs)
    return call.signature in BETTER_ALONE or (in_halves and call.signature in BETTER_ALONE_IN_HALVES)


def code_generator(config: Config) -> ExpressionGenerator | None:
    """Return the generator, or None where there is no compiler: then ATen runs each operator by itself."""
    if find_compiler() is None:
        log.info("operators on the CPU are not fused: %s", why_no_compiler())
        return None
    round_halves = config.half_rounding == "operator"
    return ExpressionGenerator(
        CLanguage(),
        write_loops,
        round_halves=round_halves,
        generic=GenericKernels(GENERIC, RULES, round_halves),
        fuses_generic=config.generated_kernels == "all",
        prefers_all=config.generated_kernels == "all",
        library_is_better=aten_is_better,
    )


def unit_loader(config: Config) -> Callable[[str], Library]:
    """Return what compiles and loads the text of generated kernels."""
    preamble = CLanguage().preamble()

    def load_unit(text: str) -> Library:
        compiler = find_compiler()
        if compiler is None:
            raise RuntimeError(why_no_compiler())
        return load(preamble + text, config.cache_dir, compiler)

    return load_unit
