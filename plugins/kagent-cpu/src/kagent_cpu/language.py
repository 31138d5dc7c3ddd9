"""C as kagent-cpu writes it: the vocabulary of generated kernels, and vector math where the C library has it."""

from __future__ import annotations

import ctypes
import functools

from kagent_core.codegen.c_family import PREAMBLE_HELPERS, CFamily

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


class CLanguage(CFamily):
    """C11 with GNU extensions."""

    def preamble(self) -> str:
        """Return what every translation unit begins with. It includes no header: reading those takes longest."""
        return _preamble()


@functools.cache
def _preamble() -> str:
    declared = [*(_declaration(name, 1) for name in _UNARY + _SCALAR_UNARY)]
    declared += [_declaration(name, 2) for name in _BINARY + _SCALAR_BINARY]
    declared += ["f64 fma(f64, f64, f64); f32 fmaf(f32, f32, f32); f64 ldexp(f64, int); f32 ldexpf(f32, int);"]
    return "\n".join([_TYPES.strip(), *declared, PREAMBLE_HELPERS.strip(), ""])


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
