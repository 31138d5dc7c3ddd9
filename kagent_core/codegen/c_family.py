"""The printer base for C-family languages: types, numbers and the spelling of every primitive.

Generated kernels are written in a vocabulary of short names (``f32``, ``i64``, ``load_bf16``) that a device's preamble
defines, so that the same text is C, OpenCL C or CUDA C++. A device overrides what its language spells otherwise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from kagent_core.codegen.dtypes import FLOATS, HALVES, INTEGERS, NBITS, UNSIGNED, compute_dtype
from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.host_vectors import HostVectors
from kagent_core.codegen.kernel import KernelArg
from kagent_core.codegen.philox import SCALAR_HELPERS
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.codegen.text import Text, bare

SHORT = {
    "bool": "b8",
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}
"""Names of the element types in memory."""

GRAIN = 32768
"""Steps of cheap loops below which no second thread is worth waking (ATen's ``at::internal::GRAIN_SIZE``)."""

LINE_WIDTH = 112
"""Characters of a line of a kernel's parameters, where they have lines of their own."""

SHORT_LIST = 60
"""Characters of parameters that stand behind a kernel's name, which may be long itself."""

REPORT = "report"
"""Name of a kernel's last parameter, where it has checks: a pointer to an int64."""

INDEX_OUT_OF_RANGE = 1
"""What a kernel reports when an index is out of range."""

DIVISION_BY_ZERO = 2
"""What a kernel reports when an integer is divided by zero."""

INDEX_OUT_OF_BOUNDS = 3
"""What a kernel reports when an index is out of range, and PyTorch raises RuntimeError for that operator."""

FUSED_MULTIPLY_ADD = "if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)"
"""The preprocessor's condition for hardware that rounds ``a * b + c`` once in one step."""

PREAMBLE_HELPERS = (
    r"""
/* half types: kept in memory as 16 bits, computed with in f32 */
INLINE f32 load_bf16(bf16 bits) { return bits_f32((u32)bits << 16); }
INLINE bf16 store_bf16(f32 x) {
    u32 bits = f32_bits(x);
    u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)(x != x ? 0x7fc0u : rounded);
}
INLINE f32 round_bf16(f32 x) { return load_bf16(store_bf16(x)); }
INLINE f32 load_f16(f16 bits) {
    u32 sign = ((u32)bits & 0x8000u) << 16, rest = ((u32)bits & 0x7fffu) << 13;
    f32 normal = bits_f32(rest + ((127u - 15u) << 23));
    f32 small = bits_f32(rest + ((127u - 14u) << 23)) - bits_f32((127u - 14u) << 23);
    f32 special = bits_f32(rest | 0x7f800000u);
    f32 size = rest < (1u << 23) ? small : rest >= (31u << 23) ? special : normal;
    return bits_f32(f32_bits(size) | sign);
}
INLINE f16 store_f16(f32 x) {
    u32 bits = f32_bits(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    u32 normal = (size - ((127u - 15u) << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    u32 small = f32_bits(bits_f32(size) + 0.5f) - 0x3f000000u; /* the sum's last bit is worth 2**-24 */
    u32 finite = size < (113u << 23) ? small : normal;
    u32 found = size > 0x7f800000u ? 0x7e00u : size >= (143u << 23) ? 0x7c00u : finite;
    return (f16)(found | sign);
}
INLINE f32 round_f16(f32 x) { return load_f16(store_f16(x)); }

/* products that are summed up: rounded once where the hardware does that in one step */
#FUSED_MULTIPLY_ADD
INLINE f32 mad_f32(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
INLINE f64 mad_f64(f64 a, f64 b, f64 c) { return fma(a, b, c); }
#else
INLINE f32 mad_f32(f32 a, f32 b, f32 c) { return a * b + c; }
INLINE f64 mad_f64(f64 a, f64 b, f64 c) { return a * b + c; }
#endif

/* integers: division by zero is reported, and nothing traps */
#define DEFINE_DIVISION(T)                                                                                   \
    INLINE T trunc_div_##T(T a, T b) { return b == (T)-1 ? (T)(0 - a) : (T)(a / (b ? b : (T)1)); }                \
    INLINE T fmod_##T(T a, T b) { return b == (T)-1 ? (T)0 : (T)(a % (b ? b : (T)1)); }                           \
    INLINE T floor_div_##T(T a, T b) {                                                                       \
        T q = trunc_div_##T(a, b), r = fmod_##T(a, b);                                                       \
        return (T)(q - (r != 0 && ((r < 0) != (b < 0))));                                                    \
    }                                                                                                        \
    INLINE T rem_##T(T a, T b) {                                                                             \
        T r = fmod_##T(a, b);                                                                                \
        return (T)(r != 0 && ((r < 0) != (b < 0)) ? r + b : r);                                              \
    }                                                                                                        \
    INLINE T ipow_##T(T base, T exponent) {                                                                  \
        T result = 1;                                                                                        \
        if (exponent < 0) return base == 1 ? 1 : base == (T)-1 ? (exponent & 1 ? (T)-1 : 1) : 0;                  \
        for (; exponent; exponent >>= 1, base = (T)(base * base)) if (exponent & 1) result = (T)(result * base);  \
        return result;                                                                                       \
    }
#define DEFINE_UNSIGNED_DIVISION(T)                                                                          \
    INLINE T trunc_div_##T(T a, T b) { return (T)(a / (b ? b : 1)); }                                        \
    INLINE T fmod_##T(T a, T b) { return (T)(a % (b ? b : 1)); }                                             \
    INLINE T floor_div_##T(T a, T b) { return trunc_div_##T(a, b); }                                         \
    INLINE T rem_##T(T a, T b) { return fmod_##T(a, b); }                                                    \
    INLINE T ipow_##T(T base, T exponent) {                                                                  \
        T result = 1;                                                                                        \
        for (; exponent; exponent >>= 1, base = (T)(base * base)) if (exponent & 1) result = (T)(result * base);  \
        return result;                                                                                       \
    }
DEFINE_DIVISION(i8) DEFINE_DIVISION(i16) DEFINE_DIVISION(i32) DEFINE_DIVISION(i64)
DEFINE_UNSIGNED_DIVISION(u8) DEFINE_UNSIGNED_DIVISION(u16) DEFINE_UNSIGNED_DIVISION(u32) DEFINE_UNSIGNED_DIVISION(u64)
""".replace("FUSED_MULTIPLY_ADD", FUSED_MULTIPLY_ADD)
    + SCALAR_HELPERS
)
"""What every device's preamble ends with. It needs the short type names, ``INLINE``, ``bits_f32`` and ``f32_bits``."""

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
}
"""Operators that are primitives."""

