/* aten::constant_pad_nd */
static void constant_pad_nd_5bfeb7c115(
        const f32 *restrict x0, f32 *restrict y0, i64 n0_wide, i64 n1_wide, i64 n2_wide, i64 n3_wide, i64 n4_wide,
        i64 n5_wide, i64 n6_wide, i64 n7_wide) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    const i32 n2 = (i32)n2_wide;
    const i32 n3 = (i32)n3_wide;
    const i32 n4 = (i32)n4_wide;
    const i32 n5 = (i32)n5_wide;
    const i32 n6 = (i32)n6_wide;
    const i32 n7 = (i32)n7_wide;
    #pragma omp parallel for collapse(2) if ((i64)n4 * n5 * n6 > 16384)
    for (i32 i0 = 0; i0 < n4; i0++) {
        for (i32 i1 = 0; i1 < n5; i1++) {
            const i64 at = (i64)(i1 - 3);
            const i32 t = (at >= 0) & (at < (i64)n0);
            #pragma omp simd
            for (i32 i2 = 0; i2 < n6; i2++) {
                const i64 at_1 = (i64)(i2 - 1);
                const i32 t_1 = t & ((at_1 >= 0) & (at_1 < (i64)n1));
                const f32 constant_pad_nd = t_1 ? x0[i0 * n2 + i1 * n1 + i2 - n3] : 0.5f;
                y0[i0 * n7 + i1 * n6 + i2] = constant_pad_nd;
            }
        }
    }
}
