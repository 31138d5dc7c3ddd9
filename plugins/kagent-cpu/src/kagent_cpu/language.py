"""C as kagent-cpu writes it: the vocabulary of generated kernels, and vector math where the C library has it."""

from __future__ import annotations

import ctypes
import functools
import re
import struct

from kagent_core.codegen.c_family import PREAMBLE_HELPERS, CFamily, is_plain_number
from kagent_core.codegen.dtypes import compute_dtype
from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.host_vectors import EXPONENTIAL, HostVectors
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.codegen.text import bare
from kagent_core.native.machine import vector_nbytes, vector_registers

_UNARY = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc"),
)
_BINARY = ("pow", "atan2", "hypot")
_SCALAR_UNARY = ("lgamma", "tgamma", "sqrt", "fabs", "floor", "ceil", "trunc", "rint")
_SCALAR_BINARY = ("fmod", "fmin", "fmax", "copysign", "nextafter")

_TYPES = r"""
typedef signed char i8; typedef short i16; typedef int i32; typedef long i64;
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long u64;
typedef unsigned char b8; typedef float f32; typedef double f64; typedef unsigned short f16, bf16;
#define INLINE static inline __attribute__((always_inline, unused))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define DEFINE_BITS(A, B) INLINE B bits_##A##_##B(A x) { B y; __builtin_memcpy(&y, &x, sizeof y); return y; }
DEFINE_BITS(f32, i32) DEFINE_BITS(i32, f32) DEFINE_BITS(f64, i64) DEFINE_BITS(i64, f64)
DEFINE_BITS(u32, f32) DEFINE_BITS(f32, u32)
INLINE f32 bits_f32(u32 x) { return bits_u32_f32(x); }
INLINE u32 f32_bits(f32 x) { return bits_f32_u32(x); }
"""

