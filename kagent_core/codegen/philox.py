"""Philox4x32-10 as text: the counter-based generator that random numbers on devices come from.

J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC '11,
https://doi.org/10.1145/2063384.2063405: ten rounds of multiplications turn a counter of four 32-bit words and a key of
two into four words. There is no state, so that every element draws its numbers by itself, wherever it is computed.
"""

from __future__ import annotations

_HELPERS = r"""
/* Philox4x32-10 (Salmon and others, SC '11): counter and stream, two words each, become four words */
#define PHILOX_ROUND(U32)                                                                                     \
    p = HIGH(c2, 0xcd9e8d57u) ^ c1 ^ k0; q = HIGH(c0, 0xd2511f53u) ^ c3 ^ k1;                                  \
    c1 = c2 * 0xcd9e8d57u; c3 = c0 * 0xd2511f53u; c0 = p; c2 = q; k0 += 0x9e3779b9u; k1 += 0xbb67ae85u;
INLINE U64 philox_U64(U64 counter, U64 stream, U64 key, i32 upper) {
    U32 c0 = NARROW(counter), c1 = NARROW(counter >> 32), c2 = NARROW(stream), c3 = NARROW(stream >> 32);
    U32 k0 = NARROW(key), k1 = NARROW(key >> 32), p, q;
    PHILOX_ROUND(U32) PHILOX_ROUND(U32) PHILOX_ROUND(U32) PHILOX_ROUND(U32) PHILOX_ROUND(U32)
    PHILOX_ROUND(U32) PHILOX_ROUND(U32) PHILOX_ROUND(U32) PHILOX_ROUND(U32) PHILOX_ROUND(U32)
    return upper ? WIDE(c2) | (WIDE(c3) << 32) : WIDE(c0) | (WIDE(c1) << 32);
}
#undef PHILOX_ROUND
INLINE U64 philox_low_U64(U64 counter, U64 stream, U64 key) { return philox_U64(counter, stream, key, 0); }
INLINE U64 philox_high_U64(U64 counter, U64 stream, U64 key) { return philox_U64(counter, stream, key, 1); }
"""

_MUL_HI = r"""
/* the upper half of a product, of 32-bit pieces: not every language has a wider type */
INLINE u32 mul_hi_u32(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
INLINE u64 mul_hi_u64(u64 a, u64 b) {
    u64 low = (a & 0xffffffffu) * (b & 0xffffffffu), left = (a >> 32) * (b & 0xffffffffu) + (low >> 32);
    u64 right = (a & 0xffffffffu) * (b >> 32) + (left & 0xffffffffu);
    return (a >> 32) * (b >> 32) + (left >> 32) + (right >> 32);
}
"""


def _written(u32: str, u64: str, high: str, narrow: str, wide: str) -> str:
    text = _HELPERS.replace("PHILOX_ROUND(U32)", "PHILOX_ROUND").replace("U32", u32).replace("U64", u64)
    return text.replace("HIGH(", f"{high}(").replace("NARROW(", f"{narrow}(").replace("WIDE(", f"{wide}(")


SCALAR_HELPERS = _MUL_HI + _written("u32", "u64", "mul_hi_u32", "(u32)", "(u64)")
"""What the preamble of every C-family language has."""


def vector_helpers(width: int) -> str:
    """Return the same for vectors of a width, in OpenCL C. Its own ``mul_hi`` takes five times as long on PoCL."""
    u32, u64 = f"u32x{width}", f"u64x{width}"
    product = f"(convert_{u64}(a) * (u64)b) >> 32"
    high = f"INLINE {u32} mul_hi_{u32}({u32} a, u32 b) {{ return convert_{u32}({product}); }}"
    return high + _written(u32, u64, f"mul_hi_{u32}", f"convert_{u32}", f"convert_{u64}").rstrip()
