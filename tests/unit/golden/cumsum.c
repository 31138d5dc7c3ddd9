/* aten::cumsum */
static void cumsum_5e4e52de9a(const f32 *restrict x0, f32 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for if (n0 > 512)
    for (i64 d0 = 0; d0 < n0; d0++) {
        f64 total = 0.0;
        for (i64 j = 0; j < n1; j++) {
            total = total + (f64)x0[d0 * n1 + j];
            y0[d0 * n1 + j] = (f32)total;
        }
    }
}
