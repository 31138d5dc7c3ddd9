"""Vectors in languages that have types for them: neighbouring elements that one work-item computes together.

All vectors of a language have the same number of elements, whatever their type. Booleans are masks of 32 bits, whose
elements are 0 or -1, so that they choose between vectors of every type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from kagent_core.codegen.c_family import FLOAT_FUNCTIONS, FUSED_MULTIPLY_ADD, INFIX, SHORT
from kagent_core.codegen.dtypes import FLOATS, HALVES, INTEGERS, NBITS, SUPPORTED, UNSIGNED, compute_dtype
from kagent_core.codegen.expressions import Expr, walk
from kagent_core.codegen.indices import Axis, Index
from kagent_core.codegen.philox import vector_helpers
from kagent_core.codegen.primitives import PRIMITIVES
from kagent_core.codegen.text import bare

if TYPE_CHECKING:
    from kagent_core.codegen.work_items import WorkItemLanguage

NAMES: Mapping[str, str] = MappingProxyType(
    {"i8": "char", "i16": "short", "i32": "int", "i64": "long", "f32": "float", "f64": "double"}
    | {"u8": "uchar", "u16": "ushort", "u32": "uint", "u64": "ulong", "b8": "uchar", "f16": "ushort", "bf16": "ushort"}
)
"""OpenCL C's names of the element types, which a number behind them makes names of vectors."""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_OWN = frozenset(
    {
        *("select", "max", "min", "neg", "not", "abs", "isnan", "isinf", "signbit", "ldexp"),
        *("mul_hi", "philox_low", "philox_high"),
    }
)
_OF_NUMBERS = frozenset({"add", "sub", "mul", "div", "lt", "le", "gt", "ge", "max", "min", "neg", "abs"})
_LANE_SUMS = ("f32", "f64", "i32", "i64")
_LANE_ORDERS = ("f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")

HALF_HELPERS = r"""
INLINE f32xW load_bf16xW(bf16xW bits) { return as_f32xW(convert_u32xW(bits) << 16); }
INLINE bf16xW store_bf16xW(f32xW x) {
    u32xW bits = as_u32xW(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return convert_u16xW(select(rounded, (u32xW)(0x7fc0u), x != x));
}
INLINE f32xW round_bf16xW(f32xW x) { return load_bf16xW(store_bf16xW(x)); }
INLINE f32xW load_f16xW(f16xW half_bits) {
    u32xW bits = convert_u32xW(half_bits), sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    f32xW normal = as_f32xW(rest + ((127u - 15u) << 23));
    f32xW small = as_f32xW(rest + ((127u - 14u) << 23)) - bits_f32((127u - 14u) << 23);
    f32xW special = as_f32xW(rest | 0x7f800000u);
    f32xW size = select(select(normal, special, rest >= (31u << 23)), small, rest < (1u << 23));
    return as_f32xW(as_u32xW(size) | sign);
}
INLINE f16xW store_f16xW(f32xW x) {
    u32xW bits = as_u32xW(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    u32xW normal = (size - ((127u - 15u) << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    u32xW small = as_u32xW(as_f32xW(size) + 0.5f) - 0x3f000000u;
    u32xW finite = select(normal, small, size < (113u << 23));
    u32xW large = select((u32xW)(0x7c00u), (u32xW)(0x7e00u), size > 0x7f800000u);
    return convert_u16xW(select(finite, large, size >= (143u << 23)) | sign);
}
INLINE f32xW round_f16xW(f32xW x) { return load_f16xW(store_f16xW(x)); }
"""
"""The half types' conversions, as in `kagent_core.codegen.c_family.PREAMBLE_HELPERS`. ``W`` stands for the width."""


