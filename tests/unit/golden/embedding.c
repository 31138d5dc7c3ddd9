/* aten::embedding */
static void embedding_e21797c240(
        const i64 *restrict x0, const f32 *restrict x1, f32 *restrict y0, i64 n0, i64 n1, i64 n2, i64 *report) {
    #pragma omp parallel for if (n2 * n1 > 32768)
    for (i64 i0 = 0; i0 < n2; i0++) {
        i64 k = x0[i0];
        if (k < 0 || k >= n0) { *report = 1; k = 0; }
        #pragma omp simd
        for (i64 i1 = 0; i1 < n1; i1++) {
            const f32 embedding = x1[k * n1 + i1];
            y0[i0 * n1 + i1] = embedding;
        }
    }
}
