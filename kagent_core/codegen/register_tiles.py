"""Sums that a CPU keeps in its vector registers: which tiles of them there are, and the C functions that compute them.

Loops over arrays leave such sums in memory. The functions are the same for every kernel of a unit, whatever is computed
with their results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["rows", "places", "sums"]

_TEXT = r"""
/* sums that stay in vector registers; only here may a product and a sum be contracted */
#ifdef __clang__
#define TILE_FUNCTION static __attribute__((noinline, unused)) void
#define TILE_CONTRACT _Pragma("clang fp contract(fast)")
#else
#define TILE_OPTIONS "fp-contract=fast", "no-predictive-commoning" /* which would keep numbers in place of sums */
#define TILE_FUNCTION static __attribute__((noinline, unused, optimize(TILE_OPTIONS))) void
#define TILE_CONTRACT
#endif
#define EACH(n, count) _Pragma("GCC unroll 32") for (i32 n = 0; n < count; n++)
#define DEFINE_LANES(L) typedef f32 lanes_##L __attribute__((vector_size(L * 4), aligned(4), may_alias));
#define SUM_TILE(R, B, L) lanes_##L sum[R][B]; EACH(r, R) EACH(b, B) sum[r][b] = (lanes_##L){0};
#define STORE_TILE(R, B, L) EACH(r, R) EACH(b, B) *(lanes_##L *)(made + (r * B + b) * L) = sum[r][b];
/* a vector that several products need is loaded once: left alone, gcc loads it with each of them where rows are few */
#ifdef __x86_64__
#define KEEP(x) __asm__("" : "+v"(x))
#else
#define KEEP(x)
#endif
#define LOAD_FACTORS(B, L)                                                                                         \
    lanes_##L factor[B];                                                                                           \
    EACH(b, B) { factor[b] = *(const lanes_##L *)(w + b * L); if (L > 2) KEEP(factor[b]); }
/* rows of numbers times a matrix: a number at a time, with neighbouring channels of the weight */
#define DEFINE_ROWS(R, B, L)                                                                                       \
    TILE_FUNCTION rows_##R##_##B##_##L(const f32 *x, i64 step, i64 lines, i64 x_line, i64 taps, i64 x_tap, i64 depth,\
                                       const f32 *weight, i64 w_line, i64 w_tap, i64 w_step, f32 *made) {           \
        TILE_CONTRACT                                                                                              \
        SUM_TILE(R, B, L)                                                                                          \
        for (i64 h = 0; h < lines; h++) for (i64 t = 0; t < taps; t++) {                                           \
            const f32 *from = x + h * x_line + t * x_tap, *w = weight + h * w_line + t * w_tap;                    \
            for (i64 d = 0; d < depth; d++, from++, w += w_step) {                                                 \
                LOAD_FACTORS(B, L)                                                                                 \
                EACH(r, R) EACH(b, B) sum[r][b] += from[r * step] * factor[b];                                     \
            }                                                                                                      \
        }                                                                                                          \
        STORE_TILE(R, B, L)                                                                                        \
    }
/* rows times a matrix, like those above, added to what was made if `more` is not 0; S is the step, or 0 for any. Of
   what is needed next, P numbers are fetched at a time: weights come from far away, and would be waited for */
#define DEFINE_SUMS(R, B, L, S, P)                                                                                 \
    TILE_FUNCTION sums_##R##_##B##_##L##_##S##_##P(const f32 *x, i64 any, i64 lines, i64 x_line, i64 taps,         \
                                                   i64 x_tap, i64 depth, const f32 *weight, i64 w_line, i64 w_tap, \
                                                   i64 w_step, f32 *made, i32 more, const f32 **next) {            \
        TILE_CONTRACT                                                                                              \
        const i64 step = S ? S : any;                                                                              \
        const f32 *ahead = P ? *next : 0;                                                                          \
        SUM_TILE(R, B, L)                                                                                          \
        if (more) EACH(r, R) EACH(b, B) sum[r][b] = *(lanes_##L *)(made + (r * B + b) * L);                        \
        for (i64 h = 0; h < lines; h++) for (i64 t = 0; t < taps; t++) {                                           \
            const f32 *from = x + h * x_line + t * x_tap, *w = weight + h * w_line + t * w_tap;                    \
            for (i64 d = 0; d < depth; d++, from++, w += w_step) {                                                 \
                if (P) { __builtin_prefetch(ahead, 0, 2); ahead += P; }                                            \
                LOAD_FACTORS(B, L)                                                                                 \
                EACH(r, R) EACH(b, B) sum[r][b] += from[r * step] * factor[b];                                     \
            }                                                                                                      \
        }                                                                                                          \
        if (P) *next = ahead;                                                                                      \
        STORE_TILE(R, B, L)                                                                                        \
    }
/* rows times a panel, whose numbers are read one after the other; P vectors of what is needed next are fetched at a
   time, to where prefetches of locality N put them: weights come from far away, and would be waited for */
#define DEFINE_PANEL(R, B, L, P, N)                                                                                \
    TILE_FUNCTION panel_##R##_##B##_##L##_##P##_##N(const f32 *x, i64 x_row, i64 x_step, i64 depth, const f32 *w,  \
                                                    i64 w_step, const f32 *ahead, f32 *made, i64 pitch) {          \
        TILE_CONTRACT                                                                                              \
        SUM_TILE(R, B, L)                                                                                          \
        for (i64 d = 0; d < depth; d++, x += x_step, w += w_step, ahead += w_step) {                               \
            EACH(p, P) __builtin_prefetch(ahead + p * L, 0, N);                                                    \
            LOAD_FACTORS(B, L)                                                                                     \
            EACH(r, R) EACH(b, B) sum[r][b] += x[r * x_row] * factor[b];                                           \
        }                                                                                                          \
        EACH(r, R) EACH(b, B) *(lanes_##L *)(made + r * pitch + b * L) = sum[r][b];                                \
    }
/* channels times a weight each: neighbouring channels at a time */
#define DEFINE_PLACES(R, B, L)                                                                                     \
    TILE_FUNCTION places_##R##_##B##_##L(const f32 *x, i64 step, i64 lines, i64 x_line, i64 taps, i64 x_tap,       \
                                         const f32 *weight, i64 w_line, i64 w_tap, f32 *made) {                    \
        TILE_CONTRACT                                                                                              \
        SUM_TILE(R, B, L)                                                                                          \
        for (i64 h = 0; h < lines; h++) {                                                                          \
            const f32 *from = x + h * x_line, *w = weight + h * w_line;                                            \
            for (i64 t = 0; t < taps; t++, from += x_tap, w += w_tap) {                                            \
                LOAD_FACTORS(B, L)                                                                                 \
                EACH(r, R) EACH(b, B) sum[r][b] += *(const lanes_##L *)(from + r * step + b * L) * factor[b];      \
            }                                                                                                      \
        }                                                                                                          \
        STORE_TILE(R, B, L)                                                                                        \
    }
"""

_Sizes = tuple[tuple[int, int], ...]

_MANY: dict[Kind, _Sizes] = {
    "rows": ((6, 4), (3, 4), (1, 4), (8, 3), (7, 3), (1, 3), (14, 2), (7, 2), (1, 2), (14, 1), (7, 1), (1, 1)),
    "places": ((14, 1), (7, 1), (1, 1), (7, 2), (1, 2), (3, 4), (1, 4)),
}
"""Rows and vectors of the tiles for 32 registers, which also hold a row's vectors of the weight and one of numbers."""

_FEW: dict[Kind, _Sizes] = {
    "rows": ((4, 3), (1, 3), (6, 2), (3, 2), (1, 2), (12, 1), (7, 1), (1, 1)),
    "places": ((12, 1), (7, 1), (1, 1), (3, 2), (1, 2)),
}
"""The same for 16 registers."""

_NARROW: _Sizes = ((7, 1), (1, 1))
"""The same where there are fewer columns than a vector has values."""

_LATENCY = 8
"""Sums that must be computed with at once, since one depends on the one before: two at a time, four cycles each."""

_ALONE = 0.8
"""What a tile of one vector to a row reaches: it loads a number for every product."""


@dataclass(frozen=True)
class Tile:
    """Rows of a register tile, and vectors of each of them.

    Attributes
    ----------
    rows, vectors, lanes
        Its size; a vector has so many values.
    """

    rows: int
    vectors: int
    lanes: int

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.vectors * self.lanes

    def function(self, kind: Kind, rows: int | None = None) -> str:
        """Return the name of what computes it, or as many other rows."""
        return f"{kind}_{self.rows if rows is None else rows}_{self.vectors}_{self.lanes}"

    def time(self, rows: int, columns: int, single: int = 0) -> float:
        """Return roughly how long some rows and columns take, tile by tile, and some rows that are computed singly."""
        steps = -(-columns // self.width) * self.vectors
        whole = -(-rows // self.rows) * self.rows / self._speed(self.rows)
        return steps * (whole + single / self._speed(1))

    def _speed(self, rows: int) -> float:
        return min(rows * self.vectors / _LATENCY, 1.0) * (_ALONE if self.vectors == 1 else 1.0)


@dataclass(frozen=True)
class RegisterTiles:
    """The vector registers of a CPU.

    Attributes
    ----------
    lanes
        Values of float32 in one.
    registers
        How many there are.
    """

    lanes: int
    registers: int

    def choose(self, kind: Kind, rows: int, columns: int, single: int = 0) -> Tile:
        """Return the tile that computes some rows and columns fastest; it is no larger than these.

        Parameters
        ----------
        kind
            Whether values of neighbouring columns are made of one number (``rows``) or of one each (``places``).
        rows, columns
            At least 1 column.
        single
            How many more rows are computed one by one.
        """
        lanes = min(self.lanes, 1 << columns.bit_length() - 1)
        fitting = [
            Tile(r, b, lanes) for r, b in self._sizes(kind, lanes) if b * lanes <= columns and (r <= rows or r == 1)
        ]
        return min(fitting, key=lambda tile: (tile.time(rows, columns, single), -tile.rows * tile.vectors))

    @staticmethod
    def functions(text: str) -> str:
        """Return the functions that a text calls: compiling all of them would take as long as many a kernel."""
        called = sorted(set(re.findall(r"\b(rows|places|sums|panel)_(\d+)_(\d+)_(\d+)((?:_\d+)*)\(", text)))
        if not called:
            return ""
        lines = [f"DEFINE_LANES({lanes})" for lanes in sorted({lanes for *_, lanes, _ in called})]
        lines += [
            f"DEFINE_{kind.upper()}({', '.join(sizes)}{more.replace('_', ', ')})" for kind, *sizes, more in called
        ]
        return "\n".join([_TEXT.strip(), *lines, ""])

    def _sizes(self, kind: Kind, lanes: int) -> _Sizes:
        if lanes < self.lanes:
            return _NARROW
        return (_MANY if self.registers >= 32 else _FEW)[kind]