class Vectors:
    """How a language spells vectors: by default as OpenCL C does.

    Parameters
    ----------
    language
        For what it has in common with single values.
    """

    names: Mapping[str, str] = NAMES
    """Names of the element types in the names of vectors."""

    by_lane: Collection[str] = ()
    """Functions that are computed lane by lane, since the language's own of vectors are not as exact as those of single
    values."""

    half_arithmetic: Collection[str] = ()
    """Primitives of float32 that are also there for vectors of halves as they are in memory, and round once, to their
    type: some of ``add``, ``sub`` and ``mul``, as functions such as ``add_f16x4``."""

    even_lines = False
    """Whether a kernel that goes over lines of elements has vectors only where every line is a whole number of vectors
    behind the first: for devices whose vectors take longer where they are not aligned."""

    def __init__(self, language: WorkItemLanguage) -> None:
        self.language = language
        self.width = language.vector_width

    # -- types

    def named(self, short: str) -> str:
        """Return the name of a vector in kernels, such as ``f32x8``, given the name of its elements."""
        return f"{short}x{self.width}"

    def kind(self, dtype: str) -> str:
        """Return the type of a vector of values that are computed with."""
        return self.named(self.language.value_type(dtype))

    def preamble(self) -> str:
        """Return what the sources of kernels with vectors need: types, conversions, and what a vector's lanes make."""
        width = self.width
        lines = [f"typedef {self.names[short]}{width} {short}x{width};" for short in self.language.types]
        for short in ("f32", "u32", "u16", "u64"):
            name = f"{self.names[short]}{width}"
            lines += [f"#define {how}_{short}x{width} {how}_{name}" for how in ("as", "convert")]
        lines += _multiply_adds([self.named(short) for short in ("f32", "f64") if short in self.language.types])
        lines += [HALF_HELPERS.strip().replace("xW", f"x{width}"), vector_helpers(width)]
        for short in self.language.types:
            if short in _LANE_SUMS:
                lines += [self._lanes("sum", short, "{0} + {1}"), self._lanes("prod", short, "{0} * {1}")]
            if short in _LANE_ORDERS:
                prefix = "f" if short.startswith("f") else ""
                lines += [self._lanes(kind, short, f"{prefix}{kind}({{0}}, {{1}})") for kind in ("max", "min")]
        for short, dtype in (("f32", "float32"), ("f64", "float64")):
            lines += [self._of_each_lane(name, short, dtype) for name in self.by_lane if short in self.language.types]
        lines += [self._lanes("or", "i32", "{0} | {1}"), self._lanes("and", "i32", "{0} & {1}")]
        return "\n".join([*lines, ""])

    def _lanes(self, kind: str, short: str, combined: str) -> str:
        """Return a function that combines the lanes of a vector, halves with halves."""
        steps, vector, width = [], "x", self.width
        while width > 2:
            width //= 2
            halves = combined.format(f"{vector}.lo", f"{vector}.hi")
            vector = f"x{width}"
            steps.append(f"{self.names[short]}{width} {vector} = {halves};")
        last = combined.format(f"{vector}.lo", f"{vector}.hi")
        head = f"INLINE {short} {kind}_lanes_{short}({self.named(short)} x)"
        return f"{head} {{ {' '.join([*steps, f'return {last};'])} }}"

    def _of_each_lane(self, function: str, short: str, dtype: str) -> str:
        """Return a function of vectors that is computed lane by lane."""
        [arity] = {PRIMITIVES[name].arity for name, other in FLOAT_FUNCTIONS.items() if other == function}
        vectors, kind = "xyz"[:arity], self.named(short)
        name = self.language.function(function, dtype)
        lanes = [f"{name}({', '.join(f'{one}.s{lane:x}' for one in vectors)})" for lane in range(self.width)]
        taken = ", ".join(f"{kind} {one}" for one in vectors)
        return f"INLINE {kind} {function}_by_lane_{kind}({taken}) {{ return ({kind})({', '.join(lanes)}); }}"

    def over_lanes(self, kind: str, short: str, vector: str) -> str:
        """Return what the lanes of a vector make together, always in the same order.

        Parameters
        ----------
        kind
            ``sum``, ``prod``, ``max`` or ``min``, of masks ``or`` or ``and``. The extremes take no account of NaN.
        short
            Name of the elements' type.
        vector
            Its text.
        """
        return f"{kind}_lanes_{short}({bare(vector)})"

    # -- memory

    def load(self, dtype: str, address: str) -> str:
        """Return the values of neighbouring elements, given the address of the first one."""
        loaded = self.read(address)
        if dtype in HALVES:
            return f"load_{self.named(SHORT[dtype])}({loaded})"
        return f"({self.convert(loaded, 'u8', 'i32')} != 0)" if dtype == "bool" else loaded

    def store(self, dtype: str, address: str, values: str) -> str:
        """Return the statement that writes values to neighbouring elements."""
        if dtype in HALVES:
            values = f"store_{self.named(SHORT[dtype])}({bare(values)})"
        elif dtype == "bool":
            values = self.convert(f"-{values}", "i32", "b8")
        return self.write(address, values)

    def read(self, address: str) -> str:
        """Return neighbouring elements as they are in memory, given the address of the first one."""
        return f"vload{self.width}(0, {address})"

    def write(self, address: str, elements: str) -> str:
        """Return the statement that writes neighbouring elements, given as they are to be in memory."""
        return f"vstore{self.width}({bare(elements)}, 0, {address});"

    # -- halves as they are in memory

    def widened(self, halves: str, dtype: str) -> str:
        """Return the values of a vector of halves."""
        return f"load_{self.named(SHORT[dtype])}({bare(halves)})"

    def halved(self, vector: str, source: str, dtype: str) -> str:
        """Return a vector of values of a type, rounded to halves."""
        value_type = self.language.value_type(source)
        if source == "bool":
            vector = f"(-{vector})"
        wide = vector if value_type == "f32" else self.convert(vector, value_type, "f32")
        return f"store_{self.named(SHORT[dtype])}({bare(wide)})"

    def all_halves(self, half: str, dtype: str) -> str:
        """Return a vector of halves that are all the same one."""
        return f"({self.named(SHORT[dtype])})({bare(half)})"

    def of_halves(self, primitive: str, halves: Sequence[str], dtype: str) -> str:
        """Return one of `half_arithmetic` of vectors of halves."""
        return f"{primitive}_{self.named(SHORT[dtype])}({', '.join(map(bare, halves))})"

    # -- values

    def broadcast(self, value: str, dtype: str) -> str:
        """Return a vector of a value that is the same in every lane."""
        if dtype == "bool":
            return f"({self.kind(dtype)})(-{value})"
        return f"({self.kind(dtype)})({bare(value)})"

    def counting(self, first: str, step: str) -> str:
        """Return a vector of int64 numbers from a first one on, each a step greater than the one before."""
        lanes = ", ".join(map(str, range(self.width)))
        kind = self.named("i64")
        factor = "" if step == "1" else f" * {step}"
        return f"(({kind})({bare(first)}) + ({kind})({lanes}){factor})"

    def convert(self, vector: str, source: str, target: str) -> str:
        """Return a vector with elements of another type, given as short names."""
        same = self.names[source] == self.names[target]
        return vector if same else f"convert_{self.names[target]}{self.width}({bare(vector)})"

    def mask(self, compared: str, dtype: str) -> str:
        """Return a mask of 32 bits, given what a comparison of vectors of a type gives."""
        bits = NBITS[compute_dtype(dtype)]
        return compared if bits in (1, 32) else self.convert(compared, f"i{bits}", "i32")

    def choose(self, mask: str, then: str, otherwise: str, dtype: str) -> str:
        """Return, of vectors with elements of a type, those of one where a mask holds, else those of another."""
        bits = NBITS[compute_dtype(dtype)]
        wide = mask if bits in (1, 32) else self.convert(mask, "i32", f"i{bits}")
        return f"select({bare(otherwise)}, {bare(then)}, {bare(wide)})"

    def cast(self, vector: str, source: str, target: str) -> str:
        """Return a vector in another type, converted as `CFamily.cast` converts values."""
        value_type = self.language.value_type
        if target == "bool":
            return self.mask(f"({vector} != {self.language.literal(0, source)})", source)
        if source == "bool":
            vector = f"(-{vector})"
        if target in HALVES:
            wide = vector if value_type(source) == "f32" else self.convert(vector, value_type(source), "f32")
            return f"round_{self.named(SHORT[target])}({bare(wide)})"
        through = None
        if source in FLOATS and target in INTEGERS and NBITS[target] < 32:
            through = "i64" if target in UNSIGNED else "i32"
        elif source in FLOATS and target in ("uint32", "uint64"):
            through = "i64"
        if through is not None:
            return self.convert(self.convert(vector, value_type(source), through), through, value_type(target))
        return self.convert(vector, value_type(source), value_type(target))

    def multiply_add(self, a: str, b: str, c: str, dtype: str) -> str:
        """Return ``a * b + c`` of vectors of floats, as `CFamily.multiply_add` of single ones."""
        return f"mad_{self.named(self.language.value_type(dtype))}({bare(a)}, {bare(b)}, {bare(c)})"

    def bitcast(self, vector: str, target: str) -> str:
        """Return the bits of a vector as elements of another type of the same size."""
        return f"as_{self.names[SHORT[target]]}{self.width}({bare(vector)})"

    def primitive(self, node: Expr, args: list[str]) -> str:
        """Return a primitive of some vectors, as `CFamily.primitive` of some values."""
        dtype = node.args[-1].dtype
        special: Callable[[str, list[str]], str] | None = getattr(self, f"_p_{node.op}", None)
        if special is not None:
            return special(dtype, args)
        if node.op in INFIX:
            text = f"({args[0]} {INFIX[node.op]} {args[1]})"
            return self.mask(text, dtype) if node.op in COMPARISONS else text
        passed = ", ".join(bare(arg) for arg in args)
        return f"{self.function(FLOAT_FUNCTIONS[node.op], compute_dtype(dtype))}({passed})"

    def function(self, name: str, dtype: str) -> str:
        """Return the language's name of a function of vectors of floats, given C's name of it."""
        return f"{name}_by_lane_{self.kind(dtype)}" if name in self.by_lane else self.language.function(name, dtype)

    def _p_select(self, dtype: str, args: list[str]) -> str:
        return self.choose(args[0], args[1], args[2], dtype)

    def _p_max(self, dtype: str, args: list[str]) -> str:
        return self._extreme(dtype, ">", args)

    def _p_min(self, dtype: str, args: list[str]) -> str:
        return self._extreme(dtype, "<", args)

    def _extreme(self, dtype: str, order: str, args: list[str]) -> str:
        a, b = args
        taken = f"({a} {order} {b})"
        if dtype in FLOATS:
            taken = f"({taken} | ({a} != {a}))"
        return self.choose(self.mask(taken, dtype), a, b, dtype)

    def _p_neg(self, dtype: str, args: list[str]) -> str:
        return f"(-{args[0]})"

    def _p_not(self, dtype: str, args: list[str]) -> str:
        return f"(~{args[0]})"

    def _p_abs(self, dtype: str, args: list[str]) -> str:
        if dtype in FLOATS:
            return f"{self.language.function('fabs', compute_dtype(dtype))}({bare(args[0])})"
        if dtype in UNSIGNED or dtype == "bool":
            return args[0]
        below = self.mask(f"({args[0]} < {self.language.literal(0, dtype)})", dtype)
        return self.choose(below, f"-{args[0]}", args[0], dtype)

    def _p_isnan(self, dtype: str, args: list[str]) -> str:
        return self.mask(f"({args[0]} != {args[0]})", dtype)

    def _p_isinf(self, dtype: str, args: list[str]) -> str:
        function = self.language.function("fabs", compute_dtype(dtype))
        infinity = self.language.greatest(compute_dtype(dtype))
        return self.mask(f"({function}({bare(args[0])}) == {infinity})", dtype)

    def _p_signbit(self, dtype: str, args: list[str]) -> str:
        if dtype in FLOATS:
            dtype = f"int{NBITS[compute_dtype(dtype)]}"
            args = [self.bitcast(args[0], dtype)]
        return self.mask(f"({args[0]} < {self.language.literal(0, dtype)})", dtype)

    def _p_mul_hi(self, dtype: str, args: list[str]) -> str:
        return f"mul_hi({bare(args[0])}, {bare(args[1])})"

    def _p_philox_low(self, dtype: str, args: list[str]) -> str:
        return f"philox_low_{self.kind(dtype)}({', '.join(map(bare, args))})"

    def _p_philox_high(self, dtype: str, args: list[str]) -> str:
        return f"philox_high_{self.kind(dtype)}({', '.join(map(bare, args))})"

    def _p_ldexp(self, dtype: str, args: list[str]) -> str:
        whole = self.convert(args[1], self.language.value_type(dtype), "i32")
        return f"{self.language.function('ldexp', compute_dtype(dtype))}({bare(args[0])}, {bare(whole)})"


