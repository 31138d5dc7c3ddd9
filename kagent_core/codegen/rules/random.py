"""Random numbers: each element makes its own, from a seed, the call's stream and its place.

The bits are Philox4x32-10's (`kagent_core.codegen.philox`): the key is the seed, the counter the element's row-major
place and the stream. What becomes of the bits follows ATen: as many bits as its uniform numbers have, the Box-Muller
transformation (G. E. P. Box and M. E. Muller, "A note on the generation of random normal deviates", 1958), and
inversion for the others, with ATen's care for logarithms of 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from kagent_core.capture.random import is_seeded
from kagent_core.codegen.dtypes import FLOATS, compute_dtype
from kagent_core.codegen.elements import Element, Indices, Operand
from kagent_core.codegen.indices import flatten
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.rules.core import RULES
from kagent_core.codegen.table import LoweringKind
from kagent_core.specs import OpCall

At = Callable[[Indices], Element]
Refusal = Callable[[OpCall], str | None]
F = TypeVar("F", bound=Callable[..., Any])

UNIFORM_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a uniform number: those of the type's significand, so that none rounds up to 1 (as ATen's)."""

EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}

SINE = (-2.38894984e-08, 2.75252864e-06, -0.000198408612, 0.00833333097, -0.166666672, 1.0)
"""Coefficients of sin(x) / x as a polynomial in x * x: a least-squares fit from 0 to π/2 at Chebyshev's points."""


def drawing(*signatures: str, needs: Refusal | None = None) -> Callable[[F], F]:
    """Register a rule of an operator that draws random numbers: for calls with a seed, and none of complex numbers."""

    def accepts(call: OpCall) -> str | None:
        if not is_seeded(call):
            return "its numbers are drawn by PyTorch's own generator"
        return needs(call) if needs is not None else None

    return RULES.indexed(*signatures, kind=LoweringKind.POINTWISE, accepts=accepts)


# -- what calls must be like


def _floats(call: OpCall) -> str | None:
    dtype = call.outputs[0].dtype
    return None if dtype.name in FLOATS else f"{dtype} is no floating-point type"


def _probability(name: str) -> Refusal:
    def refusal(call: OpCall) -> str | None:
        value = call.arguments.get(name, 0.5)
        return None if 0 <= value <= 1 else f"'{name}' is {value}, and no probability"

    return refusal


def _both(*refusals: Refusal) -> Refusal:
    return lambda call: next((told for refusal in refusals if (told := refusal(call)) is not None), None)


def _within(name: str, default: float, low: float, high: float = math.inf) -> Refusal:
    """Refuse what is not between two numbers, so that PyTorch itself says what is wrong with it."""

    def refusal(call: OpCall) -> str | None:
        value = call.arguments.get(name, default)
        return None if low < value < high else f"'{name}' is {value}, not between {low} and {high}"

    return refusal


def _deviation(call: OpCall) -> str | None:
    std = call.arguments.get("std", 1.0)
    negative = isinstance(std, int | float) and not std >= 0
    return f"'std' is {std}, which is negative" if negative else _floats(call)


def _ascending(call: OpCall) -> str | None:
    low, high = call.arguments.get("from", 0.0), call.arguments.get("to", 1.0)
    fits = low <= high and math.isfinite(high - low)
    return _floats(call) if fits else f"numbers from {low} to {high}"


def _interval(call: OpCall) -> str | None:
    low, high = call.arguments.get("low", 0), call.arguments["high"]
    return None if low < high else f"whole numbers from {low} to {high}"


# -- bits


