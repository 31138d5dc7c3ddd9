"""kagent-cpu's code generator: C for whatever has a lowering rule, where the machine has a C compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kagent_core.codegen.dtypes import HALVES
from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.generic.dense_convolution import takes_blocks
from kagent_core.codegen.generic.direct_convolution import takes_direct
from kagent_core.codegen.generic.geometry import Window
from kagent_core.codegen.generic.host_attention import FEW
from kagent_core.codegen.generic.panels import takes_panels
from kagent_core.codegen.generic.recurrent import takes_steps
from kagent_core.codegen.generic.tiles import DEFAULT_TILES
from kagent_core.codegen.loops import write_loops
from kagent_core.codegen.register_lines import line_functions
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.codegen.rules import RULES
from kagent_core.config import Config
from kagent_core.inspect.logs import get_logger
from kagent_core.native import Library, PiecedText, find_compiler, load, why_no_compiler
from kagent_core.specs import OpCall
from kagent_cpu.idle_teams import without_idle_teams
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


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

TILES = replace(DEFAULT_TILES, queries=256, keys=128)
"""Sizes of the pieces of products. Of attention, copying keys for so many queries costs little, and so many keys stay
in the nearest caches."""

MANY_THREADS, TILES_OF_MANY_THREADS = 5, replace(TILES, queries=64)
"""From how many threads on there should be more pieces, for all to have some. One thread takes 5% longer for those."""

WIDE_NBYTES = 64
"""Of the vectors with which generated attention is taken in place of ATen's, whose products MKL computes.

In one thread of an AMD processor with AVX-512 it ran at 160 to 240 GFLOP/s, and ATen's at 50 to 100: 1.9 to 2.8 times
as fast for 16 to 4,096 queries and keys and heads of 32 to 1,024 elements, with masks and without, 1.1 to 3 times for 1
to 8 queries, and more in half types and where it is causal. In the half as wide vectors of AVX2 it was 1.1 to 1.2 times
as fast, which says little about processors on which MKL is faster; ``python -m kagent_core.bench.attention`` measures.
"""


_CONVOLUTION = ("input", "weight", "stride", "padding", "dilation", "groups")


def generated_is_better(call: OpCall) -> bool:
    """Return whether a parametrised kernel is faster than ATen's.

    It is for convolutions and products that `kagent_cpu.direct` and `direct_products` laid out, and for attention where
    vectors are wide.
    """
    if call.signature == ATTENTION:
        return _attention_is_better(call)
    if call.signature == "kagent::panel_product":
        return takes_panels(call.arguments["panels"])
    if call.signature in ("kagent::block_convolution", "kagent::block_transposed_convolution"):
        return takes_blocks(CLanguage.register_tiles, call)
    if call.signature == "kagent::lstm_steps":
        return takes_steps(CLanguage.register_tiles, call.arguments["hx"], call.arguments["weight"])
    if call.signature != "aten::convolution" or call.arguments["transposed"]:
        return False
    source, weight, *geometry = (call.arguments[name] for name in _CONVOLUTION)
    return takes_direct(source, weight, call.outputs[0], Window.of(weight.shape[2:], *geometry))


def _attention_is_better(call: OpCall) -> bool:
    compiler, few = find_compiler(), call.arguments["query"].shape[2] <= FEW
    # of few queries, what clang made of the kernel took twice as long as ATen's
    compiled_well = not few or (compiler is not None and compiler.kind == "gcc")
    return CLanguage.host_vectors.nbytes == WIDE_NBYTES and compiled_well


def code_generator(config: Config) -> ExpressionGenerator | None:
    """Return the generator, or None where there is no compiler: then ATen runs each operator by itself."""
    if find_compiler() is None:
        log.info("operators on the CPU are not fused: %s", why_no_compiler())
        return None
    round_halves = config.half_rounding == "operator"
    threads = config.threads or torch.get_num_threads()
    tiles = replace(TILES_OF_MANY_THREADS if threads >= MANY_THREADS else TILES, threads=threads)
    return ExpressionGenerator(
        CLanguage(),
        write_loops,
        round_halves=round_halves,
        generic=GenericKernels(GENERIC, RULES, round_halves, tiles),
        fuses_generic=config.generated_kernels == "all",
        prefers_all=config.generated_kernels == "all",
        library_is_better=aten_is_better,
        generic_is_better=generated_is_better,
        leaves_size_numbers=config.generated_kernels != "all",
    )


def unit_loader(config: Config) -> Callable[[PiecedText], Library]:
    """Return what compiles and loads the text of generated kernels."""
    preamble = CLanguage().preamble()

    def load_unit(text: PiecedText) -> Library:
        compiler = find_compiler()
        if compiler is None:
            raise RuntimeError(why_no_compiler())
        head = preamble + RegisterTiles.functions(str(text)) + line_functions(str(text)) + text.head
        text, compiler = without_idle_teams(replace(text, head=head), compiler)
        return load(text, config.cache_dir, compiler)

    return load_unit