def _multiply_adds(kinds: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for condition, product in ((FUSED_MULTIPLY_ADD, "fma(a, b, c)"), ("else", "a * b + c")):
        lines.append(f"#{condition}")
        lines += [f"INLINE {kind} mad_{kind}({kind} a, {kind} b, {kind} c) {{ return {product}; }}" for kind in kinds]
    return [*lines, "#endif"]


def neighbours(index: Index, lane: Axis) -> int | None:
    """Return how far an index goes per step of an axis, or None where that is not the same at every step."""
    uneven = any(not isinstance(atom, Axis) and lane in Index.of(atom).axes for atom, _ in index.terms)
    return None if uneven else index.factor(lane)


def begins_evenly(index: Index, lane: Axis, width: int) -> bool:
    """Whether all lines along an axis begin a whole number of vectors behind the first element of their tensor."""
    factors = [factor for atom, factor in index.terms if atom != lane]
    return not any(number % width for number in (index.constant, *factors))


def in_lanes(lane: Axis, *values: Expr) -> bool:
    """Whether values at neighbouring steps of an axis can be computed as a vector, given the reductions in them."""
    return all(_has_lanes(node, lane) for node in walk(*values, into_reductions=False) if lane in node.axes)


def sums_lanes(node: Expr) -> bool:
    """Whether the lanes of a vector can be reduced together."""
    kind, short = node.payload.kind, SHORT[compute_dtype(node.dtype)]
    if kind in ("any", "all"):
        return node.dtype == "bool"
    return short in (_LANE_SUMS if kind in ("sum", "prod") else _LANE_ORDERS)


def _has_lanes(node: Expr, lane: Axis) -> bool:
    if node.op == "reduce" and node.dtype == "bool" and node.payload.kind not in ("any", "all"):
        return False  # masks are no numbers
    if node.dtype not in SUPPORTED or any(arg.dtype not in SUPPORTED for arg in node.args):
        return False
    if node.op == "load":
        return neighbours(node.payload.offset, lane) == 1 and not any(lane in arg.axes for arg in node.args)
    if node.op == "index":
        return neighbours(node.payload, lane) is not None
    if node.op == "bitcast":
        return NBITS[compute_dtype(node.dtype)] == NBITS[compute_dtype(node.args[0].dtype)]
    if node.op in FLOAT_FUNCTIONS:
        return node.op in _OWN or node.args[0].dtype in FLOATS
    if node.op in _OF_NUMBERS and any(arg.dtype == "bool" for arg in node.args):
        return False  # masks are no numbers
    return node.op in ("cast", "given", "reduce") or node.op in _OWN or node.op in INFIX