class Draw:
    """What one call's elements are made of.

    Parameters
    ----------
    k
        The lowering.
    seed
        The call's seed and stream.
    shape
        Of what is drawn: an element's counter is its row-major place in it.
    """

    def __init__(self, k: Lowering, seed: Operand, shape: tuple[int, ...]) -> None:
        self._k = k
        self._seed = seed
        self._shape = shape

    def bits(self, index: Indices, half: str = "low") -> Element:
        """Return 64 bits, as uint64: the first two words of the element's four, or the ``high`` ones."""
        place = self._k.index_value(flatten(index, self._shape)).to("uint64")
        key, stream = (self._seed.at((number,)).to("uint64") for number in range(2))
        return place.op(f"philox_{half}", stream, key)

    def uniform(self, index: Indices, dtype: str) -> Element:
        """Return a number from 0 to below 1 with as many bits as the type has."""
        bits = UNIFORM_BITS[dtype]
        whole = self.bits(index) & ((1 << bits) - 1)
        whole = whole.to("int64" if bits > 31 else "int32")
        return whole.to(compute_dtype(dtype)) * 2.0**-bits

    def positive(self, index: Indices, dtype: str, half: str = "low") -> Element:
        """Return a number above 0 and at most 1, made of 31 bits, or of 53 where float64 is computed in.

        31 of them become a float as an int32, which takes far less time than an uint32 does.
        """
        bits = self.bits(index, half)
        if compute_dtype(dtype) == "float64":
            return ((bits & ((1 << 53) - 1)).to("int64").to("float64") + 0.5) * 2.0**-53
        return (bits & ((1 << 31) - 1)).to("int32").to("float32") * 2.0**-31 + 2.0**-32

    def normal(self, index: Indices, dtype: str) -> Element:
        """Return a number of the standard normal distribution, in the type that `dtype` is computed in.

        The sine of an angle from -π/2 to π/2 is distributed as that of any angle, and takes no reduction.
        """
        radius = (self.positive(index, dtype).op("log") * -2).op("sqrt")
        angle = (self.positive(index, dtype, "high") - 0.5) * math.pi
        return radius * (angle.op("sin") if angle.dtype == "float64" else _sine(angle))

    def happens(self, index: Indices, probability: float) -> Element:
        """Return whether what has a probability happens, to 32 bits."""
        threshold = round(probability * 2**32)
        if threshold in (0, 2**32):
            return self._k.constant(threshold > 0, "bool")
        return self.bits(index).to("uint32") < threshold

    def whole(self, index: Indices, low: int, high: int) -> Element:
        """Return an int64 from `low` to `high` - 1: the upper half of the product of 64 bits with how many there are.

        Each comes up as often as any other but for 1 in 2**64 / (high - low) (D. Lemire, "Fast random integer
        generation in an interval", 2019); ATen takes a remainder of 32 or 64 bits instead.
        """
        return (self.bits(index).op("mul_hi", high - low) + low).to("int64")


def _sine(angle: Element) -> Element:
    """Return the sine of a float32 from -π/2 to π/2, to 2e-7."""
    square, sine = angle * angle, angle.number(SINE[0])
    for coefficient in SINE[1:]:
        sine = sine * square + coefficient
    return sine * angle


def _drawn(k: Lowering, seed: Operand, made: Callable[[Draw, Indices, str], Element]) -> At:
    """Return a rule's result, given what makes an element of the result's type."""
    draw, dtype = Draw(k, seed, k.result.shape), k.result.dtype.name
    return lambda index: made(draw, index, dtype)


def _value(value: Any, index: Indices, like: Element) -> Any:
    """Return a parameter of a distribution: a number, or the element of a tensor of them, in the type of another."""
    return value.broadcast_at(index).to(like.dtype) if isinstance(value, Operand) else value


# -- uniform numbers


@drawing("aten::rand", "aten::rand_like", "aten::rand.generator", "aten::rand_like.generator", needs=_floats)
def rand(k: Lowering, seed: Operand, **options: Any) -> At:
    return _drawn(k, seed, lambda draw, index, dtype: draw.uniform(index, dtype))


@drawing("aten::uniform", "aten::uniform_", needs=_ascending)
def uniform(k: Lowering, seed: Operand, **options: Any) -> At:
    low, high = float(options["from"]), float(options["to"])

    def made(draw: Draw, index: Indices, dtype: str) -> Element:
        value = (draw.uniform(index, dtype) * (high - low) + low).to(dtype)
        # the sum may have been rounded up to the bound that is left out
        return (value.compute() >= high).where(value.number(low), value) if low < high else value

    return _drawn(k, seed, made)


@drawing("aten::randint", "aten::randint.generator", needs=_interval)
def randint(k: Lowering, seed: Operand, high: int, **options: Any) -> At:
    return _drawn(k, seed, lambda draw, index, dtype: draw.whole(index, 0, high))


@drawing("aten::randint.low", "aten::randint.low_generator", needs=_interval)
def randint_low(k: Lowering, seed: Operand, low: int, high: int, **options: Any) -> At:
    return _drawn(k, seed, lambda draw, index, dtype: draw.whole(index, low, high))


@drawing("aten::randint_like", "aten::randint_like.generator", needs=_interval)
def randint_like(k: Lowering, seed: Operand, high: int, **options: Any) -> At:
    return randint(k, seed, high)


@drawing("aten::randint_like.low_dtype", "aten::randint_like.low_generator_dtype", needs=_interval)
def randint_like_low(k: Lowering, seed: Operand, low: int, high: int, **options: Any) -> At:
    return randint_low(k, seed, low, high)


# -- whether something happens


@drawing("aten::bernoulli.p", "aten::bernoulli_.float", needs=_probability("p"))
def bernoulli_p(k: Lowering, seed: Operand, p: float, **options: Any) -> At:
    return _drawn(k, seed, lambda draw, index, dtype: draw.happens(index, p))


def _below(k: Lowering, seed: Operand, probabilities: Operand) -> At:
    wide = probabilities.dtype == "float64"

    def made(draw: Draw, index: Indices, dtype: str) -> Element:
        chance = draw.uniform(index, "float64" if wide else "float32")
        return chance < probabilities.broadcast_at(index).to(chance.dtype)

    return _drawn(k, seed, made)


