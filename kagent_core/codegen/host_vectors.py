"""Vectors as gcc and clang have them in C: what sums are kept in where loops alone would leave them in memory."""

from __future__ import annotations

from dataclasses import dataclass

from kagent_core.codegen.dtypes import NBITS

EXPONENTIAL = r"""
/* exp(x) is 2**n times exp(r): r is x without n * ln(2), which is taken off in two parts, and exp(r) a polynomial. MAD
   multiplies and adds, and OF makes an operand of a number; nothing where it is one already. */
#define LOG2_E 1.44269504f
#define EXP_REST(MAD, OF, x, n) MAD(n, OF(-1.42860677e-6f), MAD(n, OF(-0.693145752f), x))
#define EXP_OF_REST(MAD, OF, r)                                                                                    \
    MAD(r, MAD(r, MAD(r, MAD(r, MAD(r, MAD(r, OF(0.0013814467f), OF(0.0083687808f)), OF(0.041668393f)),            \
        OF(0.1666652f)), OF(0.49999994f)), OF(1.0f)), OF(1.0f))
"""
"""What functions of C that compute exponentials of float32 are made of, those of `HostVectors.preamble` among them."""

_TEXT = r"""
/* vectors, for sums that must stay in registers: loops over arrays leave them in memory */
typedef f32 vec_f32 __attribute__((vector_size(NBYTES)));
typedef f64 vec_f64 __attribute__((vector_size(NBYTES)));
typedef i32 vec_i32 __attribute__((vector_size(NBYTES)));
typedef i64 vec_i64 __attribute__((vector_size(NBYTES)));
#define DEFINE_VECTOR(T, I)                                                                                        \
    typedef T part_##T __attribute__((vector_size(NBYTES), aligned(sizeof(T)), may_alias));                        \
    enum { lanes_##T = NBYTES / sizeof(T) };                                                                       \
    INLINE vec_##T load_vec_##T(const T *from) { return *(const part_##T *)from; }                                 \
    INLINE void store_vec_##T(T *to, vec_##T x) { *(part_##T *)to = x; }                                           \
    INLINE vec_##T splat_##T(T x) { return x - (vec_##T){0}; }                                                     \
    INLINE vec_##T choose_vec_##T(vec_##I mask, vec_##T then, vec_##T other) {                                     \
        return (vec_##T)(((vec_##I)then & mask) | ((vec_##I)other & ~mask));                                       \
    }                                                                                                              \
    /* -infinity in the first lanes */                                                                             \
    INLINE vec_##T hide_vec_##T(vec_##T x, i64 count) {                                                            \
        vec_##I lane;                                                                                              \
        for (i32 n = 0; n < lanes_##T; n++) lane[n] = n;                                                           \
        I first = (I)(count < 0 ? 0 : count > lanes_##T ? lanes_##T : count);                                      \
        return choose_vec_##T(lane < first, splat_##T(-INFINITY), x);                                              \
    }
DEFINE_VECTOR(f32, i32) DEFINE_VECTOR(f64, i64)
#if defined(__AVX512F__) && NBYTES == 64 && defined(__GNUC__) && !defined(__clang__)
INLINE vec_f32 mad_vec_f32(vec_f32 a, vec_f32 b, vec_f32 c) {
    return __builtin_ia32_vfmaddps512_mask(a, b, c, (u16)-1, 4);
}
INLINE vec_f64 mad_vec_f64(vec_f64 a, vec_f64 b, vec_f64 c) {
    return __builtin_ia32_vfmaddpd512_mask(a, b, c, (u8)-1, 4);
}
INLINE vec_f32 max_vec_f32(vec_f32 a, vec_f32 b) { return __builtin_ia32_maxps512_mask(a, b, b, (u16)-1, 4); }
INLINE vec_f64 max_vec_f64(vec_f64 a, vec_f64 b) { return __builtin_ia32_maxpd512_mask(a, b, b, (u8)-1, 4); }
/* exp_f32 of what is not above 0: the power of 2 in one step */
INLINE vec_f32 exp_vec_f32(vec_f32 x) {
    vec_f32 c = max_vec_f32(splat_f32(-104.0f), x);
    vec_f32 n = __builtin_ia32_rndscaleps_mask(c * LOG2_E, 0, c, (u16)-1, 4);
    vec_f32 r = EXP_REST(mad_vec_f32, splat_f32, c, n), p = EXP_OF_REST(mad_vec_f32, splat_f32, r);
    return __builtin_ia32_scalefps512_mask(p, n, p, (u16)-1, 4);
}
#else
#if defined(__FMA__) && NBYTES == 32 && defined(__GNUC__) && !defined(__clang__)
INLINE vec_f32 mad_vec_f32(vec_f32 a, vec_f32 b, vec_f32 c) { return __builtin_ia32_vfmaddps256(a, b, c); }
INLINE vec_f64 mad_vec_f64(vec_f64 a, vec_f64 b, vec_f64 c) { return __builtin_ia32_vfmaddpd256(a, b, c); }
INLINE vec_f32 max_vec_f32(vec_f32 a, vec_f32 b) { return __builtin_ia32_maxps256(a, b); }
INLINE vec_f64 max_vec_f64(vec_f64 a, vec_f64 b) { return __builtin_ia32_maxpd256(a, b); }
#else
#define DEFINE_BY_LANE(T)                                                                                          \
    INLINE vec_##T mad_vec_##T(vec_##T a, vec_##T b, vec_##T c) {                                                  \
        for (i32 n = 0; n < lanes_##T; n++) c[n] = mad_##T(a[n], b[n], c[n]);                                      \
        return c;                                                                                                  \
    }                                                                                                              \
    INLINE vec_##T max_vec_##T(vec_##T a, vec_##T b) { return choose_vec_##T(a > b, a, b); }
DEFINE_BY_LANE(f32) DEFINE_BY_LANE(f64)
#endif
INLINE vec_f32 exp_vec_f32(vec_f32 x) {
    f32 lane[lanes_f32];
    store_vec_f32(lane, x);
    #pragma omp simd
    for (i32 n = 0; n < lanes_f32; n++) lane[n] = exp_f32(lane[n]);
    return load_vec_f32(lane);
}
#endif
INLINE vec_f64 exp_vec_f64(vec_f64 x) {
    f64 lane[lanes_f64];
    store_vec_f64(lane, x);
    #pragma omp simd
    for (i32 n = 0; n < lanes_f64; n++) lane[n] = exp(lane[n]);
    return load_vec_f64(lane);
}
"""


@dataclass(frozen=True)
class HostVectors:
    """How C spells the vectors of a CPU.

    Attributes
    ----------
    nbytes
        Of a vector, as of a register.
    registers
        How many there are.
    """

    nbytes: int
    registers: int = 32

    def lanes(self, dtype: str) -> int:
        """Return how many values of a type of floats a vector has."""
        return self.nbytes * 8 // NBITS[dtype]

    def preamble(self) -> str:
        """Return what C text with such vectors needs, below `EXPONENTIAL`: types, and functions of ``f32`` and ``f64``.

        ``load_vec_f32``, ``store_vec_f32``, ``splat_f32``, ``mad_vec_f32``, ``choose_vec_f32``; ``max_vec_f32``, which
        takes the second of two values where one is NaN; ``exp_vec_f32``, of what is not above 0; and ``hide_vec_f32``,
        which puts -infinity into the first lanes.
        """
        return _TEXT.strip().replace("NBYTES", str(self.nbytes))
