"""Vectors of neighbouring elements in CUDA C++, which has none that it computes with: structures with operators."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kagent_core.codegen.c_family import FLOAT_FUNCTIONS, SHORT
from kagent_core.codegen.dtypes import HALVES
from kagent_core.codegen.philox import vector_helpers
from kagent_core.codegen.primitives import PRIMITIVES
from kagent_core.codegen.text import bare
from kagent_core.codegen.vectors import Vectors

# In these texts, what stands in $( )$ is written once for every lane, with the lane's name for @ and its number for #:
# values from the first lane on, statements from the last. W is the number of lanes.

# The hardware's own conversions, which round to the nearest, ties to even, and keep what is no number, as the helpers
# do that they take the place of. Devices before 8.0 have none to bfloat16, and a host that plays a device has none.
HALVES_IN_HARDWARE = """
#ifndef KAGENT_EMULATED
INLINE f32 f16_to_f32(f16 bits) { f32 x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
INLINE f16 f32_to_f16(f32 x) { f16 bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits; }
#define load_f16(bits) f16_to_f32(bits)
#define store_f16(x) f32_to_f16(x)
#define round_f16(x) f16_to_f32(f32_to_f16(x))
#if __CUDA_ARCH__ >= 800
INLINE bf16 f32_to_bf16(f32 x) { bf16 bits; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits; }
#define store_bf16(x) f32_to_bf16(x)
#define round_bf16(x) load_bf16(f32_to_bf16(x))
#endif
#endif
"""

# Of an emulated device, float64 takes the place of the device's exact result: it is rounded once, by way of a float32
# whose last bit says that something was lost.
_PAIRS = r"""
/* two halves at once, rounded once. With .rn the assembler makes no multiply-add of a product and a sum. */
#ifdef KAGENT_EMULATED
INLINE f32 to_odd_f32(f64 x) {
    u32 bits = f32_bits((f32)x);
    f64 found = bits_f32(bits), over = x < 0 ? x - found : found - x;
    return bits_f32(over == 0 || x != x || bits & 1 ? bits : over < 0 ? bits + 1 : bits - 1);
}
#define PAIR_OF(KIND, a, SIGN, b) store_##KIND(to_odd_f32((f64)load_##KIND((KIND)(a)) SIGN (f64)load_##KIND((KIND)(b))))
#else
#define PAIR_OF(KIND, a, SIGN, b) store_##KIND(load_##KIND((KIND)(a)) SIGN load_##KIND((KIND)(b)))
#endif
#define DEFINE_PAIR(NAME, KIND, SIGN) \
    INLINE u32 NAME(u32 a, u32 b) { \
        return PAIR_OF(KIND, a, SIGN, b) | (u32)PAIR_OF(KIND, a >> 16, SIGN, b >> 16) << 16; \
    }
#define DEFINE_PAIR_OF(NAME, TEXT) \
    INLINE u32 NAME(u32 a, u32 b) { u32 c; asm(TEXT : "=r"(c) : "r"(a), "r"(b)); return c; }
"""

PAIRED: Mapping[str, str] = MappingProxyType({"add": "+", "sub": "-", "mul": "*"})
"""Primitives that devices have for two halves at once, and their operators.

They compute them exactly and round once, where eager PyTorch rounds to float32 first, to the same numbers: see
`kagent_core.codegen.loops.half_values`. Numbers below the least normal one are kept, as ``.ftz`` is not asked for."""

# Before 9.0, bfloat16 has multiply-adds alone: times 1, or plus -0, they are sums and products, with their signs of 0.
_BF16_FUSED = {
    "add": "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 %0, %1, one, %2; }",
    "sub": "{ .reg .b32 less; mov.b32 less, 0xbf80bf80; fma.rn.bf16x2 %0, %2, less, %1; }",
    "mul": "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 %0, %1, %2, zero; }",
}


def _of_pairs(primitive: str, short: str) -> str:
    """Return the function of vectors of halves that a primitive is, which takes them two by two."""
    name = f"{primitive}_pair_{short}"
    in_software = f"DEFINE_PAIR({name}, {short}, {PAIRED[primitive]})"
    in_hardware = f'DEFINE_PAIR_OF({name}, "{primitive}.rn.{short}x2 %0, %1, %2;")'
    if short == "f16":
        ways = [("ifdef KAGENT_EMULATED", in_software), ("else", in_hardware)]
    else:
        fused = f'DEFINE_PAIR_OF({name}, "{_BF16_FUSED[primitive]}")'
        ways = [("if defined(KAGENT_EMULATED) || __CUDA_ARCH__ < 800", in_software)]
        ways += [("elif __CUDA_ARCH__ < 900", fused), ("else", in_hardware)]
    function = (
        f"INLINE {short}xW {name.replace('_pair', '')}xW({short}xW a, {short}xW b) {{\n"
        f"    union {{ {short}xW lanes; u32 pairs[W / 2]; }} x, y;\n"
        f"    x.lanes = a;\n    y.lanes = b;\n"
        f"    for (i32 n = 0; n < W / 2; n++) x.pairs[n] = {name}(x.pairs[n], y.pairs[n]);\n"
        "    return x.lanes;\n}"
    )
    return "\n".join([line for way, text in ways for line in (f"#{way}", text)] + ["#endif", function])


_STRUCTURE = """
/* neighbouring elements that one thread computes; comparisons give masks, which are 0 or -1 in every lane */
template <class T> struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) lanes_of {
    T $(@)$;
    lanes_of() = default;
    INLINE lanes_of(T all) : $(@(all))$ {}
    INLINE lanes_of($(T of_@)$) : $(@(of_@))$ {}
    template <class S> INLINE explicit lanes_of(const lanes_of<S> &other) : $(@((T)other.@))$ {}
    INLINE friend lanes_of operator-(lanes_of a) { return {$((T)-a.@)$}; }
    INLINE friend lanes_of operator~(lanes_of a) { return {$((T)~a.@)$}; }
"""
_ARITHMETIC = (
    "    INLINE friend lanes_of operator{sign}(lanes_of a, lanes_of b) {{ return {{$((T)(a.@ {sign} b.@))$}}; }}"
)
_COMPARISON = (
    "    INLINE friend lanes_of<i32> operator{sign}(lanes_of a, lanes_of b) {{ return {{$(-(a.@ {sign} b.@))$}}; }}"
)
_ASSIGNMENT = "    INLINE lanes_of &operator{sign}=(lanes_of b) {{ return *this = *this {sign} b; }}"

_HELPERS = """
/* at once where the elements lie so: a tensor may begin anywhere, and that is known only now */
template <class T> INLINE lanes_of<T> load_lanes(const T *place) {
    if ((u64)place % alignof(lanes_of<T>) == 0) return *(const lanes_of<T> *)place;
    return {$(place[#])$};
}
template <class T> INLINE void store_lanes(T *place, lanes_of<T> x) {
    if ((u64)place % alignof(lanes_of<T>) == 0) {
        *(lanes_of<T> *)place = x;
        return;
    }
    $(place[#] = x.@;)$ /* from the last on: else the compiler shares stores with the vector's, and splits that */
}
template <class T> INLINE lanes_of<T> choose(lanes_of<i32> mask, lanes_of<T> then, lanes_of<T> otherwise) {
    return {$(mask.@ ? then.@ : otherwise.@)$};
}
template <class To, class From> INLINE lanes_of<To> same_bits(lanes_of<From> x) {
    union { From from; To to; } of[W];
    $(of[#].from = x.@;)$
    return {$(of[#].to)$};
}
INLINE lanes_of<i64> counting(i64 first, i64 step) { return {$(first + # * step)$}; }
INLINE lanes_of<u32> mul_hi(lanes_of<u32> a, lanes_of<u32> b) { return {$(mul_hi_u32(a.@, b.@))$}; }
INLINE lanes_of<u64> mul_hi(lanes_of<u64> a, lanes_of<u64> b) { return {$(mul_hi_u64(a.@, b.@))$}; }
"""
_HALF = """
INLINE f32xW load_HALFxW(HALFxW bits) { return {$(load_HALF(bits.@))$}; }
INLINE HALFxW store_HALFxW(f32xW x) { return {$(store_HALF(x.@))$}; }
INLINE f32xW round_HALFxW(f32xW x) { return {$(round_HALF(x.@))$}; }
"""
_OF_FLOATS = """
INLINE KINDxW mad_KINDxW(KINDxW a, KINDxW b, KINDxW c) { return {$(mad_KIND(a.@, b.@, c.@))$}; }
INLINE KINDxW LDEXP(KINDxW x, i32xW exponent) { return {$(LDEXP(x.@, exponent.@))$}; }
"""
_COMBINED = {"sum": "({} + {})", "prod": "({} * {})", "or": "({} | {})", "and": "({} & {})"}
_EXTREMES = {"max": "({0} > {1} ? {0} : {1})", "min": "({0} < {1} ? {0} : {1})"}


class CudaVectors(Vectors):
    """Vectors as structures: what is done to one is done lane by lane.

    They are there for memory. A vector is read and written at once where it is aligned, and element by element where
    not; kernels have vectors only where all lines of their tensors begin alike.
    """

    even_lines = True
    half_arithmetic = PAIRED

    def preamble(self) -> str:
        """Return the structure, its operators and functions, and the names of its kinds."""
        lines = [HALVES_IN_HARDWARE.strip(), _STRUCTURE.strip()]
        lines += [_ARITHMETIC.format(sign=sign) for sign in ("+", "-", "*", "/", "&", "|", "^", "<<", ">>")]
        lines += [_COMPARISON.format(sign=sign) for sign in ("==", "!=", "<", "<=", ">", ">=")]
        lines += [_ASSIGNMENT.format(sign=sign) for sign in ("+", "*", "&", "|")]
        lines += ["};", _HELPERS.strip()]
        lines += [f"typedef lanes_of<{short}> {self.named(short)};" for short in self.language.types]
        lines += [_HALF.strip().replace("HALF", SHORT[half]) for half in sorted(HALVES)]
        lines.append(_PAIRS.strip())
        lines += [_of_pairs(primitive, SHORT[half]) for half in sorted(HALVES) for primitive in PAIRED]
        lines += [line for short, dtype in (("f32", "float32"), ("f64", "float64")) for line in self._of(short, dtype)]
        lines += self._over_lanes()
        lines += [f"#define convert_{self.named(short)}(x) (({self.named(short)})(x))" for short in ("u32", "u64")]
        return self._written("\n".join(lines)) + f"\n{vector_helpers(self.width)}\n"

    def _written(self, text: str) -> str:
        """Return a text with everything that is there for each lane."""

        def each(found: re.Match[str]) -> str:
            numbers = range(self.width)
            lanes = [found[1].replace("@", f"s{n}").replace("#", str(n)) for n in numbers]
            return " ".join(reversed(lanes)) if found[1].endswith(";") else ", ".join(lanes)

        return re.sub(r"\bW\b|(?<=x)W\b", str(self.width), re.sub(r"\$\((.*?)\)\$", each, text))

    def _of(self, short: str, dtype: str) -> Iterator[str]:
        """Yield the functions of vectors of floats."""
        yield _OF_FLOATS.strip().replace("KIND", short).replace("LDEXP", self.language.function("ldexp", dtype))
        kind = self.named(short)
        for primitive, function in FLOAT_FUNCTIONS.items():
            name, taken = self.language.function(function, dtype), "xyz"[: PRIMITIVES[primitive].arity]
            passed = ", ".join(f"{one}.@" for one in taken)
            head = f"INLINE {kind} {name}({', '.join(f'{kind} {one}' for one in taken)})"
            yield f"{head} {{ return {{$({name}({passed}))$}}; }}"

    def _over_lanes(self) -> Iterator[str]:
        """Yield the functions that put a vector's lanes together, halves with halves."""
        for short in self.language.types:
            names = dict(_EXTREMES) if short not in ("f16", "bf16", "b8") else {}
            names |= {name: _COMBINED[name] for name in ("sum", "prod") if short in ("f32", "f64", "i32", "i64")}
            names |= {name: _COMBINED[name] for name in ("or", "and") if short == "i32"}
            for name, combined in names.items():
                yield f"INLINE {short} {name}_lanes_{short}({self.named(short)} x) {{ {self._tree(combined, short)} }}"

    def _tree(self, combined: str, short: str) -> str:
        steps, names, width = [], [f"x.s{n}" for n in range(self.width)], self.width
        while width > 1:
            width //= 2
            pairs = [combined.format(names[n], names[n + width]) for n in range(width)]
            names = [f"{'abcd'[width.bit_length() - 1]}{n}" for n in range(width)]
            steps.append(f"const {short} {', '.join(f'{a} = {b}' for a, b in zip(names, pairs, strict=True))};")
        return " ".join([*steps, f"return {names[0]};"])

    # -- memory

    def load(self, dtype: str, address: str) -> str:
        """Return the values of neighbouring elements, given the address of the first one."""
        loaded = self.read(address)
        if dtype in HALVES:
            return f"load_{self.named(SHORT[dtype])}({loaded})"
        return f"({loaded} != 0)" if dtype == "bool" else loaded

    def store(self, dtype: str, address: str, values: str) -> str:
        """Return the statement that writes values to neighbouring elements."""
        if dtype in HALVES:
            values = f"store_{self.named(SHORT[dtype])}({bare(values)})"
        elif dtype == "bool":
            values = self.convert(f"(-{values})", "i32", "b8")
        return self.write(address, values)

    def read(self, address: str) -> str:
        """Return neighbouring elements as they are in memory, given the address of the first one."""
        return f"load_lanes({address})"

    def write(self, address: str, elements: str) -> str:
        """Return the statement that writes neighbouring elements, given as they are to be in memory."""
        return f"store_lanes({address}, {bare(elements)});"

    # -- values

    def counting(self, first: str, step: str) -> str:
        """Return a vector of int64 numbers from a first one on, each a step greater than the one before."""
        return f"counting({bare(first)}, {step})"

    def convert(self, vector: str, source: str, target: str) -> str:
        """Return a vector with elements of another type, given as short names."""
        same = self.names[source] == self.names[target]
        return vector if same else f"({self.named(target)})({bare(vector)})"

    def mask(self, compared: str, dtype: str) -> str:
        """Return a mask of 32 bits, which every comparison gives."""
        return compared

    def choose(self, mask: str, then: str, otherwise: str, dtype: str) -> str:
        """Return, of vectors, the lanes of one where a mask holds, else those of another."""
        return f"choose({bare(mask)}, {bare(then)}, {bare(otherwise)})"

    def bitcast(self, vector: str, target: str) -> str:
        """Return the bits of a vector as elements of another type of the same size."""
        return f"same_bits<{SHORT[target]}>({bare(vector)})"
