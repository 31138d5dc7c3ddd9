/* aten::constant_pad_nd */
static void constant_pad_nd_1eaf894f00(
        const f32 *restrict x0, f32 *restrict y0, i64 n0, i64 n1, i64 n2, i64 n3, i64 n4, i64 n5, i64 n6, i64 n7) {
    #pragma omp parallel for collapse(2) if (n4 * n5 * n6 > 16384)
    for (i64 i0 = 0; i0 < n4; i0++) {
        for (i64 i1 = 0; i1 < n5; i1++) {
            const i64 at = i1 - 3;
            const i32 t = (at >= 0) & (at < n0);
            #pragma omp simd
            for (i64 i2 = 0; i2 < n6; i2++) {
                const i64 at_1 = i2 - 1;
                const i32 t_1 = t & ((at_1 >= 0) & (at_1 < n1));
                const f32 constant_pad_nd = t_1 ? x0[i0 * n2 + i1 * n1 + i2 - n3] : 0.5f;
                y0[i0 * n7 + i1 * n6 + i2] = constant_pad_nd;
            }
        }
    }
}