_FUNCTIONS = r"""
/* erf as a quotient of polynomials in x * x, good to 3 units in the last place: a quarter of the C library's time */
INLINE f32 erf_f32(f32 x) {
    f32 t = x * x;
    f32 p = fmaf(t, 2.0459649e-06f, 0.00028483616f), q = fmaf(t, 3.8046739e-05f, 0.0011638279f);
    p = fmaf(t, p, 0.0037724718f); q = fmaf(t, q, 0.014983052f);
    p = fmaf(t, p, 0.052769057f); q = fmaf(t, q, 0.11418219f);
    p = fmaf(t, p, 0.19059269f); q = fmaf(t, q, 0.50224113f);
    p = fmaf(t, p, 1.1283791f); q = fmaf(t, q, 1.0f);
    f32 y = x * p / q;
    return fabsf(x) > 3.92f ? copysignf(1.0f, x) : y; /* exactly 1: gelu multiplies the rest with large numbers */
}
/* exp as 2**n times a polynomial, the power of 2 in two steps, for subnormals. Added to 1.5 * 2**23, n is rounded, and
   lies in the lowest bits. A bound that is compared with as an integer costs no mask, and lets the NaN of c go on. */
INLINE f32 exp_f32(f32 x) {
    f32 c = x < -104.0f ? -104.0f : x;
    i32 bits = bits_f32_i32(fmaf(c, LOG2_E, 12582912.0f)), last = bits_f32_i32(12582912.0f + 129.0f);
    bits = bits < last ? bits : last;
    f32 n = bits_i32_f32(bits) - 12582912.0f;
    f32 r = EXP_REST(fmaf, , c, n), p = EXP_OF_REST(fmaf, , r);
    i32 k = bits - bits_f32_i32(12582912.0f), half = k >> 1;
    return p * bits_i32_f32((half + 127) << 23) * bits_i32_f32((k - half + 127) << 23);
}
/* 1 + exp(x), as sigmoid needs it: what is lost beside 1 may be 0, so that one step makes the power of 2 */
INLINE f32 one_plus_exp_f32(f32 x) {
    f32 c = x < -87.0f ? -87.0f : x;
    i32 bits = bits_f32_i32(fmaf(c, LOG2_E, 12582912.0f + 126.0f)), last = bits_f32_i32(12582912.0f + 254.0f);
    bits = bits < last ? bits : last;
    f32 n = bits_i32_f32(bits) - (12582912.0f + 126.0f);
    f32 r = EXP_REST(fmaf, , c, n), p = EXP_OF_REST(fmaf, , r);
    return fmaf(p + p, bits_i32_f32((i32)((u32)bits << 23)), 1.0f);
}
/* the greater or smaller one of x and a bound, or NaN: what a processor's own instructions give. Of a comparison with
   a number that gcc knows it makes an operation on masks and a choice by them instead, so it must not know it. */
INLINE f32 max_bound_f32(f32 x, f32 bound) { return x < bound ? bound : x; }
INLINE f32 min_bound_f32(f32 x, f32 bound) { return bound < x ? bound : x; }
#if defined(__x86_64__)
#define UNKNOWN(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define UNKNOWN(x) __asm__("" : "+w"(x))
#else
#define UNKNOWN(x) __asm__("" : "+m"(x))
#endif
/* a block of 32 by 32 elements of 4 bytes, whose rows are 33 elements apart, transposed in registers of 8 */
typedef f32 f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
INLINE void transpose_8x8(const f32 *from, f32 *to) {
    f32x8 r[8], a[8], b[8];
    for (i32 i = 0; i < 8; i++) r[i] = *(const f32x8 *)(from + i * 33);
    for (i32 i = 0; i < 8; i += 2) {
        a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (i32 i = 0; i < 8; i += 4) {
        for (i32 j = 0; j < 2; j++) {
            b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (i32 i = 0; i < 4; i++) {
        *(f32x8 *)(to + i * 32) = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(f32x8 *)(to + (i + 4) * 32) = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
INLINE void transpose_tile(const void *from, void *to) {
    for (i64 i = 0; i < 32; i += 8) for (i64 j = 0; j < 32; j += 8)
        transpose_8x8((const f32 *)from + i * 33 + j, (f32 *)to + j * 32 + i);
}
/* fmod by long division in float64, 29 bits of the quotient at a time: every step is exact, and most need one */
INLINE f32 fmod_f32(f32 a, f32 b) {
    f64 rest = fabs((f64)a), divisor = fabs((f64)b);
    if (!(rest < INFINITY) || !(divisor > 0)) return NAN;
    while (rest >= divisor) {
        f64 quotient = trunc(bits_i64_f64(bits_f64_i64(rest / divisor) & ~0xffffffL));
        rest -= quotient * divisor;
        if (rest < 0) rest += divisor;
    }
    return copysignf((f32)rest, a);
}
/* lgamma in float64: Stirling's series from 8 on, and what leads there from below and from the other side of 0 */
INLINE f32 lgamma_f32(f32 x) {
    f64 size = fabs((f64)x), low = size < 8 ? size : 1, y = size < 8 ? size + 8 : size, s = 1 / (y * y);
    f64 product = low * (low + 1) * (low + 2) * (low + 3) * (low + 4) * (low + 5) * (low + 6) * (low + 7);
    f64 series = (1. / 12 - s * (1. / 360 - s * (1. / 1260 - s * (1. / 1680 - s * (1. / 1188))))) / y;
    f64 below = log(product), found = (y - 0.5) * log(y) - y + 0.91893853320467274 + series;
    found = size < 8 ? found - below : found;
    f64 reflected = log(3.14159265358979324 / (size * fabs(sin(3.14159265358979324 * (size - floor(size)))))) - found;
    found = x < 0 ? reflected : found;
    found = x == 1 ? 0 : found;
    found = x == 2 ? 0 : found;
    return size == INFINITY ? INFINITY : (f32)found;
}
"""