FLOAT_FUNCTIONS = {
    **{name: name for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan")},
    **{name: name for name in ("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    **{name: name for name in ("erf", "erfc", "lgamma", "tgamma", "sqrt", "pow", "atan2", "hypot", "nextafter")},
    **{name: name for name in ("floor", "ceil", "trunc", "rint", "copysign", "fmod", "fmin", "fmax", "fma")},
    "abs": "fabs",
}
"""C's names of primitives of floats, for float64."""


class CFamily:
    """Spells expressions in a C-family language.

    A device's printer overrides the attributes and the methods whose spelling differs in its language.
    """

    restrict = "restrict"
    """Qualifier of a pointer through which alone its memory is reached."""

    kernel_qualifiers = "static void"
    """What stands before a kernel's name."""

    global_space = ""
    """Qualifier of pointers to device memory, with a blank behind it."""

    narrow_indices = False
    """Whether indices are better computed in 32 bits, where all of a kernel's fit: so on most GPUs.

    On CPUs they are not: a 32-bit index that may wrap around keeps a compiler from loading neighbours as a vector.
    """

    item_nbytes = 2 * 1024 * 1024
    """Most bytes of memory of its own that a work-item has: where it is a thread of a CPU, of its stack."""

    host_vectors: HostVectors | None = None
    """Vectors of gcc and clang, in the C of a CPU: then attention has kernels that are written with them."""

    index_type = "i64"
    """Type of the variables that count and address elements."""

    def narrowed(self) -> Self:
        """Return the same language with indices of 32 bits."""
        narrow = copy.copy(self)
        narrow.index_type = "i32"
        return narrow

    @property
    def is_narrow(self) -> bool:
        """Whether indices have 32 bits."""
        return self.index_type != "i64"

    lacks: Mapping[str, str] = MappingProxyType({})
    """Dtypes that the device cannot compute in, each with the reason. No kernel is written that has one inside."""

    wide = "float64"
    """The type in which long sums of float32 go on. With float32 what they lose is kept beside them, where sums of
    chunks are added up: for a device that has no wider type."""

    one_pass = False
    """Whether a row is read once wherever it can be, element by element: where no cache holds it in between."""

    register_tiles: RegisterTiles | None = None
    """Tiles of sums that the language's functions keep in vector registers: of a CPU; None where there are none."""

    def finished(self, text: str) -> str:
        """Return a kernel's text as it is compiled, given as it was written: by default the same."""
        return text

    # -- types

    def memory_type(self, dtype: str) -> str:
        """Return the type of an element in memory."""
        return SHORT[dtype]

    def value_type(self, dtype: str) -> str:
        """Return the type of a value that is computed with."""
        return "i32" if dtype == "bool" else SHORT[compute_dtype(dtype)]

    def pointer_type(self, dtype: str, written: bool, alone: bool = True) -> str:
        """Return the type of a parameter that points to a tensor.

        Parameters
        ----------
        dtype
            Of its elements.
        written
            Whether the kernel writes it.
        alone
            Whether the memory is reached through no other parameter that is written.
        """
        const = "" if written else "const "
        restrict = self.restrict if alone else ""
        return f"{self.global_space}{const}{self.memory_type(dtype)} *{restrict}"

    # -- memory

    def load(self, dtype: str, place: str) -> str:
        """Return the value of an element in memory."""
        if dtype in HALVES:
            return f"load_{SHORT[dtype]}({place})"
        return f"({place} != 0)" if dtype == "bool" else place

    def store(self, dtype: str, place: str, value: str) -> str:
        """Return the statement that writes a value to memory."""
        if dtype in HALVES:
            return f"{place} = store_{SHORT[dtype]}({bare(value)});"
        return f"{place} = ({SHORT[dtype]}){value};" if dtype == "bool" else f"{place} = {bare(value)};"

    # -- values

    def literal(self, value: bool | float, dtype: str) -> str:
        """Return a number of a type."""
        if dtype == "bool":
            return str(int(value))
        if dtype in FLOATS:
            return self._float_literal(float(value), compute_dtype(dtype))
        if dtype in ("int64", "uint64"):
            suffix = "UL" if dtype in UNSIGNED else "L"
            return f"(-{2**63 - 1}L - 1)" if value == -(2**63) else _signed(f"{value}{suffix}")
        if value == -(2**31):
            return f"(-{2**31 - 1} - 1)"
        if dtype == "uint32":
            return f"{value}u"
        return _signed(str(value)) if NBITS[dtype] == 32 else f"({SHORT[dtype]}){_signed(str(value))}"

    def _float_literal(self, value: float, dtype: str) -> str:
        if math.isnan(value):
            return _as_type("NAN", dtype)
        if math.isinf(value):
            return f"({_as_type('-INFINITY', dtype)})" if value < 0 else _as_type("INFINITY", dtype)
        text = repr(value)
        if dtype == "float32":
            import struct

            # the shortest text that is this float32
            (value,) = struct.unpack("f", struct.pack("f", value))
            text = next(t for t in (f"{value:.{digits}g}" for digits in range(6, 18)) if _as_float32(t) == value)
        if not any(mark in text for mark in ".en"):
            text += ".0"
        return _signed(text + ("f" if dtype == "float32" else ""))

    def cast(self, value: str, source: str, target: str) -> str:
        """Return a value in another type, converted as ATen converts."""
        if target == "bool":
            return f"({value} != 0)"
        if target in HALVES:
            return f"round_{SHORT[target]}({bare(self._as_float(value, source))})"
        wanted = self.value_type(target)
        if source in FLOATS and target in INTEGERS and NBITS[target] < 32:
            through = "i64" if target in UNSIGNED else "i32"  # as ATen: what does not fit keeps its low bits
            return f"({wanted})({through}){value}"
        if source in FLOATS and target in ("uint32", "uint64"):
            return f"({wanted})(i64){value}"
        return value if self.value_type(source) == wanted else f"({wanted}){value}"

    def _as_float(self, value: str, source: str) -> str:
        return value if self.value_type(source) == "f32" else f"(f32){value}"

    def bitcast(self, value: str, source: str, target: str) -> str:
        """Return the bits of a value as another type of the same size."""
        return f"bits_{SHORT[source]}_{SHORT[target]}({bare(value)})"

    def primitive(self, node: Expr, args: list[str]) -> str:
        """Return a primitive of some values."""
        dtype = node.args[-1].dtype
        if node.op in ("max", "min") and dtype in FLOATS and is_plain_number(node.args[1]):
            order = "<=" if node.op == "max" else ">="  # a NaN is in no order: one comparison does
            return f"(!({args[0]} {order} {args[1]}) ? {args[0]} : {args[1]})"
        special: Callable[[str, list[str]], str] | None = getattr(self, f"_p_{node.op}", None)
        if special is not None:
            return special(dtype, args)
        if node.op in INFIX:
            return self._narrow(f"({args[0]} {INFIX[node.op]} {args[1]})", node.dtype)
        passed = ", ".join(bare(arg) for arg in args)
        if dtype in FLOATS and node.op in FLOAT_FUNCTIONS:
            return f"{self.function(FLOAT_FUNCTIONS[node.op], compute_dtype(dtype))}({passed})"
        return f"{node.op}_{self.value_type(dtype)}({passed})"

    def function(self, name: str, dtype: str) -> str:
        """Return the language's name of a function of floats: C's, with an ``f`` behind it for float32."""
        return f"{name}f" if dtype == "float32" else name

    def _narrow(self, text: str, dtype: str) -> str:
        """C computes with small integers in int: bring the result back."""
        small = dtype in INTEGERS and NBITS[dtype] < 32
        return f"({self.value_type(dtype)}){text}" if small else text

    # -- primitives that are more than an operator or a function

    def _p_neg(self, dtype: str, args: list[str]) -> str:
        return self._narrow(f"(-{args[0]})", dtype)

    def _p_abs(self, dtype: str, args: list[str]) -> str:
        if dtype in FLOATS:
            return f"{self.function('fabs', compute_dtype(dtype))}({bare(args[0])})"
        if dtype in UNSIGNED or dtype == "bool":
            return args[0]
        return self._narrow(f"({args[0]} < 0 ? -{args[0]} : {args[0]})", dtype)

    def _p_max(self, dtype: str, args: list[str]) -> str:
        a, b = args
        return _extreme(a, ">", b) if dtype in FLOATS else f"({a} > {b} ? {a} : {b})"

    def _p_min(self, dtype: str, args: list[str]) -> str:
        a, b = args
        return _extreme(a, "<", b) if dtype in FLOATS else f"({a} < {b} ? {a} : {b})"

    def _p_select(self, dtype: str, args: list[str]) -> str:
        # the branch that is not taken must not be evaluated: it may read where there is no memory
        return f"({args[0]} ? {args[1]} : {args[2]})"

    def _p_not(self, dtype: str, args: list[str]) -> str:
        return f"(!{args[0]})" if dtype == "bool" else self._narrow(f"(~{args[0]})", dtype)

    def _p_shl(self, dtype: str, args: list[str]) -> str:
        kind, bits = self.value_type(dtype), NBITS[dtype]
        inside = f"((u64){args[1]} < {bits})"
        return f"({inside} ? ({kind})((u64){args[0]} << ({args[1]} & {bits - 1})) : ({kind})0)"

    def _p_shr(self, dtype: str, args: list[str]) -> str:
        kind, bits = self.value_type(dtype), NBITS[dtype]
        inside = f"((u64){args[1]} < {bits})"
        beyond = f"({kind})0" if dtype in UNSIGNED else f"({kind})({args[0]} < 0 ? -1 : 0)"
        return f"({inside} ? ({kind})({args[0]} >> ({args[1]} & {bits - 1})) : {beyond})"

    def _p_isnan(self, dtype: str, args: list[str]) -> str:
        return f"({args[0]} != {args[0]})"

    def _p_isinf(self, dtype: str, args: list[str]) -> str:
        return f"({self.function('fabs', compute_dtype(dtype))}({bare(args[0])}) == INFINITY)"

    def _p_signbit(self, dtype: str, args: list[str]) -> str:
        if dtype not in FLOATS:
            return f"({args[0]} < 0)"
        return f"(bits_{'f64_i64' if dtype == 'float64' else 'f32_i32'}({bare(args[0])}) < 0)"

    def _p_ldexp(self, dtype: str, args: list[str]) -> str:
        return f"{self.function('ldexp', compute_dtype(dtype))}({bare(args[0])}, (i32){args[1]})"

    def multiply_add(self, a: str, b: str, c: str, dtype: str) -> str:
        """Return ``a * b + c`` in the type that elements of `dtype` are computed in; floats may be rounded once."""
        kind = self.value_type(dtype)
        if dtype in FLOATS:
            return f"mad_{kind}({a}, {b}, {c})"
        return f"({kind})({c} + ({kind})({a}) * ({kind})({b}))"

    # -- functions and loops

    def simd(self, reduction: str = "") -> str:
        """Return the line before an inner loop whose steps are independent and of one kind; empty for none.

        Parameters
        ----------
        reduction
            Operator and variable of a reduction over the loop, as OpenMP writes it: ``"+:sum"``.
        """
        return f"#pragma omp simd reduction({reduction})" if reduction else "#pragma omp simd"

    def head(self, name: str, args: Sequence[KernelArg], reports: bool) -> str:
        """Return the head of a kernel."""
        declared = [f"{arg.type}{'' if arg.type.endswith('*') else ' '}{arg.name}" for arg in args]
        if reports:
            declared.append(f"{self.global_space}i64 *{REPORT}")
        return f"{self.kernel_qualifiers} {name}({_listed(declared) or 'void'})"

    def entry(self, args: Sequence[KernelArg], reports: bool) -> list[str]:
        """Return the lines that a kernel begins with, where its head does not give each pointer as the text uses it."""
        return []

    def open_items(self, text: Text, axes: Sequence[tuple[str, str, int]], steps: int) -> int:
        """Open what runs independently for each step of some loops, and return how many blocks were opened.

        By default loops, whose steps OpenMP spreads over threads.

        Parameters
        ----------
        text
            Where to.
        axes
            Name, extent as text, and extent of each loop, outermost first.
        steps
            Roughly what one step costs, in additions.
        """
        if not axes:
            return 0
        collapse = f" collapse({len(axes)})" if len(axes) > 1 else ""
        sizes = self.wide_product([size for _, size, _ in axes])
        text.add(f"#pragma omp parallel for{collapse} if ({sizes} > {max(GRAIN // max(steps, 1), 1)})")
        for name, size, _ in axes:
            text.open(f"for ({self.index_type} {name} = 0; {name} < {size}; {name}++) {{")
        return len(axes)

    def wide_product(self, sizes: Sequence[str]) -> str:
        """Return a product of sizes that may be greater than an index can be; 1 where there are none."""
        product = " * ".join(sizes) or "1"
        return f"(i64){product}" if self.is_narrow and len(sizes) > 1 else product

    def tile_transposer(self, itemsize: int) -> str | None:
        """Return a function ``f(from, to)`` that transposes a tile of elements of a size, or None where there is none.

        The tile has 32 by 32 elements. Its rows are 33 elements apart, and 32 in what it becomes.
        """
        return None

    def least(self, dtype: str) -> str:
        """Return the least value of a type, which a maximum starts from."""
        if dtype in FLOATS:
            return self.literal(-math.inf, dtype)
        return self.literal(0 if dtype in UNSIGNED or dtype == "bool" else -(2 ** (NBITS[dtype] - 1)), dtype)

    def greatest(self, dtype: str) -> str:
        """Return the greatest value of a type, which a minimum starts from."""
        if dtype in FLOATS:
            return self.literal(math.inf, dtype)
        bits = NBITS[dtype] - (0 if dtype in UNSIGNED or dtype == "bool" else 1)
        return self.literal(2**bits - 1, dtype)


def _listed(parameters: Sequence[str]) -> str:
    """Return parameters behind each other, on lines of their own when they are many."""
    text = ", ".join(parameters)
    if len(text) <= SHORT_LIST:
        return text
    lines = [""]
    for parameter in parameters:
        if lines[-1] and len(lines[-1]) + len(parameter) > LINE_WIDTH:
            lines.append("")
        lines[-1] += f"{parameter}, "
    indented = ",\n        ".join(line.removesuffix(", ") for line in lines)
    return f"\n        {indented}"


def _as_type(text: str, dtype: str) -> str:
    return text if dtype == "float32" else f"({SHORT[dtype]}){text}"


def _signed(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def _as_float32(text: str) -> float:
    import struct

    value: float = struct.unpack("f", struct.pack("f", float(text)))[0]
    return value


def _extreme(a: str, order: str, b: str) -> str:
    """Return the one of two floats that comes first in an order, or NaN where one is."""
    # a sum of two conditions, of which gcc makes vectors; of nested choices, or with |, it makes none
    return f"(({a} {order} {b}) + ({a} != {a}) ? {a} : {b})"


def is_plain_number(node: Expr) -> bool:
    """Whether an expression is a number that is not NaN."""
    return node.op == "constant" and not math.isnan(node.payload)
