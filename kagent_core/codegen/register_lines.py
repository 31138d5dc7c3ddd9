"""Sums of some places that a CPU keeps in its vector registers, as C functions.

How many places, taps, and the stride are constants of a function. Columns of the source that are outside are passed
over. In depthwise convolutions the taps are in registers, too, and what is read is read once for all places that it is
part of; of planes, places and taps are at constant distances. Where a matrix has few columns, one tile covers them all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kagent_core.codegen.register_tiles import Tile

_TEXT = r"""
/* sums of some places of a line that stay in vector registers; columns from first to past - 1 are inside */
#ifdef __clang__
#define LINE_FUNCTION static __attribute__((noinline, unused)) void
#define LINE_CONTRACT _Pragma("clang fp contract(fast)")
#else
#define LINE_FUNCTION static __attribute__((noinline, unused, optimize("fp-contract=fast"))) void
#define LINE_CONTRACT
#endif
#define EACH_OF(n, count) _Pragma("GCC unroll 64") for (i32 n = 0; n < count; n++)
#define DEFINE_CHANNELS(L) typedef f32 channels_##L __attribute__((vector_size(L * 4), aligned(4), may_alias));
#define IS_INSIDE(c, R, T, S) ((c >= T - 1 || c >= first) && (c <= (R - 1) * S || c < past))
#define IN_WINDOW(c, r, T, S) (c >= r * S && c < r * S + T)
#define DEFINE_LINE(R, T, S, L)                                                                                    \
    LINE_FUNCTION line_##R##_##T##_##S##_##L(const f32 *x, i64 lines, i64 x_line, i64 x_tap, i64 first, i64 past,  \
                                             const f32 *weight, i64 w_line, i64 w_tap, f32 *made) {                \
        LINE_CONTRACT                                                                                              \
        channels_##L sum[R];                                                                                       \
        EACH_OF(r, R) sum[r] = (channels_##L){0};                                                                  \
        for (i64 h = 0; h < lines; h++, x += x_line, weight += w_line) {                                           \
            const f32 *from = x;                                                                                   \
            channels_##L factor[T];                                                                                \
            EACH_OF(t, T) factor[t] = *(const channels_##L *)(weight + t * w_tap);                                 \
            EACH_OF(c, (R - 1) * S + T) {                                                                          \
                if (IS_INSIDE(c, R, T, S)) {                                                                       \
                    channels_##L value = *(const channels_##L *)from;                                              \
                    EACH_OF(r, R) if (IN_WINDOW(c, r, T, S)) sum[r] += value * factor[c - r * S];                  \
                }                                                                                                  \
                from += x_tap;                                                                                     \
            }                                                                                                      \
        }                                                                                                          \
        EACH_OF(r, R) *(channels_##L *)(made + r * L) = sum[r];                                                    \
    }
/* each tap of each plane, times some vectors of channels */
#define DEFINE_PLANES(R, B, T, S, L)                                                                               \
    LINE_FUNCTION planes_##R##_##B##_##T##_##S##_##L(                                                              \
        const f32 *x, i64 lines, i64 x_line, i64 planes, i64 x_plane, i64 first, i64 past, const f32 *weight,      \
        i64 w_line, i64 w_plane, i64 w_tap, f32 *made) {                                                           \
        LINE_CONTRACT                                                                                              \
        channels_##L sum[R][B];                                                                                    \
        EACH_OF(r, R) EACH_OF(b, B) sum[r][b] = (channels_##L){0};                                                 \
        for (i64 h = 0; h < lines; h++) for (i64 p = 0; p < planes; p++) {                                         \
            const f32 *from = x + h * x_line + p * x_plane, *w = weight + h * w_line + p * w_plane;                \
            /* what windows of the next lines read: the planes' lines are too short for a processor to notice */   \
            for (i64 c = 0; c < (R - 1) * S + T; c += 16) __builtin_prefetch(from + lines * x_line + c);           \
            EACH_OF(t, T) {                                                                                        \
                __asm__ volatile("" ::: "memory"); /* loads of the next taps would take registers */              \
                channels_##L factor[B];                                                                            \
                EACH_OF(b, B) factor[b] = *(const channels_##L *)(w + t * w_tap + b * L);                          \
                EACH_OF(r, R) if (IS_INSIDE((r * S + t), R, T, S))                                                 \
                    EACH_OF(b, B) sum[r][b] += from[r * S + t] * factor[b];                                        \
            }                                                                                                      \
        }                                                                                                          \
        EACH_OF(r, R) EACH_OF(b, B) *(channels_##L *)(made + (r * B + b) * L) = sum[r][b];                         \
    }
/* rows of numbers times a matrix, whose last vector of columns overlaps the one before, in what is made as well */
#define AT_VECTOR(b, B, L) (b < B - 1 ? b * L : width - L)
#define DEFINE_COVER(R, B, L)                                                                                      \
    LINE_FUNCTION cover_##R##_##B##_##L(const f32 *x, i64 step, i64 depth, const f32 *w, i64 w_step, i64 width,    \
                                        f32 *made) {                                                               \
        LINE_CONTRACT                                                                                              \
        channels_##L sum[R][B];                                                                                    \
        EACH_OF(r, R) EACH_OF(b, B) sum[r][b] = (channels_##L){0};                                                 \
        for (i64 d = 0; d < depth; d++, x++, w += w_step) {                                                        \
            channels_##L factor[B];                                                                                \
            EACH_OF(b, B) factor[b] = *(const channels_##L *)(w + AT_VECTOR(b, B, L));                             \
            EACH_OF(r, R) EACH_OF(b, B) sum[r][b] += x[r * step] * factor[b];                                      \
        }                                                                                                          \
        EACH_OF(r, R) EACH_OF(b, B) *(channels_##L *)(made + r * width + AT_VECTOR(b, B, L)) = sum[r][b];          \
    }
/* rows of numbers that lie in pairs, times a matrix that has each of its numbers twice: of an odd number of half
   vectors of columns, two rows are whole vectors, in whose lanes they take turns */
#define DEFINE_PAIRS(P, B)                                                                                         \
    typedef f64 two_rows_##P##_##B __attribute__((vector_size(64), may_alias));                                    \
    typedef f32 one_row_##P##_##B __attribute__((vector_size(32), aligned(4), may_alias));                         \
    LINE_FUNCTION pairs_##P##_##B(const f32 *x, i64 step, i64 depth, const f32 *w, f32 *made) {                    \
        LINE_CONTRACT                                                                                              \
        channels_16 sum[P][B];                                                                                     \
        EACH_OF(p, P) EACH_OF(b, B) sum[p][b] = (channels_16){0};                                                  \
        for (i64 d = 0; d < depth; d++, x += 2, w += B * 16) {                                                     \
            channels_16 factor[B];                                                                                 \
            EACH_OF(b, B) { factor[b] = *(const channels_16 *)(w + b * 16); KEEP_FACTOR(factor[b]); }              \
            EACH_OF(p, P) {                                                                                        \
                f64 bits;                                                                                          \
                __builtin_memcpy(&bits, x + p * step, 8);                                                          \
                channels_16 value = (channels_16)(two_rows_##P##_##B){bits, bits, bits, bits, bits, bits, bits, bits}; \
                EACH_OF(b, B) sum[p][b] += value * factor[b];                                                      \
            }                                                                                                      \
        }                                                                                                          \
        EACH_OF(p, P) EACH_OF(b, B) {                                                                              \
            one_row_##P##_##B *const to = (one_row_##P##_##B *)(made + p * B * 16 + b * 8);                        \
            channels_16 each = sum[p][b];                                                                          \
            *to = __builtin_shufflevector(each, each, 0, 2, 4, 6, 8, 10, 12, 14);                                  \
            to[B] = __builtin_shufflevector(each, each, 1, 3, 5, 7, 9, 11, 13, 15);                                \
        }                                                                                                          \
    }
#ifdef __x86_64__
#define KEEP_FACTOR(x) __asm__("" : "+v"(x)) /* else gcc loads it with each product */
#else
#define KEEP_FACTOR(x)
#endif
/* some vectors of channels, added to their sums; and sums of many, in float64. Of loops over numbers, compilers make
   some that add one after the other */
#define ADDING_FUNCTION static inline __attribute__((unused)) void
#define DEFINE_ADDED(L)                                                                                            \
    ADDING_FUNCTION added_##L(const f32 *made, i64 step, i64 first, i64 end, f32 *sums) {                          \
        channels_##L sum = {0};                                                                                    \
        for (i64 r = first; r < end; r++) sum += *(const channels_##L *)(made + r * step);                         \
        *(channels_##L *)sums += sum;                                                                              \
    }
#define DEFINE_TOTAL(L)                                                                                            \
    typedef f64 total_of_##L __attribute__((vector_size(L * 8)));                                                  \
    ADDING_FUNCTION total_##L(const f32 *sums, i64 step, i64 count, f64 share, f32 *made) {                        \
        total_of_##L sum = {0};                                                                                    \
        for (i64 r = 0; r < count; r++)                                                                            \
            sum += __builtin_convertvector(*(const channels_##L *)(sums + r * step), total_of_##L);                \
        *(channels_##L *)made = __builtin_convertvector(sum * share, channels_##L);                                \
    }
"""

_PLACES = (14, 10, 8, 7, 5, 4, 3, 2, 1)
"""How many places a function may compute: lines of 7, 14, 28, and of a power of two, are whole numbers of some."""

_COVERING = {32: {2: (14, 7, 3, 1), 3: (8, 7, 3, 1), 4: (6, 3, 1)}, 16: {2: (6, 3, 1), 3: (4, 1)}}
"""Rows of the tiles that cover all columns, by registers and by their vectors."""

_PAIRED = 16
"""Values of a vector of which two rows share some."""

_LEAST_VECTORS, _LATENCY = 3, 8
"""Vectors of a pair of rows, with fewer of which numbers are loaded for too little; and sums that must be computed with
at once, since one depends on the one before."""

_CALL = 0.5
"""What a call of such a function takes beside its pairs, in pairs."""

_PAYS = 0.95
"""Share of what is computed otherwise, above which pairs do not pay: what is made must be put in order."""

_START = 3
"""What a call of a function takes beside its places, in places: the weights are loaded, and columns twice."""

_WIDEST = 2
"""Greatest stride: beyond it, hardly a column is part of two windows."""


@dataclass(frozen=True)
class LineTile:
    """Some places of a line, of a vector of channels each.

    Attributes
    ----------
    places
        How many.
    taps, stride
        Of a window, along the line.
    lanes
        Channels.
    """

    places: int
    taps: int
    stride: int
    lanes: int

    @property
    def function(self) -> str:
        """The name of what computes it."""
        return f"line_{self.places}_{self.taps}_{self.stride}_{self.lanes}"


def line_tile(lanes: int, registers: int, length: int, taps: int, stride: int) -> LineTile | None:
    """Return the tile that suits a line, or None where none has its sums and weights in registers.

    Parameters
    ----------
    lanes
        Channels of a vector.
    registers
        How many vectors a CPU has registers for; one is for what is read.
    length
        Places of a line.
    taps, stride
        Of a window, along the line.
    """
    fitting = [n for n in _PLACES if n <= length and n + taps < registers]
    if not fitting or stride > _WIDEST:
        return None
    places = min(fitting, key=lambda n: -(-length // n) * (n + _START))
    return LineTile(places, taps, stride, lanes)


def covering_tile(lanes: int, registers: int, rows: int, columns: int) -> Tile | None:
    """Return the tile that has all columns of some rows, where those are no whole number of vectors; else None.

    Its last vector overlaps the one before. Of several tiles, which would overlap too, each would have so few vectors
    that numbers are loaded for little.
    """
    vectors = -(-columns // lanes)
    heights = _COVERING[32 if registers >= 32 else 16].get(vectors, ())
    fitting = [Tile(height, vectors, lanes) for height in heights if height <= rows]
    if columns % lanes == 0 or not fitting:
        return None
    return min(fitting, key=lambda tile: (tile.time(rows, columns), -tile.rows))


def pairs_of_rows(lanes: int, registers: int, rows: int, columns: int) -> tuple[int, int] | None:
    """Return how many pairs of rows a tile has that covers an odd number of half vectors of columns, and its vectors.

    Returns
    -------
    tuple or None
        None where there is no such tile, or it computes no less than others do.
    """
    vectors = 2 * columns // lanes
    if lanes != _PAIRED or registers < 2 * _PAIRED or columns % lanes != lanes // 2 or rows % 2:
        return None
    fitting = [n for n in range(_LATENCY // vectors + 1, rows // 2 + 1) if n * vectors + vectors + 1 < registers]
    if vectors < _LEAST_VECTORS or not fitting:
        return None
    pairs = min(fitting, key=lambda n: -(-rows // (2 * n)) * (n + _CALL))
    whole = -(-columns // lanes) * rows
    return (pairs, vectors) if -(-rows // (2 * pairs)) * pairs * vectors < _PAYS * whole else None


def line_functions(text: str) -> str:
    """Return the functions that a text calls."""
    names = r"\b(line_\d+_\d+_\d+_\d+|planes_\d+_\d+_\d+_\d+_\d+|cover_\d+_\d+_\d+|pairs_\d+_\d+|added_\d+|total_\d+)\("
    found = sorted(set(re.findall(names, text)))
    if not found:
        return ""
    called = [name.split("_") for name in found]
    vectors = {str(_PAIRED) if kind == "pairs" else sizes[-1] for kind, *sizes in called}
    lines = [f"DEFINE_CHANNELS({lanes})" for lanes in sorted(vectors)]
    lines += [f"DEFINE_{kind.upper()}({', '.join(sizes)})" for kind, *sizes in called]
    return "\n".join([_TEXT.strip(), *lines, ""])
