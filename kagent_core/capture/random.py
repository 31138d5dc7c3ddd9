"""Random operators whose numbers a device draws by itself: the same calls with a seed among their inputs.

A call that draws from PyTorch's generator depends on a state that no kernel on another device can have. Its seeded
variant is a function of its inputs: the seed, which is drawn from the generator when the program is called, the call's
own stream, and each element's place. It can be computed in any order, by any number of threads, and again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from kagent_core.specs import DType, OpCall, TensorSpec

SEED = "seed"
"""The argument of a seeded call: an int64[2] of a seed and the number of a stream."""

GENERATOR = "generator"
"""The argument by which PyTorch's operators are given a generator."""

SEED_DTYPE = DType("int64", 8)
SEED_LENGTH = 2

ONLY_SHAPES = frozenset(
    {
        *("aten::bernoulli.p", "aten::bernoulli.Tensor", "aten::uniform", "aten::normal_functional"),
        *("aten::exponential", "aten::geometric", "aten::cauchy", "aten::log_normal"),
        *("aten::rand_like", "aten::randn_like", "aten::randint_like", "aten::randint_like.low_dtype"),
        *("aten::rand_like.generator", "aten::randn_like.generator"),
        *("aten::randint_like.generator", "aten::randint_like.low_generator_dtype"),
    }
)
"""Operators that take a tensor, `self`, for nothing but the shape and the type of what they draw."""

UNWRITTEN = frozenset(
    {
        *("aten::empty.memory_format", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided"),
        *("aten::new_empty", "aten::new_empty_strided"),
    }
)
"""Operators whose results have no values, and which are for nothing when nobody reads them."""

MISTAKEN_ALIASES = frozenset({"aten::native_dropout"})
"""Operators whose result on fake tensors may share an argument's memory, where a real result never does.

torch's meta kernel of dropout takes ``train=None`` for False, and returns the argument itself.
"""


@dataclass(frozen=True)
class SeededOverload:
    """Stands for torch's ``OpOverload`` of a seeded call: a schema with a seed, and without a generator.

    Attributes
    ----------
    _schema
        What those who pack and lower calls read of an overload.
    tags
        None: a seeded call draws nothing.
    """

    _schema: _Schema
    tags: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class _Schema:
    name: str
    overload_name: str
    arguments: tuple[Any, ...]
    returns: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Seed:
    """The seed as a schema tells of an argument."""

    name: str = SEED
    type: str = "Tensor"
    real_type: str = "Tensor"
    kwarg_only: bool = False
    default_value: None = None
    alias_info: None = None
    is_out: bool = False

    def has_default_value(self) -> bool:
        return False


@functools.cache
def _seeded_overload(overload: Any, left_out: frozenset[str]) -> SeededOverload:
    schema = overload._schema
    arguments = (_Seed(), *(argument for argument in schema.arguments if argument.name not in left_out))
    return SeededOverload(_Schema(schema.name, schema.overload_name, arguments, tuple(schema.returns)))


def is_seeded(call: OpCall) -> bool:
    """Return whether a call's numbers come from a seed among its inputs."""
    return isinstance(call.overload, SeededOverload)


def seeded(call: OpCall, seed: TensorSpec) -> OpCall:
    """Return a call that draws random numbers as one that makes them from a seed.

    Parameters
    ----------
    call
        With `random` set.
    seed
        An int64[2]: the seed and the number of the call's stream.
    """
    left_out = {GENERATOR, "self"} if call.signature in ONLY_SHAPES else {GENERATOR}
    if call.signature == "aten::rrelu_with_noise_functional" and call.arguments.get("training"):
        left_out.add("noise")  # it is made, and its old values are not looked at
    arguments = {SEED: seed, **{name: value for name, value in call.arguments.items() if name not in left_out}}
    kept = {spec.buffer for value in arguments.values() for spec in _tensors(value)}
    return replace(
        call,
        arguments=arguments,
        inputs=(seed, *(spec for spec in call.inputs if spec.buffer in kept)),
        random=False,
        overload=_seeded_overload(call.overload, frozenset(left_out)),
    )


def _tensors(value: Any) -> tuple[TensorSpec, ...]:
    if isinstance(value, TensorSpec):
        return (value,)
    return tuple(spec for item in value for spec in _tensors(item)) if isinstance(value, tuple) else ()
