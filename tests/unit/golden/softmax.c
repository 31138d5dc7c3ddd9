/* aten::_softmax */
static void softmax_0e0fbe19d8(const f32 *restrict x0, f32 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for if (n0 * n1 > 10922)
    for (i64 i0 = 0; i0 < n0; i0++) {
        f32 kept[n1];
        f32 fmax_so_far = -INFINITY;
        #pragma omp simd reduction(max:fmax_so_far)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 taken = x0[i0 * n1 + r0];
            fmax_so_far = taken > fmax_so_far ? taken : fmax_so_far;
        }
        const f32 row_fmax = fmax_so_far;
        f32 sum_so_far = 0;
        #pragma omp simd reduction(+:sum_so_far)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 t = exp_f32(x0[i0 * n1 + r0] - row_fmax);
            kept[r0] = t;
            sum_so_far += t;
        }
        const f32 row_sum = sum_so_far;
        const f32 t_1 = 1.0f / row_sum;
        #pragma omp simd
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 softmax = kept[r0] * t_1;
            y0[i0 * n1 + r0] = softmax;
        }
    }
}
