/* aten::add.Tensor */
/* aten::gelu */
/* aten::native_layer_norm */
static void add_gelu_add_native_layer_norm_9acaa2bcdb(
        const f32 *restrict x0, const f32 *restrict x1, const f32 *restrict x2, const f32 *restrict x3,
        const f32 *restrict x4, f32 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for if (n0 * n1 > 10922)
    for (i64 i0 = 0; i0 < n0; i0++) {
        f32 kept[n1];
        f32 sum_so_far = 0;
        #pragma omp simd reduction(+:sum_so_far)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 add = x0[i0 * n1 + r0] + x1[r0];
            const f32 gelu = (add * 0.5f) * (1.0f + erf_f32(add * 0.70710677f));
            const f32 add_1 = gelu + x2[i0 * n1 + r0];
            kept[r0] = add_1;
            sum_so_far += add_1;
        }
        const f32 row_sum = sum_so_far;
        const f32 t = row_sum / (f32)n1;
        f32 sum_so_far_1 = 0;
        #pragma omp simd reduction(+:sum_so_far_1)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 t_1 = kept[r0] - t;
            sum_so_far_1 += t_1 * t_1;
        }
        const f32 row_sum_1 = sum_so_far_1;
        const f32 t_2 = 1.0f / sqrtf((row_sum_1 / (f32)n1) + 1e-05f);
        #pragma omp simd
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 native_layer_norm = x3[r0] + (((kept[r0] - t) * t_2) * x4[r0]);
            y0[i0 * n1 + r0] = native_layer_norm;
        }
    }
}