@drawing("aten::bernoulli", needs=_floats)
def bernoulli(k: Lowering, seed: Operand, self: Operand, **options: Any) -> At:
    return _below(k, seed, self)


@drawing("aten::bernoulli.Tensor", "aten::bernoulli_.Tensor")
def bernoulli_tensor(k: Lowering, seed: Operand, p: Operand, **options: Any) -> At:
    return _below(k, seed, p)


@drawing("aten::native_dropout", needs=_both(_floats, _probability("p")))
def native_dropout(k: Lowering, seed: Operand, input: Operand, p: float, train: bool | None) -> tuple[At, At]:
    """Multiply by 0 or 1, and then by what makes up for the zeros: what is dropped of infinity is NaN, as in ATen."""
    if train is False:
        return input.at, lambda index: k.constant(True, "bool")
    draw, kept = Draw(k, seed, input.shape), 1 - p
    scale = 0.0 if kept == 0 else 1 / kept

    def at(index: Indices) -> Element:
        value = input.at(index)
        mask = draw.happens(index, kept).to(value.dtype)
        return (value.compute() * mask.compute()).to(value.dtype).compute() * scale

    return at, lambda index: draw.happens(index, kept)


@drawing("aten::rrelu_with_noise_functional", needs=_floats)
def rrelu(
    k: Lowering, seed: Operand, self: Operand, lower: float, upper: float, training: bool, noise: Any = None
) -> tuple[At, At]:
    draw, dtype = Draw(k, seed, self.shape), self.dtype

    def slope(index: Indices) -> Element:
        value = self.at(index).compute()
        if not training:
            return (value < 0).where(value.number((lower + upper) / 2), 1.0)
        drawn = (draw.uniform(index, dtype) * (upper - lower) + lower).to(dtype).compute()
        return (value <= 0).where(drawn, 1.0)

    return lambda index: self.at(index).compute() * slope(index), slope if training else noise.at


# -- other distributions


@drawing("aten::randn", "aten::randn_like", "aten::randn.generator", "aten::randn_like.generator", needs=_floats)
def randn(k: Lowering, seed: Operand, **options: Any) -> At:
    return _drawn(k, seed, lambda draw, index, dtype: draw.normal(index, dtype))


@drawing("aten::normal_functional", "aten::normal_", "aten::normal.float_float", needs=_deviation)
@drawing("aten::normal.Tensor_Tensor", "aten::normal.Tensor_float", "aten::normal.float_Tensor", needs=_deviation)
def normal(k: Lowering, seed: Operand, mean: Any, std: Any, **options: Any) -> At:
    def made(draw: Draw, index: Indices, dtype: str) -> Element:
        value = draw.normal(index, dtype)
        deviation: Element | float = _value(std, index, value)
        center: Element | float = _value(mean, index, value)
        return value * deviation + center

    return _drawn(k, seed, made)


@drawing("aten::log_normal", "aten::log_normal_", needs=_deviation)
def log_normal(k: Lowering, seed: Operand, mean: float, std: float, **options: Any) -> At:
    return _drawn(k, seed, lambda draw, index, dtype: (draw.normal(index, dtype) * std + mean).op("exp"))


@drawing("aten::exponential", "aten::exponential_", needs=_both(_floats, _within("lambd", 1.0, 0.0)))
def exponential(k: Lowering, seed: Operand, lambd: float, **options: Any) -> At:
    """Never 0: a logarithm of 1 is taken for half of the type's epsilon, as ATen takes it on CUDA."""

    def made(draw: Draw, index: Indices, dtype: str) -> Element:
        logarithm = draw.positive(index, dtype).op("log")
        return logarithm.op("min", -EPSILON[logarithm.dtype] / 2) * (-1 / lambd)

    return _drawn(k, seed, made)


@drawing("aten::geometric", "aten::geometric_", needs=_within("p", 0.5, 0.0, 1.0))
def geometric(k: Lowering, seed: Operand, p: float, **options: Any) -> At:
    def made(draw: Draw, index: Indices, dtype: str) -> Element:
        tried = draw.positive(index, dtype if dtype in FLOATS else "float32").op("log") * (1 / math.log1p(-p))
        return tried.op("ceil").op("max", 1)

    return _drawn(k, seed, made)


@drawing("aten::cauchy", "aten::cauchy_", needs=_both(_floats, _within("sigma", 1.0, 0.0)))
def cauchy(k: Lowering, seed: Operand, median: float, sigma: float, **options: Any) -> At:
    """The tangent is kept from its poles, as ATen keeps it on CUDA."""

    def made(draw: Draw, index: Indices, dtype: str) -> Element:
        chance = draw.positive(index, dtype)
        epsilon = EPSILON[chance.dtype]
        angle = (chance.op("max", epsilon).op("min", 1 - epsilon) - 0.5) * math.pi
        return angle.op("tan") * sigma + median

    return _drawn(k, seed, made)
