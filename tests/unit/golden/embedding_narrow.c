/* aten::embedding */
static void embedding_beb6cea734(
        const i64 *restrict x0, const f32 *restrict x1, f32 *restrict y0, i64 n0_wide, i64 n1_wide, i64 n2_wide,
        i64 *report) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    const i32 n2 = (i32)n2_wide;
    #pragma omp parallel for if ((i64)n2 * n1 > 32768)
    for (i32 i0 = 0; i0 < n2; i0++) {
        i64 k = x0[i0];
        if (k < 0 || k >= n0) { *report = 1; k = 0; }
        #pragma omp simd
        for (i32 i1 = 0; i1 < n1; i1++) {
            const f32 embedding = x1[(i32)k * n1 + i1];
            y0[i0 * n1 + i1] = embedding;
        }
    }
}
