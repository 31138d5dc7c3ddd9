/* aten::sum.dim_IntList */
static void sum_0e83610acb(const f32 *restrict x0, f32 *restrict y0, i64 n0, i64 n1) {
    for (i64 i0_0 = 0; i0_0 < n0; i0_0 += 80) {
        const i64 i0_end = i0_0 + 80 < n0 ? i0_0 + 80 : n0;
        f64 sum_so_far[80];
        for (i64 lane = 0; lane < 80; lane++) { sum_so_far[lane] = 0; }
        for (i64 r0_0 = 0; r0_0 < n1; r0_0 += 32) {
            f32 sum_so_far_chunk[80] = {0};
            for (i64 r0 = r0_0; r0 < (r0_0 + 32 < n1 ? r0_0 + 32 : n1); r0++) {
                #pragma omp simd
                for (i64 i0 = i0_0; i0 < i0_end; i0++) {
                    sum_so_far_chunk[i0 - i0_0] += x0[r0 * n0 + i0];
                }
            }
            for (i64 lane = 0; lane < 80; lane++) { sum_so_far[lane] += sum_so_far_chunk[lane]; }
        }
        f32 sum[80];
        for (i64 lane = 0; lane < 80; lane++) { sum[lane] = (f32)sum_so_far[lane]; }
        #pragma omp simd
        for (i64 i0 = i0_0; i0 < i0_end; i0++) {
            y0[i0] = sum[i0 - i0_0];
        }
    }
}