_VECTORS = HostVectors(vector_nbytes(), vector_registers())
_REGISTER_TILES = RegisterTiles(vector_nbytes() // 4, vector_registers())
_BOUND = "bound_"
"""What the names of numbers begin with that values are compared with; their bits follow."""

_OWN_FUNCTIONS = {(name, "float32"): f"{name}_f32" for name in ("erf", "exp", "fmod", "lgamma")}


class CLanguage(CFamily):
    """C11 with GNU extensions."""

    host_vectors = _VECTORS
    register_tiles = _REGISTER_TILES

    def function(self, name: str, dtype: str) -> str:
        """Return C's name of a function, or that of a faster one of our own."""
        return _OWN_FUNCTIONS.get((name, dtype)) or super().function(name, dtype)

    def primitive(self, node: Expr, args: list[str]) -> str:
        """Return a primitive of some values."""
        if node.op in ("max", "min") and compute_dtype(node.dtype) == "float32" and is_plain_number(node.args[1]):
            bits = struct.pack(">f", node.args[1].payload).hex()
            return f"{node.op}_bound_f32({bare(args[0])}, {_BOUND}{bits})"
        if node.op == "add" and compute_dtype(node.dtype) == "float32":
            for number, other, text in zip(node.args, node.args[::-1], args[::-1], strict=True):
                is_one = number.op == "constant" and number.payload == 1
                if is_one and other.op == "exp" and text.startswith("exp_f32("):  # and nothing else uses it
                    return f"one_plus_{text}"
        return super().primitive(node, args)

    def finished(self, text: str) -> str:
        """Return a kernel's text with the bounds that it compares with, in front of all else that it does."""
        bounds = sorted(set(re.findall(rf"\b{_BOUND}([0-9a-f]{{8}})\b", text)))
        if not bounds:
            return text
        lines = []
        for bits in bounds:
            [number] = struct.unpack(">f", bytes.fromhex(bits))
            lines.append(f"    f32 {_BOUND}{bits} = {self.literal(number, 'float32')}; UNKNOWN({_BOUND}{bits});\n")
        head, brace, body = text.partition("{\n")
        return "".join([head, brace, *lines, body])

    def tile_transposer(self, itemsize: int) -> str | None:
        """Return the function that transposes a tile in registers: for elements of 4 bytes."""
        return "transpose_tile" if itemsize == 4 else None

    def preamble(self) -> str:
        """Return what every translation unit begins with. It includes no header: reading those takes longest."""
        return _preamble()


@functools.cache
def _preamble() -> str:
    declared = [*(_declaration(name, 1) for name in _UNARY + _SCALAR_UNARY)]
    declared += [_declaration(name, 2) for name in _BINARY + _SCALAR_BINARY]
    declared += ["f64 fma(f64, f64, f64); f32 fmaf(f32, f32, f32); f64 ldexp(f64, int); f32 ldexpf(f32, int);"]
    helpers = [text.strip() for text in (PREAMBLE_HELPERS, EXPONENTIAL, _FUNCTIONS)]
    return "\n".join([_TYPES.strip(), *declared, *helpers, _VECTORS.preamble(), ""])


def _declaration(name: str, arity: int) -> str:
    parts = []
    for kind, suffix in (("f64", ""), ("f32", "f")):
        vector = '__attribute__((simd("notinbranch"), const, nothrow)) ' if _has_vectors(name + suffix) else ""
        parts.append(f"{vector}{kind} {name}{suffix}({', '.join([kind] * arity)});")
    return " ".join(parts)


@functools.cache
def _vector_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libmvec.so.1")
    except OSError:
        return None


def _has_vectors(function: str) -> bool:
    """Whether glibc has the function for vectors (``libmvec``): then the compiler may call it in loops."""
    library = _vector_library()
    if library is None:
        return False
    operands = "vv" if function.rstrip("f") in _BINARY else "v"
    lanes = 4 if function.endswith("f") and function != "erf" else 2
    try:
        library[f"_ZGVbN{lanes}{operands}_{function}"]
    except AttributeError:
        return False
    return True
